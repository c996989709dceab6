"""A completion's answer as llama.cpp's server writes it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

from services.gateway.answering.responder import Responder
from services.gateway.telemetry.timeline import Timeline
from services.requests.answers.choice import Choice
from services.requests.answers.prompt_logprobs import finite
from services.requests.answers.sse import PING, encode_event
from services.requests.bodies.fields import TokenIds
from services.requests.errors import RequestFailed, check, error_body
from shared.model.sampling_params import SamplingParams
from shared.wire.logprobs import TokenLogprob, TopLogprob
from shared.wire.messages import TokenEvent

Json = dict[str, Any]


class LlamaResponder(Responder):
    """Whole, or as server-sent events without a closing [DONE]: the last one of each choice says
    stop."""

    def describe(self, *, settings: SamplingParams, prompts: Sequence[str | TokenIds], has_tokens: bool) -> None:
        """Set the parts of the request that the answer repeats."""
        self.settings = settings
        self.prompts = prompts
        self.has_tokens = has_tokens

    def _body(self) -> Any:
        answers = [self._answer(choice, "".join(choice.text), choice.token_ids if self.has_tokens else []) for choice in self.choices]
        return answers[0] if len(answers) == 1 else answers

    async def _chunks(self, batch: list[tuple[int, TokenEvent]]) -> AsyncIterator[bytes]:
        while True:
            yield b"".join(self._event(*each) for each in batch) if batch else PING
            if self._is_over:
                return
            try:
                batch = await self._next()
                for _, event in batch:
                    check(event)
            except RequestFailed as failed:
                error = failed.error
                yield encode_event(error_body(error.status, error.message, error.param, error.code))
                return

    def _event(self, index: int, event: TokenEvent) -> bytes:
        choice = self.choices[index]
        choice.add(event)
        token_ids = [] if event.token_id is None else [event.token_id]
        if event.finish_reason is not None:
            return encode_event(self._answer(choice, event.text, token_ids if event.text else []))
        chunk: Json = {
            "index": index, "content": event.text, "tokens": token_ids, "stop": False, "id_slot": -1,
            "tokens_predicted": choice.num_output_tokens, "tokens_evaluated": choice.num_prompt_tokens,
        }  # fmt: skip
        return encode_event(chunk | probabilities(event.logprobs))

    def _answer(self, choice: Choice, content: str, token_ids: list[int]) -> Json:
        record = self.generation.record
        prompt = self.prompts[choice.index // record.n]
        has_stopped = choice.finish_reason == "stop"
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        return {
            "index": choice.index,
            "content": content,
            "tokens": token_ids,
            "id_slot": -1,
            "stop": True,
            "model": record.model,
            "tokens_predicted": choice.num_output_tokens,
            "tokens_evaluated": choice.num_prompt_tokens,
            "tokens_cached": choice.num_cached_tokens,
            "generation_settings": {name: value for name, value in asdict(self.settings).items() if name not in ("bad_words_token_ids", "logit_bias")},
            "prompt": prompt if isinstance(prompt, str) else "",
            "has_new_line": "\n" in "".join(choice.text),
            "truncated": False,
            "stop_type": ("word" if word else "eos") if has_stopped else "limit",
            "stopping_word": word,
            "timings": timings(choice, self.measured.timelines[choice.index]),
            **probabilities(choice.logprobs),
        }


def probabilities(logprobs: Sequence[TokenLogprob] | None) -> Json:
    """Each token's, and those of the likeliest in its place; nothing if nobody asked."""
    if logprobs is None:
        return {}

    def described(entry: TokenLogprob | TopLogprob) -> Json:
        return {"id": entry.token_id, "token": entry.token, "bytes": list(entry.raw), "logprob": finite(entry.logprob)}

    return {"completion_probabilities": [described(entry) | {"top_logprobs": [described(top) for top in entry.top]} for entry in logprobs if not entry.is_end]}


def timings(choice: Choice, timeline: Timeline) -> Json:
    """How long prompt and answer took, ms, and tokens/s of either."""
    num_prompt = choice.num_prompt_tokens - choice.num_cached_tokens
    said: Json = {"cache_n": choice.num_cached_tokens}
    for name, count, seconds in (("prompt", num_prompt, timeline.prefill_s), ("predicted", choice.num_output_tokens, timeline.decode_s)):
        elapsed = seconds or 0.0
        said |= {
            f"{name}_n": count,
            f"{name}_ms": elapsed * 1e3,
            f"{name}_per_token_ms": elapsed * 1e3 / count if count else 0.0,
            f"{name}_per_second": count / elapsed if elapsed else 0.0,
        }
    return said
