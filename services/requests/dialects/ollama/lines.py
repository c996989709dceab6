"""An answer of Ollama's API in the making: lines of JSON, and durations as this gateway sees
them."""

import time
from datetime import UTC, datetime
from typing import ClassVar

import orjson

from services.requests.dialects.ollama.schemas import NAME_HERE, Json
from services.requests.store.record import ResponseRecord
from services.requests.text.answers.answer import Call, Delta
from services.requests.text.answers.choice import Usage
from services.requests.text.answers.formats import chat_logprobs
from services.requests.text.answers.translate import arguments_of, is_broken_off
from shared.wire.messages import RequestError, TokenEvent

DONE_REASONS = {"length": "length"}  # what else there is, is a stop


class OllamaLines:
    """A Translation: what each token adds is a line. Calls are whole here, so they come at the end,
    in a line before the last."""

    media_type = "application/x-ndjson"
    ping = b""  # no line may stand for nothing
    names: ClassVar[dict[str, str]] = NAME_HERE

    def __init__(self, record: ResponseRecord, *, is_chat: bool) -> None:
        self.record = record
        self.is_chat = is_chat
        self.done: Json = {}
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[Call, list[str]]] = []  # with the arguments so far
        self._logprobs: list[Json] = []
        self._reason = "stop"
        self._began_ns = time.monotonic_ns()
        self._first_ns: int | None = None

    def whole(self) -> Json:
        text, thought = "".join(self._texts), "".join(self._thoughts)
        return (
            self.done
            | self._body(text, thought, self._called())
            | ({"logprobs": self._logprobs} if self._logprobs else {})
        )

    def encode(self, event: Json) -> bytes:
        return orjson.dumps(event) + b"\n"

    def opening(self, _: TokenEvent | None) -> list[Json]:
        return []

    def add(self, delta: Delta) -> list[Json]:
        self._first_ns = self._first_ns or time.monotonic_ns()
        logprobs = chat_logprobs(delta.logprobs, self.record)["content"] if delta.logprobs else []
        self._texts.append(delta.content)
        self._thoughts.append(delta.reasoning)
        self._logprobs += logprobs
        for part in delta.calls:
            if part.is_new:
                self._calls.append((part.call, []))
            self._calls[-1][1].append(part.arguments)
        self._reason = DONE_REASONS.get(delta.finish_reason or "", "stop")
        if not (delta.content or delta.reasoning or logprobs):
            return []
        return [
            self._head(is_done=False)
            | self._body(delta.content, delta.reasoning, [])
            | ({"logprobs": logprobs} if logprobs else {})
        ]

    def closing(self, usage: Usage, told: Json) -> list[Json]:
        now = time.monotonic_ns()
        first = self._first_ns or now
        self.done = self._head(is_done=True) | {
            "done_reason": self._reason,
            "total_duration": now - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.num_prompt_tokens,
            "prompt_eval_duration": first - self._began_ns,
            "eval_count": usage.num_output_tokens,
            "eval_duration": now - first,
            **told,
        }
        called = self._called()
        calls = [self._head(is_done=False) | self._body("", "", called)] if called else []
        return [*calls, self.done | self._body("", "", [])]

    def failed(self, error: RequestError, _: Usage) -> list[Json]:
        return self.interrupted(error)

    def interrupted(self, error: RequestError) -> list[Json]:
        return [{"error": error.message}]

    def _head(self, *, is_done: bool) -> Json:
        return {"model": self.record.model, "created_at": now_text(), "done": is_done}

    def _body(self, text: str, thought: str, calls: list[Json]) -> Json:
        thinking = {"thinking": thought} if thought else {}
        if not self.is_chat:
            return {"response": text, **thinking}
        return {
            "message": {"role": "assistant", "content": text, **thinking, **({"tool_calls": calls} if calls else {})}
        }

    def _called(self) -> list[Json]:
        """The calls, but for a last one that was cut off."""
        calls = [(call, "".join(arguments)) for call, arguments in self._calls]
        is_cut = self._reason == "length" and bool(calls) and is_broken_off(calls[-1][1])
        return [
            {"id": call.call_id, "function": {"index": index, "name": call.name, "arguments": arguments_of(arguments)}}
            for index, (call, arguments) in enumerate(calls[:-1] if is_cut else calls)
        ]


def now_text(at_s: float | None = None) -> str:
    at = datetime.now(UTC) if at_s is None else datetime.fromtimestamp(at_s, UTC)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")
