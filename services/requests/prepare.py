"""Makes the pipeline's requests and the response's record of a body: a chat, a completion,
embeddings."""

import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from services.requests.bodies.content import Content
from services.requests.bodies.fields import MAX_SEQUENCES
from services.requests.bodies.ignored import tell
from services.requests.context import RequestContext
from services.requests.dialects.openai.embeddings import EmbeddingBody
from services.requests.dialects.openai.messages import Message
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody, GenerateBody
from services.requests.store.admission.admission import served_names
from services.requests.store.modules.store import ModuleStore
from services.requests.store.record import ResponseRecord, choice_params, make_record
from services.requests.text.parsing.answer import HARMONY, REASONING, TOOL_CALLS
from services.requests.text.parsing.harmony import ANSWER
from services.requests.text.schemas.prepare import Enforceable
from shared.model.constraint import Constraint
from shared.model.sampling_params import SamplingParams
from shared.process.errors import Invalid
from shared.wire.messages import ChatMessage, GenerateRequest, PromptModule, SchedulingParams
from shared.wire.replica import Replica


async def prepare_completion(
    context: RequestContext, body: CompletionBody, gateway_id: str | None, kind: str = "text_completion", **others: Any
) -> tuple[ResponseRecord, list[GenerateRequest]]:
    """Make the requests and the record of a completion, as `prepare_chat` of a chat. kind: of
    record.PREFIXES."""
    if body.suffix:
        raise Invalid("suffix is not available in batches: give a prompt with the model's own tokens for infilling", param="suffix")
    params, prompts, wanted, model = body.params(), body.prompt, body.constraint(), check(context, body)
    modules = await modules_for(context, body, model)
    prepared = await constraint_for(context, wanted)
    params = with_model_defaults(context, body, params, model)
    constraint = prepared.constraint if prepared is not None else None
    if (count := len(prompts) * (body.num_beams or body.num_sequences)) > MAX_SEQUENCES:
        raise Invalid(f"at most {MAX_SEQUENCES} prompts times n (or best_of) in one request, got {count}", param="n")
    record = make_record(
        kind, body.model, model, mark=context.mark, num_prompts=len(prompts), has_usage=body.has_usage, num_echo_logprobs=body.num_echo_logprobs,
        num_prompt_logprobs=body.prompt_logprobs, has_continuous_usage=body.has_continuous_usage, fingerprint=fingerprint_of(context, model),
        checks=checks_of(prepared), **(each_choice(body, has_logprobs=body.logprobs is not None) | others),
    )  # fmt: skip
    now = time.time()
    requests = []
    for index, (request_id, own) in enumerate(zip(record.request_ids, each_params(body, params, len(prompts)), strict=True)):
        prompt = prompts[index // record.n]
        text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        requests.append(
            GenerateRequest(
                request_id, gateway_id, model, own,
                prompt=text, prompt_token_ids=token_ids, echo=body.echo, created_at=now,
                scheduling=body.scheduling(now, f"{record.response_id}.{index // record.n}"), constraint=constraint, encoding=body.encoding(),
                modules=modules,
            )
        )  # fmt: skip
    return record, requests


def check(context: RequestContext, body: GenerateBody | EmbeddingBody) -> str:
    """The served model that the body names. Raises Rejected, Invalid."""
    check_priority(context, body)
    return context.resolve(body.model)


def check_priority(context: RequestContext, body: GenerateBody | EmbeddingBody) -> None:
    if body.priority < (least := context.settings.min_priority):
        raise Invalid(f"priority must be at least {least} here (smaller is sooner), got {body.priority}", param="priority")


def embedder(context: RequestContext, name: str) -> tuple[str, str]:
    """The served model of embeddings that the client calls so, and what the answer calls it. Clients have names built in: where
    one encoder is served, it answers to a name that no model has. Raises as RequestContext.resolve."""
    try:
        return context.resolve(name), name
    except Invalid as unknown:
        served = served_names(context.registry, context.tenant).values()
        encoders = {replica.model for replica in served if replica.model is not None and replica.is_encoder and not replica.labels}
        if unknown.code != "model_not_found" or len(encoders) != 1 or context.settings.strict_fields:
            raise
    tell("model")
    model = context.resolve(encoders.pop())
    return model, model


async def constraint_for(context: RequestContext, constraint: Constraint | None) -> Enforceable | None:
    """The constraint as it can be enforced. Raises Invalid, Rejected, and ClientDisconnect. What
    costs work is charged before it is done."""
    if constraint is None:
        return None
    if not context.grammars.knows(constraint):
        await context.admission.charge_request(context.caller)
    return await context.while_wanted(context.grammars.check(constraint, context.tenant.tenant_id))


def refuse_modules(body: GenerateBody) -> None:
    """Raises Invalid for a body with prompt modules, where the prompt itself is the answer: they are no text of it."""
    if body.prompt_modules is not None:
        raise Invalid("prompt_modules is not available here: the prompt has parts that are not read one after another", param="prompt_modules")


async def modules_for(context: RequestContext, body: GenerateBody, model: str) -> tuple[PromptModule, ...]:
    """The prompt modules that the body uses. Raises Invalid."""
    if body.prompt_modules is None:
        return ()
    lengths = [replica.max_model_len for replica in context.registry.of("compute", model) if replica.max_model_len is not None]
    return await ModuleStore(context.home).take(context.tenant.tenant_id, model, body.prompt_modules, max(lengths, default=None))


async def messages_for(context: RequestContext, messages: Sequence[Message], model: str) -> tuple[tuple[ChatMessage, ...], dict[str, bytes]]:
    """The messages of the pipeline, and the files of their images by digest. Raises Invalid, and as
    ImageReader.read."""
    seen = next((number for number, message in enumerate(messages) if isinstance(message.content, Content)), None)
    if seen is None:
        return tuple(message.to_wire() for message in messages), {}
    if not sees(context, model):
        raise Invalid(f"the model {model} reads text only: images can't be understood", param=f"messages[{seen}].content", code="model_not_supported")
    await context.admission.charge_request(context.caller)
    return await context.while_wanted(context.images.read(messages, context.tenant.tenant_id))


def checks_of(prepared: Enforceable | None) -> Sequence[Sequence[str]]:
    return prepared.checks if prepared is not None else ()


async def prepare_chat(
    context: RequestContext, body: ChatCompletionBody, kind: str, name: str, gateway_id: str | None, **others: Any
) -> tuple[ResponseRecord, list[GenerateRequest]]:
    """Make the requests and the record of a chat, whichever API it came by. Raises Invalid,
    Rejected.

    kind: of record.PREFIXES; name: of the model, as the client called it; gateway_id: who reads the
    events; None: nobody, the log is enough; others: further fields of the record.
    """
    # A wrong body and a missing model are refused first, at no charge; then what can't be compiled,
    # which is charged. Nothing is refused after that.
    calling, params, echoed, model = body.calling(), body.params(), body.echoed, check(context, body)
    params = with_model_defaults(context, body, params, model)
    tool_calls, reasoning = parsers_of(context, model)
    parsing = calling.parsing(tool_calls, reasoning, may_think=body.may_think)
    options = body.chat_options(
        calling, may_bring_template=context.settings.trust_request_chat_template, begins_with_call=calling.is_forced and not parsing.reasoning
    )
    modules = await modules_for(context, body, model)
    messages, images = await messages_for(context, body.messages, model)
    prepared = await constraint_for(context, calling.forced() or body.constraint() or calling.offered(tool_calls))
    constraint = prepared.constraint if prepared is not None else None
    if constraint is not None and parsing.reasoning:
        constraint = after_thought(constraint, parsing.reasoning, may_think=body.may_think)
    record = make_record(
        kind, name, model, mark=context.mark, has_usage=body.has_usage, num_prompt_logprobs=body.prompt_logprobs, parsing=parsing,
        has_reasoning=body.include_reasoning, echoed=echoed, has_continuous_usage=body.has_continuous_usage, fingerprint=fingerprint_of(context, model),
        checks=checks_of(prepared), images=images, **(each_choice(body, has_logprobs=bool(body.logprobs)) | others),
    )  # fmt: skip
    if parsing.needs_special_tokens:
        params = replace(params, skip_special_tokens=False)
    now = time.time()
    scheduling = body.scheduling(now, record.response_id)
    requests = [
        GenerateRequest(
            request_id, gateway_id, model, own,
            messages=messages, created_at=now, scheduling=scheduling, constraint=constraint, chat=options, encoding=body.encoding(),
            prediction=body.prediction.content if body.prediction is not None else "", modules=modules,
        )
        for request_id, own in zip(record.request_ids, each_params(body, params, 1), strict=True)
    ]  # fmt: skip
    return record, requests


def after_thought(constraint: Constraint, reasoning: str, *, may_think: bool) -> Constraint:
    """Let the model think before the constrained answer. In Harmony's form a header stands before an
    answer in any case."""
    if may_think:
        marks = REASONING[reasoning]
        return replace(constraint, thought_begin=marks.starts[0], thought_end=marks.ends[0])
    return replace(constraint, thought_begin=ANSWER, thought_end=ANSWER) if reasoning == HARMONY else constraint


def parsers_of(context: RequestContext, model: str) -> tuple[str, str]:
    """The names of the parsers of its calls and of its reasoning; empty: it has none."""
    replica = newest(context, "tokenizer", model)
    parsers = replica.parsers if replica is not None else {}
    tool_calls, reasoning = parsers.get("tool_calls", ""), parsers.get("reasoning", "")
    return tool_calls if tool_calls in TOOL_CALLS else "", reasoning if reasoning in REASONING else ""


def with_model_defaults(context: RequestContext, body: GenerateBody, params: SamplingParams, model: str) -> SamplingParams:
    """The params with what the model's makers say in the place of what the request does not. A beam search draws nothing."""
    said = makers_sampling(context, model)
    missing: dict[str, Any] = {name: value for name, value in said.items() if getattr(body, name, None) is None}
    longest = missing.pop("max_tokens", None)
    if longest is not None and params.max_tokens is None and getattr(body, "max_completion_tokens", None) is None:
        missing["max_tokens"] = max(longest, params.min_tokens)
    return replace(params, **missing) if missing and not body.use_beam_search else params


def makers_sampling(context: RequestContext, model: str) -> dict[str, float]:
    """The makers' sampling defaults, by the names of SamplingParams."""
    replica = newest(context, "tokenizer", model)
    return replica.sampling if replica is not None else {}


def fingerprint_of(context: RequestContext, model: str) -> str:
    replica = newest(context, "compute", model)
    return replica.fingerprint if replica is not None else ""


def sees(context: RequestContext, model: str) -> bool:
    """Whether the model reads images."""
    return any(replica.takes_images for replica in context.registry.of("compute", model))


def newest(context: RequestContext, stage: str, model: str) -> Replica | None:
    """The replica that started last. While replicas with other settings take over, all gateways
    choose the same one."""
    return max(context.registry.of(stage, model), key=lambda replica: (replica.started_at, replica.replica_id), default=None)


def each_params(body: GenerateBody, params: SamplingParams, num_prompts: int) -> list[SamplingParams]:
    """The params of each prompt's n choices. With a seed, choice i of a prompt does not depend on
    the other prompts."""
    seed = body.seed % (1 << 64) if body.seed is not None else None
    return [choice_params(params, seed, choice) for _ in range(num_prompts) for choice in range(body.num_sequences if body.num_beams is None else 1)]


def each_choice(body: GenerateBody, *, has_logprobs: bool) -> dict[str, Any]:
    """The record's fields about a prompt's choices."""
    picks = body.num_beams is None and body.num_sequences > body.n
    return {
        "n": 1 if body.num_beams is not None else body.num_sequences, "num_best": body.n if picks else None, "hides_logprobs": picks and not has_logprobs,
        "has_token_ids": body.return_token_ids, "names_tokens_by_id": body.return_tokens_as_token_ids, "resume_within_s": body.resume_within_s,
    }  # fmt: skip


def prepare_embeddings(
    context: RequestContext, body: EmbeddingBody, gateway_id: str | None, kind: str = "embedding", **others: Any
) -> tuple[ResponseRecord, list[GenerateRequest]]:
    """Make the requests and the record of a list of inputs, as `prepare_chat` of a chat. kind: of
    record.PREFIXES."""
    check_priority(context, body)
    model, name = embedder(context, body.model)
    prompts = body.prompts(may_bring_template=context.settings.trust_request_chat_template)
    if len(prompts) > (most := context.settings.max_requests):
        raise Invalid(f"at most {most} inputs in one request here, got {len(prompts)}", param="input")
    record = make_record(kind, name, model, mark=context.mark, num_prompts=len(prompts), **others)
    now = time.time()
    scheduling = SchedulingParams(body.priority, now + body.deadline_s if body.deadline_s is not None else 0.0, "", body.cache_salt)
    requests = [
        GenerateRequest(
            request_id, gateway_id, model, SamplingParams(max_tokens=0),
            created_at=now, scheduling=scheduling, embedding=body.embedding, encoding=body.encoding(), **prompt,
        )
        for request_id, prompt in zip(record.request_ids, prompts, strict=True)
    ]  # fmt: skip
    return record, requests
