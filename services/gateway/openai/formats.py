"""What a response looks like, in a stream and whole: one class for chat completions, one for completions."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.gateway.openai.answers import Answer, delta_of
from services.gateway.openai.prompt_logprobs import by_token_id, echoed, finite
from services.gateway.record import ResponseRecord
from shared.messages import Float32Array, PromptLogprobs, TokenEvent, TokenLogprob


@dataclass(slots=True)
class Choice:
    """One sequence's answer so far."""

    index: int
    answer: Answer | None = None  # the text, parsed; None: it is not to be
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    embedding: Float32Array | None = None

    @classmethod
    def begin(cls, index: int, record: ResponseRecord) -> "Choice":
        answer = Answer(record.parsing, f"{record.response_id}.{index}", has_reasoning=record.has_reasoning) if record.parsing is not None else None
        return cls(index, answer)

    def add(self, event: TokenEvent) -> None:
        self.text.append(event.text)
        if event.logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(event.logprobs)
        self.embedding = event.embedding if event.embedding is not None else self.embedding
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        if event.num_prompt_tokens:  # an end that a gateway wrote does not know it
            self.num_prompt_tokens, self.num_cached_tokens = event.num_prompt_tokens, event.num_cached_tokens
        self.num_output_tokens = event.position
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        if self.answer is not None:
            self.answer.add(event.text, is_end=event.finish_reason is not None)
            if self.answer.has_called and event.finish_reason == "stop":
                self.finish_reason = "tool_calls"


class Format(Protocol):
    """How an endpoint writes its answer."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice, before any token."""
        ...

    def chunks(self, choice: Choice, event: TokenEvent) -> list[dict[str, Any]]:
        """The chunks that an event makes, which the choice has been given; none, if nothing of it is for the client."""
        ...

    def end(self, choice: Choice) -> dict[str, Any]:
        """The chunk that says why a choice has ended, alone."""
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
    thinking = [choice.answer.num_reasoning_tokens for choice in choices if choice.answer is not None and choice.answer.is_reasoning_model]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in firsts)},
        **({"completion_tokens_details": {"reasoning_tokens": sum(thinking)}} if thinking else {}),
    }


def make_chunk(head: dict[str, Any], made: list[dict[str, Any]], record: ResponseRecord, choice: Choice | None) -> dict[str, Any]:
    """A chunk of a stream. Where the client asked for usage, all but the last say that it is null, or what it is so far of the chunk's choice."""
    chunk = {**head, "choices": made}
    if not record.has_usage:
        return chunk
    return {**chunk, "usage": usage([choice], 1) if record.has_continuous_usage and choice is not None else None}


class ChatFormat:
    def __init__(self, record: ResponseRecord) -> None:
        self.record = record

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}], None)

    def chunks(self, choice: Choice, event: TokenEvent) -> list[dict[str, Any]]:
        made = []
        of_prompt = self._of_prompt(choice.index, event.prompt_logprobs)
        delta = delta_of(choice.answer) if choice.answer is not None else {"content": event.text} if event.text else {}
        if delta or event.logprobs or of_prompt:
            logprobs = chat_logprobs(event.logprobs) if event.logprobs is not None else None
            own = {"index": choice.index, "delta": delta or {"content": ""}, "logprobs": logprobs, "finish_reason": None}
            made.append(self._chunk([own], choice) | of_prompt)
        return [*made, self.end(choice)] if event.finish_reason is not None else made

    def end(self, choice: Choice) -> dict[str, Any]:
        own = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return self._chunk([own], choice)

    def usage_chunk(self, choices: list[Choice]) -> dict[str, Any]:
        return self._chunk([], None) | {"usage": usage(choices, self.record.n)}

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        return {
            **self._head("chat.completion"),
            "service_tier": "default",
            "choices": [
                {
                    "index": choice.index,
                    "message": {
                        "role": "assistant",
                        "refusal": None,
                        **(choice.answer.message() if choice.answer is not None else {"content": "".join(choice.text)}),
                    },
                    "logprobs": chat_logprobs(choice.logprobs) if choice.logprobs is not None else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for choice in choices
            ],
            "usage": usage(choices, self.record.n),
            **self._of_prompt(0, choices[0].prompt_logprobs),
        }

    def _of_prompt(self, index: int, prompt: PromptLogprobs | None) -> dict[str, Any]:
        """The field of the answer, for all of its choices have one prompt: the first brings it."""
        return prompt_field(self.record, prompt) if index == 0 else {}

    def _chunk(self, made: list[dict[str, Any]], choice: Choice | None) -> dict[str, Any]:
        return make_chunk(self._head("chat.completion.chunk"), made, self.record, choice)

    def _head(self, kind: str) -> dict[str, Any]:
        return head_of(self.record, kind)


class CompletionFormat:
    def __init__(self, record: ResponseRecord) -> None:
        self.record = record

    def opening(self, index: int) -> None:
        """None: completions begin with their first token."""

    def chunks(self, choice: Choice, event: TokenEvent) -> list[dict[str, Any]]:
        prompt = event.prompt_logprobs
        if not event.text and not event.logprobs and event.finish_reason is None and prompt is None:
            return []
        own = {
            "index": choice.index,
            "text": event.text,
            "logprobs": self._logprobs(event.logprobs, prompt),
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
        }
        return [self._chunk([own | prompt_field(self.record, prompt)], choice)]

    def end(self, choice: Choice) -> dict[str, Any]:
        own = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return self._chunk([own], choice)

    def usage_chunk(self, choices: list[Choice]) -> dict[str, Any]:
        return self._chunk([], None) | {"usage": usage(choices, self.record.n)}

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        return {
            **head_of(self.record, "text_completion"),
            "choices": [
                {
                    "index": choice.index,
                    "text": "".join(choice.text),
                    "logprobs": self._logprobs(choice.logprobs, choice.prompt_logprobs),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    **prompt_field(self.record, choice.prompt_logprobs),
                }
                for choice in choices
            ],
            "usage": usage(choices, self.record.n),
        }

    def _logprobs(self, logprobs: Iterable[TokenLogprob] | None, prompt: PromptLogprobs | None) -> dict[str, Any] | None:
        """OpenAI's old form: four lists in step, over what is echoed of the prompt and the answer."""
        num_echoed = self.record.num_echo_logprobs if prompt is not None else None
        if logprobs is None and num_echoed is None:
            return None
        tokens, token_logprobs, top_logprobs, offsets = echoed(prompt, num_echoed) if prompt is not None and num_echoed is not None else ([], [], [], [])
        for entry in logprobs or ():
            tokens.append(entry.token)
            token_logprobs.append(finite(entry.logprob))
            top_logprobs.append({top.token: finite(top.logprob) for top in entry.top})
            offsets.append(entry.text_offset)
        return {"tokens": tokens, "token_logprobs": token_logprobs, "top_logprobs": top_logprobs, "text_offset": offsets}

    def _chunk(self, made: list[dict[str, Any]], choice: Choice | None) -> dict[str, Any]:
        return make_chunk(head_of(self.record, "text_completion"), made, self.record, choice)


def head_of(record: ResponseRecord, kind: str) -> dict[str, Any]:
    fingerprint = record.fingerprint or None
    return {"id": record.response_id, "object": kind, "created": record.created, "model": record.model, "system_fingerprint": fingerprint}


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


def prompt_field(record: ResponseRecord, prompt: PromptLogprobs | None) -> dict[str, Any]:
    """The field prompt_logprobs, where the client asked for it and the prompt's are here."""
    if prompt is None or record.num_prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": by_token_id(prompt, record.num_prompt_logprobs)}


def format_for(record: ResponseRecord) -> Format:
    """Of a response of any API: what is no completion is a chat inside."""
    return CompletionFormat(record) if record.kind == "text_completion" else ChatFormat(record)
