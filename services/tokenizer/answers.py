"""Answers that the tokenizer gives by itself: texts to tokens and back, and what the tokenizer is.
JSON, in the words of vLLM's API."""

import json
from dataclasses import dataclass
from typing import Any

# of this machine, or not JSON
PRIVATE = ("name_or_path", "vocab_file", "tokenizer_file", "merges_file", "tokenizer_object", "backend")


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of the request's one event, with which it ends."""

    text: str


def tokenized(token_ids: list[int], token_strs: list[str] | None, max_model_len: int, eos_token_ids: tuple[int, ...], opening: str) -> Answer:
    """opening: what the prompt has said of the answer already."""
    said = {
        "count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": token_strs, "eos_token_ids": list(eos_token_ids),
        "opening": opening,
    }  # fmt: skip
    return Answer(json.dumps(said))


def detokenized(text: str) -> Answer:
    """`content` is llama.cpp's name for it."""
    return Answer(json.dumps({"prompt": text, "content": text}))


def rendered_prompt(prompt: str) -> Answer:
    return Answer(json.dumps({"prompt": prompt}))


def describe(tokenizer: Any, model: str, max_model_len: int, eos_token_ids: tuple[int, ...]) -> Answer:
    """tokenizer: of transformers; what its files say of it, but for paths."""
    said = {name: value for name, value in tokenizer.init_kwargs.items() if name not in PRIVATE}
    own = {
        "model": model, "tokenizer_class": type(tokenizer).__name__, "vocab_size": len(tokenizer), "max_model_len": max_model_len,
        "eos_token_ids": list(eos_token_ids), "chat_template": getattr(tokenizer, "chat_template", None),
    }  # fmt: skip
    return Answer(json.dumps(said | own, default=str))
