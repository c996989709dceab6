"""An answer of Anthropic's API in the making: blocks of content, and the events that tell of
them."""

from typing import ClassVar

import orjson

from services.requests.dialects.anthropic.blocks import Json
from services.requests.dialects.anthropic.chat import NAME_HERE
from services.requests.dialects.anthropic.errors import error_of
from services.requests.store.record import ResponseRecord
from services.requests.text.answers.answer import Delta
from services.requests.text.answers.choice import Usage
from services.requests.text.answers.translate import arguments_of, is_broken_off
from shared.wire.messages import RequestError, TokenEvent

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Of each kind of block: how it begins, and the delta by which it grows
KINDS: dict[str, tuple[Json, str, str]] = {
    "text": ({"type": "text", "text": ""}, "text_delta", "text"),
    "thinking": ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "tool_use": ({"type": "tool_use", "id": "", "name": "", "input": {}}, "input_json_delta", "partial_json"),
}


class MessageEvents:
    """A Translation: what is said becomes blocks, one after the other."""

    media_type = "text/event-stream"
    names: ClassVar[dict[str, str]] = NAME_HERE
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, record: ResponseRecord) -> None:
        self.record = record
        self.content: list[Json] = []
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self.usage: Json = usage_fields(0, 0, 0)
        self._told: Json = {}  # where the answer breaks its schema
        self._is_open = False  # the last block may grow
        self._text: list[str] = []  # of that block

    def whole(self) -> Json:
        return {
            "id": self.record.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.record.model,
            "content": list(self.content),
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": self.usage,
            **self._told,
        }

    def encode(self, event: Json) -> bytes:
        kind: str = event["type"]
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"

    def opening(self, first: TokenEvent | None) -> list[Json]:
        """The prompt's length is in it if it is known: the stream opens with the first token,
        unless that takes long."""
        if first is not None:
            self.usage = usage_fields(first.num_prompt_tokens, first.num_cached_tokens, 0)
        return [{"type": "message_start", "message": self.whole()}]

    def add(self, delta: Delta) -> list[Json]:
        events = []
        if delta.reasoning:
            events += self._grow("thinking", delta.reasoning)
        if delta.content:
            events += self._grow("text", delta.content)
        for part in delta.calls:
            if part.is_new:
                events += self._open("tool_use", {"id": part.call.call_id, "name": part.call.name})
            if part.arguments:
                events += self._grow("tool_use", part.arguments)
        if delta.finish_reason is not None:
            self.stop_reason = STOP_REASONS[delta.finish_reason]
            if self.stop_reason == "end_turn" and any(
                block["type"] == "tool_use" for block in self.content
            ):  # a chat's named tool ends with stop
                self.stop_reason = "tool_use"
            if isinstance(delta.stop_reason, str):
                self.stop_reason, self.stop_sequence = "stop_sequence", delta.stop_reason
        return events

    def closing(self, usage: Usage, told: Json) -> list[Json]:
        self.usage, self._told = (
            usage_fields(usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens),
            told,
        )
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence},
            "usage": self.usage,
            **told,
        }
        return [*self._close(), delta, {"type": "message_stop"}]

    def failed(self, error: RequestError, _: Usage) -> list[Json]:
        return self.interrupted(error)

    def interrupted(self, error: RequestError) -> list[Json]:
        return [error_of(error.status, error.message)]

    def _grow(self, kind: str, text: str) -> list[Json]:
        events = [] if self._is_open and self.content[-1]["type"] == kind else self._open(kind, {})
        self._text.append(text)
        _, name, field = KINDS[kind]
        return [
            *events,
            {"type": "content_block_delta", "index": len(self.content) - 1, "delta": {"type": name, field: text}},
        ]

    def _open(self, kind: str, own: Json) -> list[Json]:
        events = self._close()
        block = KINDS[kind][0] | own
        self.content.append(block)
        self._is_open, self._text = True, []
        return [*events, {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}]

    def _close(self) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        block, text = self.content[-1], "".join(self._text)
        stop = {"type": "content_block_stop", "index": len(self.content) - 1}
        if block["type"] != "tool_use":
            block[KINDS[block["type"]][2]] = text
        elif self.stop_reason == "max_tokens" and is_broken_off(text):
            self.content.pop()  # a stream has told what there was of it: its stop_reason says that it is not whole
        else:
            block["input"] = arguments_of(text)
        return [stop]


def usage_fields(num_prompt: int, num_cached: int, num_output: int) -> Json:
    """Anthropic counts what was cached apart."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }
