"""What a response looks like, in a stream and whole: one class for chat completions, one for completions."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from services.gateway.openai.answers import Answer, delta_of
from services.gateway.openai.prompt_logprobs import EchoedLogprobs, by_token_id, echoed, finite, likeliest
from services.gateway.parsing.answer import FORCED
from services.gateway.record import ResponseRecord
from shared.model.arrays import Float32Array, Int32Array
from shared.wire.logprobs import PromptLogprobs, TokenLogprob, TopLogprob
from shared.wire.messages import TokenEvent


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
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: Int32Array | None = None
    embedding: Float32Array | None = None
    schema_errors: list[dict[str, Any]] = field(default_factory=list)  # where it breaks what of its schema could not be enforced

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
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        if event.prompt_token_ids is not None:
            self.prompt_token_ids = event.prompt_token_ids
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        if self.answer is not None:
            self.answer.add(event.text, is_end=event.finish_reason is not None)
            if self.answer.has_called and event.finish_reason == "stop":
                self.finish_reason = "function_call" if self.answer.is_legacy else "tool_calls"


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
        """The answer of a request that did not ask for a stream, but for its usage."""
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
        parsing = self.record.parsing
        begins_with_call = parsing is not None and parsing.tool_calls in FORCED and not parsing.reasoning
        delta = {"role": "assistant", "content": None if begins_with_call else ""}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], None)

    def chunks(self, choice: Choice, event: TokenEvent) -> list[dict[str, Any]]:
        made = []
        of_prompt = self._of_prompt(choice.index, event.prompt_logprobs) | self._prompt_ids(choice.index, event.prompt_token_ids)
        ids = ids_field(self.record, [] if event.token_id is None else [event.token_id])
        delta = delta_of(choice.answer) if choice.answer is not None else {"content": event.text} if event.text else {}
        if delta or any(not each.is_end for each in event.logprobs or ()) or of_prompt or ids.get("token_ids"):
            logprobs = chat_logprobs(event.logprobs, self.record) if event.logprobs is not None else None
            own = {"index": choice.index, "delta": delta or {"content": ""}, "logprobs": logprobs, "finish_reason": None} | ids
            made.append(self._chunk([own], choice) | of_prompt)
        return [*made, self.end(choice)] if event.finish_reason is not None else made

    def end(self, choice: Choice) -> dict[str, Any]:
        own = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return self._chunk([own], choice) | errors_field([choice])

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
                    "logprobs": chat_logprobs(choice.logprobs, self.record) if choice.logprobs is not None else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    **ids_field(self.record, choice.token_ids),
                }
                for choice in choices
            ],
            **self._of_prompt(0, choices[0].prompt_logprobs),
            **self._prompt_ids(0, choices[0].prompt_token_ids),
            **errors_field(choices),
        }

    def _of_prompt(self, index: int, prompt: PromptLogprobs | None) -> dict[str, Any]:
        """The field of the answer, for all of its choices have one prompt: the first brings it."""
        return prompt_field(self.record, prompt) if index == 0 else {}

    def _prompt_ids(self, index: int, token_ids: Int32Array | None) -> dict[str, Any]:
        return prompt_ids_field(self.record, token_ids) if index == 0 else {}

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
        ids = ids_field(self.record, [] if event.token_id is None else [event.token_id])
        if not event.text and not event.logprobs and event.finish_reason is None and prompt is None and not ids.get("token_ids"):
            return []
        own = {
            "index": choice.index,
            "text": event.text,
            "logprobs": self._logprobs(event.logprobs, prompt),
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
        }
        told = errors_field([choice]) if event.finish_reason is not None else {}
        return [self._chunk([own | prompt_field(self.record, prompt) | ids | prompt_ids_field(self.record, event.prompt_token_ids)], choice) | told]

    def end(self, choice: Choice) -> dict[str, Any]:
        own = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return self._chunk([own], choice) | errors_field([choice])

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
                    **ids_field(self.record, choice.token_ids),
                    **prompt_ids_field(self.record, choice.prompt_token_ids),
                }
                for choice in choices
            ],
            **errors_field(choices),
        }

    def _logprobs(self, logprobs: Iterable[TokenLogprob] | None, prompt: PromptLogprobs | None) -> dict[str, Any] | None:
        """OpenAI's old form: four lists in step, over what is echoed of the prompt and the answer."""
        num_echoed = self.record.num_echo_logprobs if prompt is not None else None
        if logprobs is None and num_echoed is None:
            return None
        by_id = self.record.names_tokens_by_id
        listed = echoed(prompt, num_echoed, by_id=by_id) if prompt is not None and num_echoed is not None else EchoedLogprobs()
        for entry in logprobs or ():
            name = name_of(entry, by_id=by_id)
            listed.tokens.append(name)
            listed.token_logprobs.append(finite(entry.logprob))
            listed.top_logprobs.append(likeliest([(name, entry.logprob), *((name_of(top, by_id=by_id), top.logprob) for top in entry.top)]))
            listed.text_offset.append(entry.text_offset)
        return asdict(listed)

    def _chunk(self, made: list[dict[str, Any]], choice: Choice | None) -> dict[str, Any]:
        return make_chunk(head_of(self.record, "text_completion"), made, self.record, choice)


def head_of(record: ResponseRecord, kind: str) -> dict[str, Any]:
    fingerprint = record.fingerprint or None
    return {"id": record.response_id, "object": kind, "created": record.created, "model": record.model, "system_fingerprint": fingerprint}


def chat_logprobs(logprobs: Iterable[TokenLogprob], record: ResponseRecord) -> dict[str, Any]:
    def described(entry: TokenLogprob | TopLogprob) -> dict[str, Any]:
        return {"token": chat_name_of(entry, by_id=record.names_tokens_by_id), "logprob": finite(entry.logprob), "bytes": list(entry.raw)}

    return {"content": [described(entry) | {"top_logprobs": [described(top) for top in entry.top]} for entry in logprobs if not entry.is_end], "refusal": None}


def name_of(entry: TokenLogprob | TopLogprob, *, by_id: bool) -> str:
    """A token in logprobs. Parts of characters, which no text can be, are spelt `bytes:\\xe6\\xb0`."""
    return f"token_id:{entry.token_id}" if by_id else entry.token


def chat_name_of(entry: TokenLogprob | TopLogprob, *, by_id: bool) -> str:
    """The same as chat completions have it: parts of characters are spelt `\\xe6\\xb0`."""
    is_part = entry.token.startswith("bytes:") and entry.token.encode() != entry.raw
    return entry.token.removeprefix("bytes:") if is_part and not by_id else name_of(entry, by_id=by_id)


def ids_field(record: ResponseRecord, token_ids: list[int]) -> dict[str, Any]:
    """The field token_ids, where the client asked for it."""
    return {"token_ids": token_ids} if record.has_token_ids else {}


def errors_field(choices: Iterable[Choice]) -> dict[str, Any]:
    """The field penstock, where an answer breaks its schema."""
    errors = [{"index": choice.index, **error} for choice in choices for error in choice.schema_errors]
    return {"penstock": {"schema_errors": errors}} if errors else {}


def prompt_ids_field(record: ResponseRecord, token_ids: Int32Array | None) -> dict[str, Any]:
    return {"prompt_token_ids": token_ids.tolist()} if record.has_token_ids and token_ids is not None else {}


def best(choices: list[Choice], record: ResponseRecord) -> list[Choice]:
    """The answers: all sequences, or of each prompt's the num_best whose tokens are likeliest on average (an empty one, last)."""
    found = choices
    if record.num_best is not None:
        ranked = [sorted(choices[at : at + record.n], key=mean_logprob, reverse=True)[: record.num_best] for at in range(0, len(choices), record.n)]
        found = [replace(choice, index=index) for index, choice in enumerate(choice for group in ranked for choice in group)]
    return [replace(choice, logprobs=None) for choice in found] if record.hides_logprobs else found


def content_and_calls(choice: Choice, record: ResponseRecord) -> tuple[str, list[tuple[str, str]]]:
    """A whole answer's content, and name and arguments of its calls."""
    answer = parsed(choice, record).answer
    if answer is None:
        return "".join(choice.text), []
    return "".join(answer.content), [(call.name, "".join(call.arguments)) for call in answer.calls]


def parsed(choice: Choice, record: ResponseRecord) -> Choice:
    """A choice whose text came whole, read as its record says."""
    answer = Choice.begin(choice.index, record).answer
    if answer is not None:
        answer.add("".join(choice.text), is_end=True)
    return replace(choice, answer=answer)


def mean_logprob(choice: Choice) -> float:
    logprobs = [entry.logprob for entry in choice.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


def prompt_field(record: ResponseRecord, prompt: PromptLogprobs | None) -> dict[str, Any]:
    """The field prompt_logprobs, where the client asked for it and the prompt's are here."""
    if prompt is None or record.num_prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": by_token_id(prompt, record.num_prompt_logprobs)}


def format_for(record: ResponseRecord) -> Format:
    """Of a response of any API: what is no completion is a chat inside."""
    return CompletionFormat(record) if record.kind == "text_completion" else ChatFormat(record)
