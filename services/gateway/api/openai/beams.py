"""Runs beam searches: each step is a response of one-token requests, one for every running beam,
whose prompt is the prompt and the beam so far.

So a search is made of ordinary durable requests: whatever stage dies, its steps end with the same
candidates, and the prefix cache has all of a prompt but its last block. The search itself is this
gateway's: if that dies, so does the connection on which nothing had been answered yet, as with any
answer that is not streamed; asked again, the same search has the same end.
"""

import asyncio
import time

import numpy as np
from msgspec.structs import replace

from services.gateway.answering.ask import ask_all, ask_tokenizer, question
from services.gateway.api.openai.beam_search import BeamSearch
from services.gateway.context import GatewayContext
from services.requests.dialects.openai.intent import BeamOptions
from services.requests.text.answers.choice import Choice
from shared.model.arrays import Int32Array
from shared.model.sampling_params import MAX_LOGPROBS, PARAMETERS, SamplingParams
from shared.process.errors import Invalid, Rejected
from shared.wire.messages import ChatOptions, EncodingParams, GenerateRequest, TokenEvent

MAX_STEPS = 8192  # one-token requests of one search: width times max_tokens
PATIENCE_S = 30.0  # for a full server, once a search has begun
PAUSE_S = 0.25
# The sampling parameters that a search honours; all others must have their defaults.
USED = ("max_tokens", "temperature", "seed", "ignore_eos", "skip_special_tokens")


def check_beams(request: GenerateRequest, width: int) -> None:
    """Raises Invalid for a search that can't be done."""
    params = request.params
    if request.constraint is not None:
        raise Invalid(
            f"{request.constraint.param} is not available with use_beam_search: leave it out",
            param=request.constraint.param,
        )
    for parameter in PARAMETERS:
        if parameter.name not in USED and parameter.of(params) != parameter.default:
            raise Invalid(f"{parameter.name} is not available with use_beam_search: leave it out", param=parameter.name)
    if not (params.is_greedy or params.temperature == 1.0):
        raise Invalid(
            "use_beam_search takes the model's own probabilities: leave temperature out, or give 0 or 1",
            param="temperature",
        )
    if width >= MAX_LOGPROBS:
        raise Invalid(f"beams (n, or best_of) must be below {MAX_LOGPROBS}, got {width}", param="n")


async def search_prompt(
    context: GatewayContext, request: GenerateRequest, options: BeamOptions, *, num_best: int
) -> list[Choice]:
    """The best answers to one prompt. Raises Invalid, Rejected, RequestFailed."""
    model, params = request.model, request.params
    tokens = await ask_tokenizer(
        context,
        model,
        "tokenize",
        question(
            context,
            model,
            SamplingParams(max_tokens=params.max_tokens),
            request.encoding,
            messages=request.messages,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            chat=request.chat,
        ),
    )
    prompt, room = np.array(tokens["tokens"], np.int32), tokens["max_model_len"] - tokens["count"]
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    ends = () if params.ignore_eos else tuple(tokens["eos_token_ids"])
    search = BeamSearch(options.width, max_tokens, ends, options.length_penalty, options.early_stopping)
    check_size(search, len(prompt), room, "messages" if request.messages is not None else "prompt")
    fingerprints: dict[str, None] = {}
    while not search.is_over:
        answered = await step(context, request, prompt, search)
        fingerprints |= dict.fromkeys(event.fingerprint for events in answered for event in events if event.fingerprint)
        search.advance(
            [
                [(top.token_id, top.logprob) for event in events for entry in event.logprobs or () for top in entry.top]
                for events in answered
            ]
        )
    texts = [await text_of(context, request, prompt, answer.token_ids) for answer in search.answers[:num_best]]
    return [
        Choice(
            index,
            text=[tokens["opening"] + text],
            token_ids=list(answer.token_ids),
            prompt_token_ids=prompt,
            finish_reason="stop" if answer.is_stopped else "length",
            num_prompt_tokens=len(prompt),
            num_output_tokens=answer.num_tokens,
            fingerprints=list(fingerprints),
        )
        for index, (answer, text) in enumerate(zip(search.answers, texts, strict=False))
    ]


def check_size(search: BeamSearch, num_prompt_tokens: int, room: int, field: str) -> None:
    """Raises Invalid for a search that takes too much."""
    if not num_prompt_tokens:
        raise Invalid("the prompt is empty: give at least one token", param=field)
    if room < 1:
        reason = f"the prompt has {num_prompt_tokens} tokens; this model takes {num_prompt_tokens + room} in all"
        raise Invalid(f"{reason}: shorten it", param=field, code="context_length_exceeded")
    if search.num_candidates > MAX_LOGPROBS:
        raise Invalid(
            f"beams and the model's {len(search.eos_token_ids)} end tokens must be at most {MAX_LOGPROBS} together",
            param="n",
        )
    if search.width * search.max_tokens > MAX_STEPS:
        raise Invalid(
            f"beams times max_tokens must be at most {MAX_STEPS}, got {search.width * search.max_tokens}",
            param="max_tokens",
        )


async def step(
    context: GatewayContext, request: GenerateRequest, prompt: Int32Array, search: BeamSearch
) -> list[list[TokenEvent]]:
    """Ask for each running beam's likeliest next tokens; returns the events of each. Waits while the
    server is full."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=search.num_candidates)
    asked = [
        replace(
            request,
            params=params,
            messages=None,
            prompt=None,
            prompt_token_ids=np.concatenate((prompt, np.array(beam.token_ids, np.int32))),
            encoding=EncodingParams(),
            chat=ChatOptions(),
            created_at=time.time(),
            scheduling=replace(request.scheduling, group_id=""),
        )
        for beam in search.running
    ]
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await ask_all(context, request.model, asked)
        except Rejected:
            if (
                not search.running[0].token_ids or time.monotonic() > until
            ):  # nothing is lost yet, or nothing can be saved
                raise
            await asyncio.sleep(PAUSE_S)


async def text_of(
    context: GatewayContext, request: GenerateRequest, prompt: Int32Array, token_ids: tuple[int, ...]
) -> str:
    """The text that an answer's tokens add to the prompt's."""
    tail = prompt[-8:]

    async def decode(ids: Int32Array) -> str:
        asked = question(
            context,
            request.model,
            SamplingParams(skip_special_tokens=request.params.skip_special_tokens),
            prompt_token_ids=ids,
        )
        return str((await ask_tokenizer(context, request.model, "detokenize", asked))["prompt"])

    before, whole = await decode(tail), await decode(np.concatenate((tail, np.array(token_ids, np.int32))))
    return whole[len(before) :] if whole.startswith(before) else await decode(np.array(token_ids, np.int32))
