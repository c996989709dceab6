"""An answer of Ollama's API in the making: lines of JSON, and durations as this gateway sees them."""

import time
from datetime import UTC, datetime
from typing import ClassVar

import orjson

from services.gateway.api.ollama.schemas import NAME_HERE, Json
from services.requests.answers.translate import arguments_of, errors_in, is_broken_off
from services.requests.record import ResponseRecord
from shared.wire.messages import RequestError, TokenEvent

DONE_REASONS = {"length": "length"}  # what else there is, is a stop


class OllamaLines:
    """A Translation: each chunk of the chat is a line. Calls are whole here, so they come at the end, in a line before the last."""

    media_type = "application/x-ndjson"
    ping = b""  # no line may stand for nothing
    names: ClassVar[dict[str, str]] = NAME_HERE

    def __init__(self, record: ResponseRecord, *, is_chat: bool) -> None:
        self.record = record
        self.is_chat = is_chat
        self.done: Json = {}
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Json] = []
        self._logprobs: list[Json] = []
        self._reason = "stop"
        self._told: Json = {}  # where the answer breaks its schema
        self._began_ns = time.monotonic_ns()
        self._first_ns: int | None = None

    def whole(self) -> Json:
        text, thought = "".join(self._texts), "".join(self._thoughts)
        return self.done | self._body(text, thought, self._called()) | ({"logprobs": self._logprobs} if self._logprobs else {})

    def encode(self, event: Json) -> bytes:
        return orjson.dumps(event) + b"\n"

    def opening(self, _: TokenEvent | None) -> list[Json]:
        return []

    def chunk(self, chunk: Json) -> list[Json]:
        self._first_ns = self._first_ns or time.monotonic_ns()
        lines = []
        self._told |= errors_in(chunk)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            text, thought = delta.get("content") or "", delta.get("reasoning_content") or ""
            logprobs = (choice.get("logprobs") or {}).get("content") or []
            self._texts.append(text)
            self._thoughts.append(thought)
            self._logprobs += logprobs
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                if "id" in call:
                    self._calls.append({"id": call["id"], "name": function["name"], "arguments": ""})
                self._calls[-1]["arguments"] += function.get("arguments") or ""
            if text or thought or logprobs:
                lines.append(self._head(is_done=False) | self._body(text, thought, []) | ({"logprobs": logprobs} if logprobs else {}))
            self._reason = DONE_REASONS.get(choice.get("finish_reason") or "", "stop")
        return lines

    def closing(self, usage: Json) -> list[Json]:
        now = time.monotonic_ns()
        first = self._first_ns or now
        self.done = self._head(is_done=True) | {
            "done_reason": self._reason,
            "total_duration": now - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": first - self._began_ns,
            "eval_count": usage["completion_tokens"],
            "eval_duration": now - first,
            **self._told,
        }
        called = self._called()
        calls = [self._head(is_done=False) | self._body("", "", called)] if called else []
        return [*calls, self.done | self._body("", "", [])]

    def failed(self, error: RequestError, _: Json) -> list[Json]:
        return self.interrupted(error)

    def interrupted(self, error: RequestError) -> list[Json]:
        return [{"error": error.message}]

    def _head(self, *, is_done: bool) -> Json:
        return {"model": self.record.model, "created_at": now_text(), "done": is_done}

    def _body(self, text: str, thought: str, calls: list[Json]) -> Json:
        thinking = {"thinking": thought} if thought else {}
        if not self.is_chat:
            return {"response": text, **thinking}
        return {"message": {"role": "assistant", "content": text, **thinking, **({"tool_calls": calls} if calls else {})}}

    def _called(self) -> list[Json]:
        """The calls, but for a last one that was cut off."""
        is_cut = self._reason == "length" and bool(self._calls) and is_broken_off(self._calls[-1]["arguments"])
        return [
            {"id": call["id"], "function": {"index": index, "name": call["name"], "arguments": arguments_of(call["arguments"])}}
            for index, call in enumerate(self._calls[:-1] if is_cut else self._calls)
        ]


def now_text(at_s: float | None = None) -> str:
    at = datetime.now(UTC) if at_s is None else datetime.fromtimestamp(at_s, UTC)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")
