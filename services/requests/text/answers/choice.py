"""Choice: one sequence's answer so far, of whichever API; and what a response used."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from services.requests.store.record import ResponseRecord
from services.requests.text.answers.answer import Answer, Delta
from shared.model.arrays import Float32Array, Int32Array
from shared.wire.logprobs import PromptLogprobs, TokenLogprob
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
    # of the prediction's: those that came in the answer, and those that did not; empty: there is none
    prediction_tokens: tuple[int, ...] = ()
    num_output_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    fingerprints: list[str] = field(default_factory=list)  # of the compute replicas that made its tokens
    prompt_token_ids: Int32Array | None = None
    embedding: Float32Array | None = None
    schema_errors: list[dict[str, Any]] = field(
        default_factory=list
    )  # where it breaks what of its schema could not be enforced

    @classmethod
    def begin(cls, index: int, record: ResponseRecord) -> "Choice":
        answer = (
            Answer(record.parsing, f"{record.response_id}.{index}", has_reasoning=record.has_reasoning)
            if record.parsing is not None
            else None
        )
        return cls(index, answer)

    def add(self, event: TokenEvent) -> Delta:
        """Returns what the event adds."""
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
        if event.fingerprint and event.fingerprint not in self.fingerprints:
            self.fingerprints.append(event.fingerprint)
        if event.prompt_token_ids is not None:
            self.prompt_token_ids = event.prompt_token_ids
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        self.prediction_tokens = event.prediction_tokens
        if self.answer is not None:
            delta = self.answer.add(event.text, is_end=event.finish_reason is not None)
            if self.answer.has_called and event.finish_reason == "stop":
                self.finish_reason = "function_call" if self.answer.is_legacy else "tool_calls"
        else:
            delta = Delta(event.text, kinds=["content"]) if event.text else Delta()
        delta.logprobs, delta.finish_reason, delta.stop_reason = event.logprobs, self.finish_reason, self.stop_reason
        return delta


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a response used."""

    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt's
    num_output_tokens: int
    num_reasoning_tokens: int | None = None  # of the output's; None: the model does not think
    # of the prediction's, which came and which did not; None: there was none
    num_accepted_prediction_tokens: int | None = None
    num_rejected_prediction_tokens: int | None = None


def usage_of(choices: list[Choice], n: int) -> Usage:
    """A prompt counts once, however many choices were drawn from it."""
    firsts = choices[::n]
    thinking = [
        choice.answer.num_reasoning_tokens
        for choice in choices
        if choice.answer is not None and choice.answer.is_reasoning_model
    ]
    return Usage(
        sum(choice.num_prompt_tokens for choice in firsts),
        sum(choice.num_cached_tokens for choice in firsts),
        sum(choice.num_output_tokens for choice in choices),
        sum(thinking) if thinking else None,
        *predicted_tokens(choices),
    )


def predicted_tokens(choices: list[Choice]) -> tuple[int, int] | tuple[None, None]:
    """How many of the prediction's tokens came in the choices, and how many did not."""
    found = [choice.prediction_tokens for choice in choices if choice.prediction_tokens]
    return (sum(accepted for accepted, _ in found), sum(rejected for _, rejected in found)) if found else (None, None)


def best(choices: list[Choice], record: ResponseRecord) -> list[Choice]:
    """The answers: all sequences, or of each prompt's the num_best whose tokens are likeliest on
    average (an empty one, last)."""
    found = choices
    if record.num_best is not None:
        ranked = [
            sorted(choices[at : at + record.n], key=mean_logprob, reverse=True)[: record.num_best]
            for at in range(0, len(choices), record.n)
        ]
        found = [
            replace(choice, index=index) for index, choice in enumerate(choice for group in ranked for choice in group)
        ]
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
