"""A GGUF file may take as much of a machine's memory and disk as real ones do."""

import os
import time
from pathlib import Path

import pytest

from shared.model.gguf import checkpoint, tokenizer
from shared.model.gguf.checkpoint import remove_unused
from shared.model.gguf.reader import GgufHead
from shared.model.gguf.tokenizer import make_tokenizer
from shared.process.errors import StartupError


def head_of(tokens: list[str]) -> GgufHead:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(number) for number in range(len(tokens))],
        "tokenizer.ggml.token_type": [1] * len(tokens),
    }
    return GgufHead(Path("hostile.gguf"), metadata, {})


def test_tokens_whose_merges_would_fill_the_memory_are_refused() -> None:
    with pytest.raises(StartupError, match="hostile.gguf: the tokens"):
        make_tokenizer(
            head_of(["a" * length for length in range(1, 1025)])
        )  # half a million merges of 340 million characters
    with pytest.raises(StartupError, match="hostile.gguf: the tokens"):
        make_tokenizer(
            head_of([f"{number:04}" + "x" * 1000 for number in range(2000)])
        )  # none, for which 2,000 million characters were looked at
    with pytest.raises(StartupError, match="hostile.gguf: the tokens"):
        make_tokenizer(head_of(["a" * length for length in range(1, 701)]))  # fewer, of 114 million
    whole = make_tokenizer(head_of(["a" * length for length in range(1, 65)]))  # as a run of spaces is in real ones
    assert len(whole["model"]["merges"]) == 64 * 63 // 2


def test_listed_merges_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def merging(*merges: str) -> GgufHead:
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": ["a", "b", "ab", "ba", "aba"],
            "tokenizer.ggml.merges": list(merges),
        }
        return GgufHead(Path("hostile.gguf"), metadata, {})

    whole = make_tokenizer(merging("a b", "b a", "a ba"))
    assert whole["model"]["merges"] == [("a", "b"), ("b", "a"), ("a", "ba")]
    with pytest.raises(StartupError, match=r"hostile\.gguf: 1048577 merges of 3145731 characters; at most"):
        make_tokenizer(merging(*["a b"] * (tokenizer.MAX_MERGES + 1)))
    monkeypatch.setattr(tokenizer, "MAX_MERGES", 2)
    with pytest.raises(StartupError, match="more than 2 merges"):
        make_tokenizer(head_of(["a" * length for length in range(1, 5)]))


def test_the_cache_forgets_files_that_nobody_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_BYTES", 250)
    day = 24 * 3600
    for name, days, size in (
        ("kept", 200, 900),
        ("a", 0, 100),
        ("b", 2, 100),
        ("c", 3, 100),
        ("d", 0.5, 100),
        ("old", 100, 0),
        (".new-x", 2, 0),
        (".new-y", 0, 0),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_bytes(b"x" * size)
        os.utime(tmp_path / name, (time.time() - days * day,) * 2)
    remove_unused(tmp_path / "kept")
    assert sorted(each.name for each in tmp_path.iterdir()) == [".new-y", "a", "d", "kept"], (
        "b and c: beyond the bound, and not of this day"
    )
