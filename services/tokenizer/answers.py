"""The tokenizer's own answers: texts to tokens and back, and a description of the tokenizer. JSON, with
the names of vLLM's API."""

import json
from dataclasses import dataclass
from typing import Any

# specific to this machine, or not JSON
PRIVATE = ("name_or_path", "vocab_file", "tokenizer_file", "merges_file", "tokenizer_object", "backend")


@dataclass(frozen=True, slots=True)
class TokenizerAnswer:
    """The text of the request's one event, with which it ends."""

    text: str


def tokenized(
    token_ids: list[int],
    max_model_len: int,
    eos_token_ids: tuple[int, ...],
    opening: str,
    *,
    token_strs: list[str] | None,
    pieces: list[bytes] | None,
) -> TokenizerAnswer:
    """opening: the beginning of the answer that the prompt has; token_strs, pieces: each token as the
    vocabulary has it, and its bytes."""
    answer = {
        "count": len(token_ids),
        "max_model_len": max_model_len,
        "tokens": token_ids,
        "token_strs": token_strs,
        "eos_token_ids": list(eos_token_ids),
        "opening": opening,
        "pieces": [piece_of(piece) for piece in pieces] if pieces is not None else None,
    }
    return TokenizerAnswer(json.dumps(answer))


def piece_of(raw: bytes) -> str | list[int]:
    """A token's text, or its bytes if it is a part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def detokenized(text: str) -> TokenizerAnswer:
    """`content` is llama.cpp's name for it."""
    return TokenizerAnswer(json.dumps({"prompt": text, "content": text}))


def rendered_prompt(prompt: str) -> TokenizerAnswer:
    return TokenizerAnswer(json.dumps({"prompt": prompt}))


def describe(tokenizer: Any, model: str, max_model_len: int, eos_token_ids: tuple[int, ...]) -> TokenizerAnswer:
    """Describe a tokenizer of transformers by its files, without their paths."""
    described = {name: value for name, value in tokenizer.init_kwargs.items() if name not in PRIVATE}
    templates = getattr(tokenizer, "chat_template", None)
    named = templates if isinstance(templates, dict) else {"default": templates}
    own = {
        "model": model,
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "max_model_len": max_model_len,
        "eos_token_ids": list(eos_token_ids),
        "chat_template": named.get("default"),
        **({"chat_template_tool_use": named["tool_use"]} if "tool_use" in named else {}),
    }
    return TokenizerAnswer(json.dumps(described | own, default=str))
