"""The text that a model is calibrated and measured on, as windows of tokens."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from shared.model.files import ModelFiles
from shared.process.errors import StartupError

DEFAULT_TEXT = "default"
WINDOW = 512  # tokens
DEFAULT_TOKENS = 16_384  # to calibrate with
HELD_OUT_WINDOWS = 8
MIN_WINDOWS = 5
CHARACTERS_A_TOKEN = 10  # more than any tokenizer makes of one, on average


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows that calibration sees, and those that it does not see. Each [n, length] int64, a
    window beginning as the tokenizer begins a text."""

    calibration: torch.Tensor
    held_out: torch.Tensor


def read_windows(text: str, files: ModelFiles, tokens: int) -> Windows:
    """text: a file's path, or default; tokens: to calibrate with, at most. The last windows are
    held out: eight after these tokens; of a text that is too short for both, at most a fifth.
    Raises StartupError if the text is shorter still, or not one."""
    length = min(WINDOW, files.max_model_len or WINDOW)
    if tokens < MIN_WINDOWS * length:
        raise StartupError(f"--calibration-tokens {tokens}: at least {MIN_WINDOWS * length:,} are needed")
    asked = tokens // length
    wanted = asked + HELD_OUT_WINDOWS
    whole = read_text(text)[: wanted * length * CHARACTERS_A_TOKEN]
    windows = split(whole, _load_tokenizer(files.folder / "tokenizer.json"), length)[:wanted]
    if len(windows) < MIN_WINDOWS:
        raise StartupError(
            f"--calibrate {text}: it has fewer than {MIN_WINDOWS * length:,} tokens, which is too little to calibrate "
            "with"
        )
    held_out = min(HELD_OUT_WINDOWS, max(len(windows) // 5, len(windows) - asked))
    return Windows(windows[:-held_out], windows[-held_out:])


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise StartupError(f"{path}: the tokenizer can't be loaded: {error}") from None


def read_text(text: str) -> str:
    """The file's text, or the default one. Raises StartupError."""
    if text == DEFAULT_TEXT:
        return default_text()
    try:
        return Path(text).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise StartupError(f"--calibrate {text}: not a text in UTF-8") from None
    except OSError as error:
        raise StartupError(f"--calibrate {text}: {error.strerror}") from None


def default_text() -> str:
    """The chapters of Python's language reference that help() shows, which every Python brings, in
    an order that mixes them but is always the same."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        raise StartupError(
            "--calibrate default: this Python came without its documentation (pydoc_data); give a text file"
        ) from None
    return "\n\n".join(sorted(topics.values(), key=lambda topic: hashlib.sha256(topic.encode()).digest()))


def split(text: str, tokenizer: Tokenizer, length: int) -> torch.Tensor:
    """text's tokens in windows [n, length] int64, without what is left at the end; each begins with
    the token that begins a text, if there is one."""
    begun, plain = (tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
    prefix = begun[: begun.index(plain[0])]
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    size = length - len(prefix)
    windows = [prefix + tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]
    return torch.tensor(windows, dtype=torch.int64).view(-1, length)
