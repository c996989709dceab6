"""A response of the Responses API in the making: its object, and its typed events.

Events are numbered from 0, and they are a function of the token log and of what was asked. So every
reader gets the same events under the same numbers, whichever gateway it asks, and `starting_after`
leaves out what it has.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import orjson

from services.requests.dialects.openai.translate import name_of, told_of
from services.requests.dialects.responses.chat import NAME_HERE
from services.requests.dialects.responses.tools import ToolName, names_of
from services.requests.errors import CLIENT_CLOSED
from services.requests.store.record import ResponseRecord
from services.requests.text.answers.answer import CallDelta, Delta
from services.requests.text.answers.choice import Usage
from services.requests.text.answers.formats import chat_logprobs
from services.requests.text.answers.sse import PING
from shared.wire.logprobs import TokenLogprob
from shared.wire.messages import RequestError, TokenEvent

Json = dict[str, Any]


# Of each kind of call in the chat: the beginning of its item's id, the item, the field that grows,
# and the events that tell of that
CALLS = {
    "function": ("fc", "function_call", "arguments", "function_call_arguments"),
    "custom": ("ctc", "custom_tool_call", "input", "custom_tool_call_input"),
}

FRAGMENT_BYTES = 96  # that one takes in addition to its own


def compact(value: Any) -> bytes:
    """JSON in no more memory than it needs: orjson's own bytes keep their buffer, of 4 KiB at least."""
    return bytes(memoryview(orjson.dumps(value)))


class ResponseEvents:
    """A Translation: what is said becomes output items, one after the other."""

    media_type = "text/event-stream"
    ping = PING
    names: ClassVar[dict[str, str]] = NAME_HERE

    def __init__(self, record: ResponseRecord, asked: Json, *, after: int = -1) -> None:
        """asked: the object's fields that repeat the request; after: the last event that the reader
        has."""
        self.record = record
        self.asked = asked
        self.after = after
        self.status = "queued" if record.is_background else "in_progress"
        self.output: list[Json] = []
        self.error: Json | None = None
        self.reason: str | None = None  # why it is incomplete
        self.usage: Json | None = None
        self._names = names_of(asked.get("tools") or [])
        self._key = record.response_id.rpartition("_")[2]
        self._number = 0
        self._told: Json = {}  # where the answer breaks its schema
        self._open: Json | None = None  # the last item of output, while it grows
        self.num_logprob_bytes = 0
        self._text: list[str] = []  # of the item that grows
        self._logprobs: list[orjson.Fragment] = []  # as JSON, which takes little memory
        # of tokens whose text is held back: of the message that may begin, if no thought and no call does
        self._logprobs_ahead: list[orjson.Fragment] = []

    def whole(self) -> Json:
        return {
            "id": self.record.response_id,
            "object": "response",
            "created_at": self.record.created,
            "model": self.record.model,
            "status": self.status,
            "background": self.record.is_background,
            "error": self.error,
            "incomplete_details": {"reason": self.reason} if self.reason else None,
            "output": [dict(item) for item in self.output],
            "usage": self.usage,
            **self.asked,
            **self._told,
        }

    def encode(self, event: Json) -> bytes:
        if event["sequence_number"] <= self.after and event["type"] != "error":
            return b""
        kind: str = event["type"]
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"

    def opening(self, _: TokenEvent | None) -> list[Json]:
        return [self._lifecycle("created"), self._lifecycle(self.status)]

    def add(self, delta: Delta) -> list[Json]:
        events = self.begun()
        if delta.reasoning:
            events += self._grow("reasoning", delta.reasoning, [])
        logprobs = self._encoded(delta.logprobs) if delta.logprobs else []
        if delta.content or (
            logprobs and self._open is not None and self._open["type"] == "message" and not delta.calls
        ):
            events += self._grow("message", delta.content, self._logprobs_ahead + logprobs)
            self._logprobs_ahead = []
        elif delta.reasoning or delta.calls:
            self._logprobs_ahead = []  # what is no message's text has none in a response
        else:
            self._logprobs_ahead += logprobs
        for part in delta.calls:
            events += self._call(part)
        if delta.finish_reason == "length":
            self.reason = "max_output_tokens"
        return events

    def _encoded(self, logprobs: Sequence[TokenLogprob]) -> list[orjson.Fragment]:
        found = [compact(each) for each in chat_logprobs(logprobs, self.record)["content"]]
        self.num_logprob_bytes += sum(map(len, found)) + FRAGMENT_BYTES * len(found)
        return [orjson.Fragment(each) for each in found]

    def begun(self) -> list[Json]:
        """The log has something: what was queued is in progress."""
        if self.status != "queued":
            return []
        self.status = "in_progress"
        return [self._lifecycle("in_progress")]

    def closing(self, usage: Usage, told: Json) -> list[Json]:
        self._told = told
        events = self._close_item("incomplete" if self.reason else "completed")
        return [*events, self._end("incomplete" if self.reason else "completed", usage)]

    def failed(self, error: RequestError, usage: Usage) -> list[Json]:
        """There is no event of its own for what was cancelled: it is incomplete, and its status
        says why."""
        events = self.begun() + self._close_item("incomplete")
        if error.code == "cancelled":
            return [*events, self._end("cancelled", usage)]
        param = name_of(error.param or "", self.names)
        self.error = {
            "code": "invalid_prompt" if error.status < CLIENT_CLOSED else "server_error",
            "message": told_of(error.message, error.param, param),
        }
        self.error["param"] = param or None
        return [*events, self._end("failed", usage)]

    def interrupted(self, error: RequestError) -> list[Json]:
        """Numbered as the last event that was sent: a client that resumes after it misses nothing."""
        message, last = error.message, max(self._number - 1, self.after)
        if error.code in ("gateway_draining", "too_many_streams"):
            reason = "the gateway is shutting down" if error.code == "gateway_draining" else message
            message = (
                f"{reason}: go on with GET /v1/responses/{self.record.response_id}?stream=true&starting_after={last}"
            )
        return [
            {
                "type": "error",
                "code": error.code or "server_error",
                "message": message,
                "param": error.param,
                "sequence_number": last,
            }
        ]

    def _end(self, status: str, usage: Usage) -> Json:
        self.status = status
        self.usage = {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens or 0},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }
        return self._lifecycle("incomplete" if status == "cancelled" else status)

    def _lifecycle(self, name: str) -> Json:
        return self._event(f"response.{name}", {"response": self.whole()})

    def _event(self, kind: str, fields: Json) -> Json:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _grow(self, kind: str, text: str, logprobs: list[orjson.Fragment]) -> list[Json]:
        """More text of a message or of reasoning, in the item that is open or in a new one."""
        events: list[Json] = []
        if self._open is None or self._open["type"] != kind:
            events += self._close_item("completed")
            own: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            item = {
                "id": self._item_id("msg" if kind == "message" else "rs"),
                "type": kind,
                "status": "in_progress",
                "content": [],
                **own,
            }
            events += [
                self._open_item(item),
                self._event("response.content_part.added", {**self._place(), "part": self._part("", [])}),
            ]
        self._text.append(text)
        self._logprobs += logprobs
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        return [
            *events,
            self._event(name, {**self._place(), "delta": text} | ({"logprobs": logprobs} if kind == "message" else {})),
        ]

    def _call(self, part: CallDelta) -> list[Json]:
        """A part of a call: its item begins, or grows."""
        events: list[Json] = []
        prefix, item_type, field, event = CALLS["custom" if part.call.is_custom else "function"]
        if part.is_new:
            events += self._close_item("completed")
            named = self._names.get(part.call.name, ToolName(part.call.name, None))
            item = {
                "id": self._item_id(prefix),
                "type": item_type,
                "status": "in_progress",
                "call_id": part.call.call_id,
                "name": named.name,
                field: "",
            }
            events.append(self._open_item(item | ({"namespace": named.namespace} if named.namespace else {})))
        if part.arguments:
            self._text.append(part.arguments)
            place = {key: value for key, value in self._place().items() if key != "content_index"}
            events.append(self._event(f"response.{event}.delta", {**place, "delta": part.arguments}))
        return events

    def _open_item(self, item: Json) -> Json:
        self._open, self._text, self._logprobs = item, [], []
        self.output.append(item)
        return self._event("response.output_item.added", {"output_index": len(self.output) - 1, "item": dict(item)})

    def _close_item(self, status: str) -> list[Json]:
        """The item that is open is whole."""
        if (item := self._open) is None:
            return []
        text, place = "".join(self._text), self._place()
        item["status"] = status
        if item["type"] in ("function_call", "custom_tool_call"):
            del place["content_index"]
            _, _, field, event = CALLS["function" if item["type"] == "function_call" else "custom"]
            item[field] = text
            named = {"name": item["name"]} if item["type"] == "function_call" else {}
            events = [self._event(f"response.{event}.done", {**place, **named, field: text})]
        else:
            is_message = item["type"] == "message"
            item["content"] = [part := self._part(text, self._logprobs)]
            name = "response.output_text.done" if is_message else "response.reasoning_text.done"
            events = [self._event(name, {**place, "text": text} | ({"logprobs": self._logprobs} if is_message else {}))]
            events.append(self._event("response.content_part.done", {**place, "part": part}))
        self._open = None
        return [
            *events,
            self._event("response.output_item.done", {"output_index": len(self.output) - 1, "item": dict(item)}),
        ]

    def _part(self, text: str, logprobs: list[orjson.Fragment]) -> Json:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _place(self) -> Json:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.output) - 1, "content_index": 0}

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._key}_{len(self.output)}"
