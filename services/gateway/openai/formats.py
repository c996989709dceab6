"""What a response looks like, in a stream and whole: one class for chat completions, one for completions."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.gateway.record import ResponseRecord
from shared.messages import TokenEvent, TokenLogprob

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(slots=True)
class Choice:
    """One sequence's answer so far."""

    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    def add(self, event: TokenEvent) -> None:
        self.text.append(event.text)
        if event.logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(event.logprobs)
        self.num_prompt_tokens, self.num_cached_tokens = event.num_prompt_tokens, event.num_cached_tokens
        self.num_output_tokens = event.position
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason


class Format(Protocol):
    """How an endpoint writes its answer."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice, before any token."""
        ...

    def chunks(self, choice: Choice, event: TokenEvent) -> list[dict[str, Any]]:
        """The chunks that an event makes; none, if nothing of it is for the client."""
        ...

    def usage_chunk(self, choices: list[Choice]) -> dict[str, Any]:
        """The last chunk, if the client asked for usage."""
        ...

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        """The answer of a request that did not ask for a stream."""
        ...


def usage(choices: list[Choice], n: int) -> dict[str, Any]:
    """A prompt counts once, however many choices were drawn from it."""
    firsts = choices[::n]
    prompt_tokens = sum(choice.num_prompt_tokens for choice in firsts)
    completion_tokens = sum(choice.num_output_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in firsts)},
    }


def make_chunk(head: dict[str, Any], choices: list[dict[str, Any]], record: ResponseRecord) -> dict[str, Any]:
    """A chunk of a stream; where the client asked for usage, all but the last say that it is null."""
    chunk = {**head, "choices": choices}
    return {**chunk, "usage": None} if record.has_usage else chunk


class ChatFormat:
    def __init__(self, record: ResponseRecord) -> None:
        self.record = record

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}])

    def chunks(self, choice: Choice, event: TokenEvent) -> list[dict[str, Any]]:
        made = []
        if event.text or event.logprobs:
            logprobs = chat_logprobs(event.logprobs) if event.logprobs is not None else None
            made.append(self._chunk([{"index": choice.index, "delta": {"content": event.text}, "logprobs": logprobs, "finish_reason": None}]))
        if event.finish_reason is not None:
            end = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": event.finish_reason, "stop_reason": event.stop_reason}
            made.append(self._chunk([end]))
        return made

    def usage_chunk(self, choices: list[Choice]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage(choices, self.record.n)}

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        return {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                    "logprobs": chat_logprobs(choice.logprobs) if choice.logprobs is not None else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for choice in choices
            ],
            "usage": usage(choices, self.record.n),
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return make_chunk(self._head("chat.completion.chunk"), choices, self.record)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.record.response_id, "object": kind, "created": self.record.created, "model": self.record.model}


class CompletionFormat:
    def __init__(self, record: ResponseRecord) -> None:
        self.record = record
        self._offsets: dict[int, int] = {}  # by choice: characters of text so far, for text_offset

    def opening(self, index: int) -> None:
        """None: completions begin with their first token."""

    def chunks(self, choice: Choice, event: TokenEvent) -> list[dict[str, Any]]:
        if not event.text and not event.logprobs and event.finish_reason is None:
            return []
        logprobs = self._logprobs(choice.index, event.logprobs) if event.logprobs is not None else None
        return [
            self._chunk(
                [{"index": choice.index, "text": event.text, "logprobs": logprobs, "finish_reason": event.finish_reason, "stop_reason": event.stop_reason}]
            )
        ]

    def usage_chunk(self, choices: list[Choice]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage(choices, self.record.n)}

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        return {
            **self._head(),
            "choices": [
                {
                    "index": choice.index,
                    "text": "".join(choice.text),
                    "logprobs": self._logprobs(choice.index, choice.logprobs) if choice.logprobs is not None else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for choice in choices
            ],
            "usage": usage(choices, self.record.n),
        }

    def _logprobs(self, index: int, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """OpenAI's old form: four lists in step."""
        entries = list(logprobs)
        offsets, at = [], self._offsets.get(index, 0)
        for entry in entries:
            offsets.append(at)
            at += len(entry.token)
        self._offsets[index] = at
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [{top.token: finite(top.logprob) for top in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return make_chunk(self._head(), choices, self.record)

    def _head(self) -> dict[str, Any]:
        return {"id": self.record.response_id, "object": "text_completion", "created": self.record.created, "model": self.record.model}


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": entry.token,
                "logprob": finite(entry.logprob),
                "bytes": list(entry.raw),
                "top_logprobs": [{"token": top.token, "logprob": finite(top.logprob), "bytes": list(top.raw)} for top in entry.top],
            }
            for entry in logprobs
        ],
        "refusal": None,
    }


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def format_for(record: ResponseRecord) -> Format:
    return ChatFormat(record) if record.kind == "chat.completion" else CompletionFormat(record)
