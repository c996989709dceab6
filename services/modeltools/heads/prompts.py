"""The prompts of whose answers heads learn: a file's lines, or built-in ones."""

import hashlib
from itertools import product
from pathlib import Path
from typing import Any

from shared.model.files import ModelFiles
from shared.process.errors import StartupError, words_of

DEFAULT_PROMPTS = "default"
MAX_PROMPT_BYTES = 64 << 20  # of the file
MAX_PROMPT_TOKENS = 512

TASKS = (
    "Explain {} to a child.",
    "What is {}? Answer in one paragraph.",
    "Give me five facts about {}.",
    "Write a short story about {}.",
    "Write a short poem about {}.",
    "List the advantages and disadvantages of {}.",
    "How does one begin to learn about {}?",
    "Write a polite email to a colleague about {}.",
    "Summarize what matters most about {} in three sentences.",
    "Compare {} with something similar.",
    "Write a dialogue between a teacher and a student about {}.",
    "What are common mistakes in {}, and how are they avoided?",
    "Make a step-by-step plan for a week of {}.",
    "Write a Python function that has to do with {}, with a docstring.",
    "Write a JSON object that describes {}, with at least six fields.",
    "Write a Markdown table about {}.",
    "Write a product description for {}.",
    "Ask me ten quiz questions about {}, with the answers.",
    "Tell the history of {} briefly.",
    "Write a news report about {}.",
    "Write an HTML page with a heading and a list about {}.",
    "What would happen without {}?",
    "Write a review of a book about {}.",
    "Argue for {}, and then against it.",
)
TOPICS = (
    "the water cycle", "gardening", "chess", "black holes", "bread", "public libraries", "electric cars",
    "the Roman Empire", "sleep", "photography", "a lighthouse keeper", "recycling", "bees", "a job interview",
    "football", "volcanoes", "budgeting", "the stock market", "a robot that paints", "railways", "coffee",
    "sorting a list", "prime numbers", "weather forecasts", "a village by the sea", "medicine in the Middle Ages",
    "online privacy", "learning the piano", "a birthday party", "the human heart", "hiking in the mountains",
    "databases", "parsing text", "renewable energy", "cats", "a lost letter", "climate", "cooking pasta",
    "a weather station", "bicycles", "museums", "time zones", "a school for dragons", "the moon",
    "writing clear sentences", "first aid", "counting words", "a small business", "vaccines", "the ocean",
)  # fmt: skip


def read_prompts(source: str) -> list[str]:
    """A file's lines, each a prompt; or `default`: the built-in ones, in an order that mixes them
    but is always the same. Raises StartupError.
    """
    if source == DEFAULT_PROMPTS:
        prompts = [task.format(topic) for task, topic in product(TASKS, TOPICS)]
        return sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())
    path = Path(source)
    try:
        if path.stat().st_size > MAX_PROMPT_BYTES:
            raise StartupError(f"--prompts {source}: more than {MAX_PROMPT_BYTES >> 20} MiB")
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError:
        raise StartupError(f"--prompts {source}: not a text in UTF-8") from None
    except OSError as error:
        raise StartupError(f"--prompts {source}: {error.strerror}") from None
    prompts = list(dict.fromkeys(line for line in lines if line))
    if len(prompts) < 2:
        raise StartupError(f"--prompts {source}: it has fewer than two lines; each line is a prompt")
    return prompts


def encode_prompts(prompts: list[str], files: ModelFiles) -> list[list[int]]:
    """Each prompt's tokens, as the user's word in a chat where the model has a chat template, and
    as it is elsewhere. Raises StartupError.
    """
    tokenizer = _load_tokenizer(files)
    try:
        if files.has_chat_template:
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True
                )
                for each in prompts
            ]
        else:
            texts = prompts
        encoded = tokenizer(texts, add_special_tokens=not files.has_chat_template, verbose=False)["input_ids"]
    except Exception as error:  # a template raises what it likes, and so does a tokenizer
        raise StartupError(f"{files.weights}: the prompts can't be encoded: {words_of(error)}") from None
    longest = next(
        (prompt for prompt, ids in zip(prompts, encoded, strict=True) if not 0 < len(ids) <= MAX_PROMPT_TOKENS), None
    )
    if longest is not None:
        raise StartupError(f"a prompt has no tokens, or more than {MAX_PROMPT_TOKENS}: {longest[:60]!r}")
    return [list(ids) for ids in encoded]


def _load_tokenizer(files: ModelFiles) -> Any:
    from transformers import AutoTokenizer  # seconds that a bad flag need not wait for

    try:
        return AutoTokenizer.from_pretrained(files.folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for files it can't use
        raise StartupError(f"{files.weights}: the tokenizer can't be loaded: {words_of(error)}") from None
