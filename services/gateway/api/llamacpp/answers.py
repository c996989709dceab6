"""A completion's answer as llama.cpp's server writes it."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from services.gateway.answering.responder import Responder
from services.gateway.answering.timings import timings
from services.gateway.http.errors import llama_error
from services.requests.bodies.fields import TokenIds
from services.requests.dialects.llamacpp.schemas import LlamaBody
from services.requests.errors import RequestFailed, check
from services.requests.text.answers.choice import Choice
from services.requests.text.answers.prompt_logprobs import finite
from services.requests.text.answers.sse import encode_event
from shared.model.sampling_params import SamplingParams
from shared.wire.logprobs import TokenLogprob, TopLogprob
from shared.wire.messages import TokenEvent

Json = dict[str, Any]

MISSING = object()


class LlamaResponder(Responder):
    """Whole, or as server-sent events without a closing [DONE]: the last one of each choice says
    stop."""

    def describe(self, body: LlamaBody, params: SamplingParams, prompts: Sequence[str | TokenIds]) -> None:
        """Set the parts of the request that the answer depends on."""
        self.body = body
        self.settings = generation_settings(params, body)
        self.prompts = prompts

    def _body(self) -> Any:
        answers = [
            self._answer(
                choice, "".join(choice.text), choice.token_ids if self.body.return_tokens else [], choice.logprobs
            )
            for choice in self.choices
        ]
        return answers[0] if len(answers) == 1 else answers

    async def _chunks(self, batch: list[tuple[int, TokenEvent]]) -> AsyncIterator[bytes]:
        while True:
            yield b"".join(self._event(*each) for each in batch) if batch else self._ping()
            if self._is_over:
                return
            try:
                batch = await self._next()
                for _, event in batch:
                    check(event)
            except RequestFailed as failed:
                error = failed.error
                yield encode_event(llama_error(error.status, error.message, error.param, error.code))
                return

    def _event(self, index: int, event: TokenEvent) -> bytes:
        choice = self.choices[index]
        choice.add(event)
        token_ids = [] if event.token_id is None else [event.token_id]
        if event.finish_reason is not None:
            return encode_event(self._answer(choice, event.text, token_ids if event.text else [], event.logprobs))
        chunk: Json = {
            "index": index,
            "content": event.text,
            "tokens": token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": choice.num_output_tokens,
            "tokens_evaluated": choice.num_prompt_tokens,
        }
        return encode_event(chunk | self._timings(index) | probabilities(event.logprobs))

    def _answer(
        self, choice: Choice, content: str, token_ids: list[int], logprobs: Sequence[TokenLogprob] | None
    ) -> Json:
        record = self.generation.record
        prompt = self.prompts[choice.index // record.n]
        has_stopped = choice.finish_reason == "stop"
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        answer = {
            "index": choice.index,
            "content": content,
            "tokens": token_ids,
            "id_slot": -1,
            "stop": True,
            "model": record.model,
            "tokens_predicted": choice.num_output_tokens,
            "tokens_evaluated": choice.num_prompt_tokens,
            "tokens_cached": choice.num_cached_tokens,
            "generation_settings": self.settings,
            "prompt": prompt if isinstance(prompt, str) else "",
            "has_new_line": "\n" in "".join(choice.text),
            "truncated": False,
            "stop_type": ("word" if word else "eos") if has_stopped else "limit",
            "stopping_word": word,
            "timings": timings(choice, self.measured),
            **probabilities(logprobs),
        }
        return picked(answer, self.body.response_fields) if self.body.response_fields else answer


def probabilities(logprobs: Sequence[TokenLogprob] | None) -> Json:
    """The logprob of each token and of the likeliest ones at its position; empty if logprobs were not requested."""
    if logprobs is None:
        return {}

    def described(entry: TokenLogprob | TopLogprob) -> Json:
        return {"id": entry.token_id, "token": entry.token, "bytes": list(entry.raw), "logprob": finite(entry.logprob)}

    return {
        "completion_probabilities": [
            described(entry) | {"top_logprobs": [described(top) for top in entry.top]}
            for entry in logprobs
            if not entry.is_end
        ]
    }


def picked(answer: Json, paths: Sequence[str]) -> Json:
    """The answer's fields by their paths: a/b is the field b of a, and stands under that whole name.
    What is not there is left out."""
    chosen: Json = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
        if value is not MISSING:
            chosen[path] = value
    return chosen


def generation_settings(params: SamplingParams, body: LlamaBody) -> Json:
    """The request's parameters, by llama.cpp's names."""
    limit = -1 if body.limit is None else body.limit
    settings = {name: each.of(params) for name, each in body.sampling_parameters.items()}
    return settings | {
        "n_predict": limit,
        "max_tokens": limit,
        "n_probs": params.logprobs or 0,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()],
        "top_n_sigma": settings["top_n_sigma"] or -1.0,
        "repeat_last_n": -1,
        "mirostat": 0,
        "n_keep": 0,
        "min_keep": 0,
        "stream": body.stream,
        "grammar": body.grammar or "",
        "post_sampling_probs": False,
        "timings_per_token": body.timings_per_token,
        "lora": [],
    }
