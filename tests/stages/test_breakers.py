"""DRY's breakers in tokens: wherever one stands in a text, its tokens say so, and nowhere else."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer import encoder
from services.tokenizer.encoder import BreakerTable
from shared.model.dry_breakers import Breakers, unpack_breakers
from shared.process.errors import Invalid
from tests.examples import examples
from tests.stages.line_of_stages import text_tokenizer


@cache
def table() -> BreakerTable:
    return BreakerTable(text_tokenizer().backend_tokenizer)


def places(token_ids: list[int], breakers: Breakers) -> list[tuple[int, int]]:
    """Where in the tokens breakers stand, [begin, end)."""
    found = []
    for at, token_id in enumerate(token_ids):
        found += [
            (at, at + 1 + len(tail))
            for tail in breakers.get(token_id, ())
            if tuple(token_ids[at + 1 : at + 1 + len(tail)]) == tail
        ]
    return found


@examples(200)
@given(
    text=st.lists(st.sampled_from(["the gate", "gate", "way", "g", "ate", "\n", ": ", "é", "a token", '"'])).map(
        "".join
    ),
    breaker=st.sampled_from(["gate", "\n", ":", "é", '"', "a to"]),
)
def test_a_breaker_is_found_where_it_stands(text: str, breaker: str) -> None:
    tokenizer: Any = text_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = places(ids, unpack_breakers(table().pack((breaker,))))
    assert all(breaker in tokenizer.decode(ids[begin:end]) for begin, end in found)
    if len(breaker.encode()) == 1:
        assert len(found) == sum(breaker in tokenizer.decode([each]) for each in ids) and bool(found) == (
            breaker in text
        )


def test_several_are_all_there_and_each_once() -> None:
    both, first, second = (unpack_breakers(table().pack(each)) for each in (("\n", ":", "\n"), ("\n",), (":",)))
    assert both == {token: tails for each in (first, second) for token, tails in each.items()}


def test_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "MAX_PACKED", 4)
    with pytest.raises(Invalid, match="too many") as wrong:
        BreakerTable(text_tokenizer().backend_tokenizer).pack(("e",))
    assert wrong.value.param == "dry_sequence_breakers"
