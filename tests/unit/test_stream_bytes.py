"""A stream's bytes: an event for each token, and for a client that is behind one for several."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from services.gateway.answering.responder import Responder
from services.requests.store.record import make_record
from shared.process.clock import Clock
from shared.wire.logprobs import TokenLogprob
from shared.wire.messages import TokenEvent

NO_MEASURE = SimpleNamespace(begin=lambda *_: None)


def responder(num_sequences: int = 1) -> Responder:
    record = make_record("text_completion", "m", "m", num_prompts=1, n=num_sequences, has_usage=False)
    timelines = dict.fromkeys(record.request_ids)
    positions = [0] * num_sequences
    generation: Any = SimpleNamespace(
        record=record,
        request_ids=record.request_ids,
        positions=positions,
        max_tokens=[None] * num_sequences,
        subscription=SimpleNamespace(timelines=timelines),
    )
    return Responder(generation, NO_MEASURE, 1.0, has_positions=True)  # type: ignore[arg-type]


def events_of(encoded: bytes) -> list[tuple[str, int, str, str | None]]:
    """Ids, choices, texts and finish reasons."""
    found = []
    for block in encoded.decode().split("\n\n")[:-1]:
        head, data = block.split("\ndata: ")
        [choice] = json.loads(data)["choices"]
        found.append((head.removeprefix("id: "), choice["index"], choice["text"], choice["finish_reason"]))
    return found


def token(position: int, text: str, **fields: Any) -> TokenEvent:
    return replace(TokenEvent("r", position, position, text, 9), **fields)


LOGPROB = TokenLogprob("c", b"c", -0.5, (), token_id=3)
ANSWER = [
    token(1, "a"),
    token(2, "b"),
    token(3, ""),
    token(4, "c", logprobs=(LOGPROB,)),
    token(5, "d"),
    token(6, "é"),
    token(7, "f", finish_reason="length"),
]


def test_each_token_has_an_event_with_its_position() -> None:
    encoded, failure = responder()._encode([(0, event) for event in ANSWER], [0])
    assert failure is None
    assert events_of(encoded) == [
        ("1", 0, "a", None),
        ("2", 0, "b", None),
        ("4", 0, "c", None),
        ("5", 0, "d", None),
        ("6", 0, "é", None),
        ("7", 0, "f", "length"),
    ]


def test_a_client_that_is_behind_gets_several_tokens_in_an_event() -> None:
    encoded, _ = responder()._encode([(0, event) for event in ANSWER], [0], joins=True)
    assert events_of(encoded) == [
        ("2", 0, "ab", None),
        ("4", 0, "c", None),
        ("6", 0, "dé", None),
        ("7", 0, "f", "length"),
    ]


def test_joined_events_are_of_one_choice_and_their_ids_are_positions_of_all() -> None:
    mixed = [
        (0, token(1, "a")),
        (0, token(2, "b")),
        (1, token(1, "x")),
        (1, token(2, "y")),
        (0, token(3, "c")),
        (0, token(0, "", token_id=None, finish_reason="error")),
    ]
    positions = [0, 0]
    encoded, failure = responder(2)._encode(mixed, positions, joins=True)
    assert events_of(encoded) == [("2,0", 0, "ab", None), ("2,2", 1, "xy", None), ("3,2", 0, "c", None)]
    assert failure is not None and positions == [3, 2]


def test_a_client_is_behind_when_it_takes_longer_than_a_tenth_of_a_second_to_take_an_event() -> None:
    """The clock is that which the response is measured with."""
    now, pauses = 0.0, iter((0.05, 0.11, 0.05))
    batches = iter([(0, token(position, "x")), (0, token(position + 1, "y"))] for position in (3, 5, 7))
    streaming = responder()
    streaming.measured = SimpleNamespace(  # type: ignore[assignment]
        clock=Clock(monotonic=lambda: now), event=lambda *_: None, failure=None
    )

    async def following(timeout_s: float) -> list[tuple[int, TokenEvent]]:
        return next(batches)

    streaming.generation.next = following  # type: ignore[method-assign]

    async def read() -> list[int]:
        nonlocal now
        counts = []
        async for encoded in streaming._chunks([(0, token(1, "a")), (0, token(2, "b"))]):
            counts.append(len(events_of(encoded)))
            if len(counts) == 4:
                break
            now += next(pauses)
        return counts

    assert asyncio.run(read()) == [2, 2, 1, 2]
