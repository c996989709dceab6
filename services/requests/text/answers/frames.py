"""Frames: a stream's chunks that bring nothing but text, which most are. The bytes around the text
are the same in all of a choice's: they are made once."""

import orjson

from services.requests.store.record import ResponseRecord
from services.requests.text.answers.answer import Delta
from services.requests.text.answers.choice import Choice
from services.requests.text.answers.formats import Format
from shared.wire.messages import TokenEvent

MARK = "\0text\0"  # stands in for a text, to find its place


def is_plain(event: TokenEvent, delta: Delta) -> bool:
    """Whether the chunk of the event, which has added `delta` to its choice, differs from others of
    that choice in its text alone."""
    has_more = event.logprobs is not None or event.prompt_logprobs is not None or event.prompt_token_ids is not None
    return not has_more and event.finish_reason is None and event.token_id is not None and delta.kinds == ["content"]


class Frames:
    """The frames of one response."""

    def __init__(self, form: Format, record: ResponseRecord) -> None:
        self.format = form
        self.is_any = not record.has_token_ids and not record.has_continuous_usage  # else each chunk has figures of its own
        self._around: dict[tuple[int, int], list[bytes]] = {}

    def encode(self, choice: Choice, event: TokenEvent, text: str) -> bytes:
        """The chunk of a plain event, with this text, as orjson writes what the format makes."""
        key = choice.index, len(choice.fingerprints)
        if (around := self._around.get(key)) is None:
            [chunk] = self.format.chunks(choice, event, Delta(MARK, kinds=["content"]))
            around = self._around[key] = orjson.dumps(chunk).split(orjson.dumps(MARK))
        before, behind = around
        return before + orjson.dumps(text) + behind
