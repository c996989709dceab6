"""The forms of a response, in a stream and whole: one class for chat completions, one for
completions."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Protocol

import orjson

from services.requests.store.record import ResponseRecord
from services.requests.text.answers.answer import Answer, Call, CallDelta, Delta
from services.requests.text.answers.choice import Choice, Usage, best, usage_of
from services.requests.text.answers.prompt_logprobs import EchoedLogprobs, by_token_id, echoed, finite, likeliest
from shared.model.arrays import Int32Array
from shared.model.parsing.answer import FORCED
from shared.wire.logprobs import PromptLogprobs, TokenLogprob, TopLogprob
from shared.wire.messages import TokenEvent


class ChunkFormat(Protocol):
    """How an endpoint writes its answer."""

    def opening(self, index: int, first: TokenEvent) -> dict[str, Any] | None:
        """The first chunk of a choice, before any token. first: of any choice, the first event."""
        ...

    def chunks(self, choice: Choice, event: TokenEvent, delta: Delta) -> list[dict[str, Any]]:
        """The chunks that an event makes, which has added `delta` to the choice; none, if nothing
        of it is for the client."""
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


def usage_fields(usage: Usage) -> dict[str, Any]:
    """OpenAI's object."""
    details = {
        "reasoning_tokens": usage.num_reasoning_tokens,
        "accepted_prediction_tokens": usage.num_accepted_prediction_tokens,
        "rejected_prediction_tokens": usage.num_rejected_prediction_tokens,
    }
    known = {name: count for name, count in details.items() if count is not None}
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        **({"completion_tokens_details": known} if known else {}),
    }


def delta_fields(delta: Delta, *, is_legacy: bool) -> dict[str, Any]:
    """One delta of a message, so that no connection breaks in the middle of an event."""
    fields: dict[str, Any] = {}
    for kind in delta.kinds:
        if kind == "content":
            fields["content"] = delta.content
        elif kind == "reasoning":
            fields |= {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
        else:
            fields["tool_calls"] = [call_delta(part) for part in delta.calls]
    if is_legacy and "tool_calls" in fields:
        fields["function_call"] = fields.pop("tool_calls")[0]["function"]
    return fields


def call_delta(part: CallDelta) -> dict[str, Any]:
    """An entry of a delta's tool_calls."""
    if part.is_new:
        return {"index": part.number, **call_entry(part.call, part.arguments)}
    kind, field = ("custom", "input") if part.call.is_custom else ("function", "arguments")
    return {"index": part.number, kind: {field: part.arguments}}


def call_entry(call: Call, arguments: str) -> dict[str, Any]:
    """An entry of a message's tool_calls."""
    if call.is_custom:
        return {"id": call.call_id, "type": "custom", "custom": {"name": call.name, "input": arguments}}
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def message_fields(answer: Answer) -> dict[str, Any]:
    """The message's fields, but for its role."""
    content, reasoning = "".join(answer.content), "".join(answer.reasoning)
    made: dict[str, Any] = {"content": content if content or not (answer.calls or reasoning) else None}
    if answer.is_reasoning_model and answer.has_reasoning:
        made |= {"reasoning_content": reasoning or None, "reasoning": reasoning or None}
    if answer.calls and answer.is_legacy:
        made["function_call"] = {"name": answer.calls[0].name, "arguments": "".join(answer.calls[0].arguments)}
    elif answer.calls:
        made["tool_calls"] = [call_entry(call, "".join(call.arguments)) for call in answer.calls]
    return made


def make_chunk(
    head: dict[str, Any], made: list[dict[str, Any]], record: ResponseRecord, choice: Choice | None
) -> dict[str, Any]:
    """A chunk of a stream. Where the client asked for usage, all but the last say that it is null,
    or what it is so far of the chunk's choice."""
    chunk = {**head, **fingerprint_field([choice] if choice is not None else []), "choices": made}
    if not record.has_usage:
        return chunk
    return {
        **chunk,
        "usage": usage_fields(usage_of([choice], 1)) if record.has_continuous_usage and choice is not None else None,
    }


class ChatFormat:
    def __init__(self, record: ResponseRecord) -> None:
        self.record = record
        self._head = head_of(record, "chat.completion.chunk")

    def opening(self, index: int, first: TokenEvent) -> dict[str, Any]:
        parsing = self.record.parsing
        begins_with_call = parsing is not None and parsing.tool_calls in FORCED and not parsing.reasoning
        delta = {"role": "assistant", "content": self.record.echoed or (None if begins_with_call else "")}
        unbegun = Choice(index, num_prompt_tokens=first.num_prompt_tokens, num_cached_tokens=first.num_cached_tokens)
        chunk = self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], unbegun)
        return chunk | self._prompt_ids(index, first.prompt_token_ids)

    def chunks(self, choice: Choice, event: TokenEvent, delta: Delta) -> list[dict[str, Any]]:
        made = []
        of_prompt = self._of_prompt(choice.index, event.prompt_logprobs)
        ids = ids_field(self.record, [] if event.token_id is None else [event.token_id])
        fields = delta_fields(delta, is_legacy=choice.answer is not None and choice.answer.is_legacy)
        if fields or any(not each.is_end for each in delta.logprobs or ()) or of_prompt or ids.get("token_ids"):
            logprobs = chat_logprobs(delta.logprobs, self.record) if delta.logprobs is not None else None
            own = {
                "index": choice.index,
                "delta": fields or {"content": ""},
                "logprobs": logprobs,
                "finish_reason": None,
            } | ids
            made.append(self._chunk([own], choice) | of_prompt)
        return [*made, self.end(choice)] if event.finish_reason is not None else made

    def end(self, choice: Choice) -> dict[str, Any]:
        own = {
            "index": choice.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return self._chunk([own], choice) | errors_field([choice])

    def usage_chunk(self, choices: list[Choice]) -> dict[str, Any]:
        return (
            self._chunk([], None)
            | fingerprint_field(choices)
            | {"usage": usage_fields(usage_of(choices, self.record.n))}
        )

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        return {
            **head_of(self.record, "chat.completion"),
            **fingerprint_field(choices),
            "service_tier": "default",
            "choices": [
                {
                    "index": choice.index,
                    "message": {
                        "role": "assistant",
                        "refusal": None,
                        **self._message(choice),
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

    def _message(self, choice: Choice) -> dict[str, Any]:
        """The message's fields, but for those that all have."""
        fields = message_fields(choice.answer) if choice.answer is not None else {"content": "".join(choice.text)}
        return fields | {"content": self.record.echoed + (fields["content"] or "")} if self.record.echoed else fields

    def _of_prompt(self, index: int, prompt: PromptLogprobs | None) -> dict[str, Any]:
        """The field of the answer, for all of its choices have one prompt: the first brings it."""
        return prompt_field(self.record, prompt) if index == 0 else {}

    def _prompt_ids(self, index: int, token_ids: Int32Array | None) -> dict[str, Any]:
        return prompt_ids_field(self.record, token_ids) if index == 0 else {}

    def _chunk(self, made: list[dict[str, Any]], choice: Choice | None) -> dict[str, Any]:
        return make_chunk(self._head, made, self.record, choice)


class CompletionFormat:
    def __init__(self, record: ResponseRecord) -> None:
        self.record = record
        self._head = head_of(record, "text_completion")

    def opening(self, index: int, first: TokenEvent) -> None:
        """Return None: completions begin with their first token."""

    def chunks(self, choice: Choice, event: TokenEvent, delta: Delta) -> list[dict[str, Any]]:
        prompt = event.prompt_logprobs
        ids = ids_field(self.record, [] if event.token_id is None else [event.token_id])
        if (
            not delta.content
            and not delta.logprobs
            and delta.finish_reason is None
            and prompt is None
            and not ids.get("token_ids")
        ):
            return []
        own = {
            "index": choice.index,
            "text": delta.content,
            "logprobs": self._logprobs(delta.logprobs, prompt),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        schema_errors = errors_field([choice]) if delta.finish_reason is not None else {}
        return [
            self._chunk(
                [own | prompt_field(self.record, prompt) | ids | prompt_ids_field(self.record, event.prompt_token_ids)],
                choice,
            )
            | schema_errors
        ]

    def end(self, choice: Choice) -> dict[str, Any]:
        own = {
            "index": choice.index,
            "text": "",
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return self._chunk([own], choice) | errors_field([choice])

    def usage_chunk(self, choices: list[Choice]) -> dict[str, Any]:
        return (
            self._chunk([], None)
            | fingerprint_field(choices)
            | {"usage": usage_fields(usage_of(choices, self.record.n))}
        )

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        return {
            **self._head,
            **fingerprint_field(choices),
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

    def _logprobs(
        self, logprobs: Iterable[TokenLogprob] | None, prompt: PromptLogprobs | None
    ) -> dict[str, Any] | None:
        """OpenAI's old form: four lists in step, over what is echoed of the prompt and the
        answer."""
        num_echoed = self.record.num_echo_logprobs if prompt is not None else None
        if logprobs is None and num_echoed is None:
            return None
        by_id = self.record.names_tokens_by_id
        listed = (
            echoed(prompt, num_echoed, by_id=by_id)
            if prompt is not None and num_echoed is not None
            else EchoedLogprobs()
        )
        for entry in logprobs or ():
            name = name_of(entry, by_id=by_id)
            listed.tokens.append(name)
            listed.token_logprobs.append(finite(entry.logprob))
            listed.top_logprobs.append(
                likeliest([(name, entry.logprob), *((name_of(top, by_id=by_id), top.logprob) for top in entry.top)])
            )
            listed.text_offset.append(entry.text_offset)
        return asdict(listed)

    def _chunk(self, made: list[dict[str, Any]], choice: Choice | None) -> dict[str, Any]:
        return make_chunk(self._head, made, self.record, choice)


def head_of(record: ResponseRecord, kind: str) -> dict[str, Any]:
    fingerprint = record.fingerprint or None
    return {
        "id": record.response_id,
        "object": kind,
        "created": record.created,
        "model": record.model,
        "system_fingerprint": fingerprint,
    }


def fingerprint_field(choices: list[Choice]) -> dict[str, Any]:
    """The head's field where its tokens say who made them: several fingerprints, joined by +, if
    replicas with different ones computed it. The joined name is no replica's, so the answer does not
    look like one that can be reproduced."""
    found = dict.fromkeys(each for choice in choices for each in choice.fingerprints)
    return {"system_fingerprint": "+".join(found)} if found else {}


def chat_logprobs(logprobs: Iterable[TokenLogprob], record: ResponseRecord) -> dict[str, Any]:
    def described(entry: TokenLogprob | TopLogprob) -> dict[str, Any]:
        return {
            "token": chat_name_of(entry, by_id=record.names_tokens_by_id),
            "logprob": finite(entry.logprob),
            "bytes": list(entry.raw),
        }

    return {
        "content": [
            described(entry) | {"top_logprobs": [described(top) for top in entry.top]}
            for entry in logprobs
            if not entry.is_end
        ],
        "refusal": None,
    }


def name_of(entry: TokenLogprob | TopLogprob, *, by_id: bool) -> str:
    """A token in logprobs. Parts of characters, which no text can be, are spelt
    `bytes:\\xe6\\xb0`."""
    return f"token_id:{entry.token_id}" if by_id else entry.token


def chat_name_of(entry: TokenLogprob | TopLogprob, *, by_id: bool) -> str:
    """A token in a chat completion's logprobs: parts of characters are spelt `\\xe6\\xb0`."""
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


def prompt_field(record: ResponseRecord, prompt: PromptLogprobs | None) -> dict[str, Any]:
    """The field prompt_logprobs, where the client asked for it and the prompt's are here."""
    if prompt is None or record.num_prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": by_token_id(prompt, record.num_prompt_logprobs)}


def format_for(record: ResponseRecord) -> ChunkFormat:
    """The format of a response of any API: what is no completion is a chat inside."""
    return CompletionFormat(record) if record.kind == "text_completion" else ChatFormat(record)


def whole_body(record: ResponseRecord, choices: list[Choice]) -> dict[str, Any]:
    """The answer that was not asked for as a stream. Its usage is all that was generated, whatever
    became of it."""
    return format_for(record).whole(best(choices, record)) | {"usage": usage_fields(usage_of(choices, record.n))}


MARK = "\0text\0"  # stands in for a text, to find its place


def is_plain(event: TokenEvent, delta: Delta) -> bool:
    """Whether the chunk of the event, which has added `delta` to its choice, differs from others of
    that choice in its text alone."""
    has_more = event.logprobs is not None or event.prompt_logprobs is not None or event.prompt_token_ids is not None
    return not has_more and event.finish_reason is None and event.token_id is not None and delta.kinds == ["content"]


class Frames:
    """The chunks of one response that bring only text, as most do. The bytes around the text are the
    same in all of a choice's chunks: they are made once."""

    def __init__(self, form: ChunkFormat, record: ResponseRecord) -> None:
        self.format = form
        self.is_any = (
            not record.has_token_ids and not record.has_continuous_usage
        )  # else each chunk has figures of its own
        self._around: dict[tuple[int, int], list[bytes]] = {}

    def encode(self, choice: Choice, event: TokenEvent, text: str) -> bytes:
        """The chunk of a plain event, with this text, as orjson writes what the format makes."""
        key = choice.index, len(choice.fingerprints)
        if (around := self._around.get(key)) is None:
            [chunk] = self.format.chunks(choice, event, Delta(MARK, kinds=["content"]))
            around = self._around[key] = orjson.dumps(chunk).split(orjson.dumps(MARK))
        before, behind = around
        return before + orjson.dumps(text) + behind
