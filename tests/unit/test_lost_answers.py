"""A reader's answer whose tokens come again, because Redis had lost them: those it has are dropped,
and others end it.
"""

import asyncio
from typing import Any

import pytest

from services.gateway.generation.subscription import ResponseFailed, Subscription
from shared.wire.messages import TokenEvent

ID = "r.0"


def event(position: int, token_id: int | None, **more: Any) -> TokenEvent:
    return TokenEvent(ID, position, token_id, "x", **more)


def read(subscription: Subscription) -> list[int]:
    return [each.position for each in asyncio.run(subscription.next(0.01))]


@pytest.mark.parametrize("since", [0, 2])
def test_the_same_tokens_again_are_dropped(since: int) -> None:
    subscription = Subscription("r", {ID: since}, 1)
    for position in range(since + 1, 6):
        assert subscription.offer(event(position, 10 + position))
    for position in range(1, 8):
        assert subscription.offer(event(position, 10 + position))
    assert read(subscription) == list(range(since + 1, 8)) and not subscription.has_failed


@pytest.mark.parametrize(
    "again", [event(4, 99), event(4, 14, finish_reason="stop"), event(5, 99, finish_reason="length")]
)
def test_another_token_or_an_earlier_end_is_an_error_behind_what_was_read(again: TokenEvent) -> None:
    subscription = Subscription("r", {ID: 2}, 1)
    for position in (3, 4, 5):
        subscription.offer(event(position, 10 + position))
    subscription.offer(event(1, 99))  # from before this reader came
    assert not subscription.has_failed
    subscription.offer(again)
    assert read(subscription) == [3, 4, 5]
    with pytest.raises(ResponseFailed, match="was not computed again as it was"):
        read(subscription)


@pytest.mark.parametrize("since", [2, 5])
def test_an_end_with_the_last_token_that_was_read_is_the_end(since: int) -> None:
    """A reader that resumed behind the last token, and the sampler says it once more."""
    subscription = Subscription("r", {ID: since}, 1)
    for position in range(since + 1, 6):
        subscription.offer(event(position, 10 + position))
    assert subscription.offer(event(5, 15, finish_reason="length"))
    assert (
        read(subscription) == [*range(since + 1, 6), 5] and not subscription.has_failed and not subscription.unfinished
    )


def test_an_end_that_comes_twice_is_one_end() -> None:
    subscription = Subscription("r", {ID: 0}, 1)
    for _ in range(2):
        subscription.offer(event(1, 11, finish_reason="length"))
    assert read(subscription) == [1] and not subscription.has_failed and not subscription.unfinished
