"""Makes the pipeline's requests and the response's record: of an intent, which a body of any API
becomes in one call, and of embeddings."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from services.requests.bodies.content import Content
from services.requests.bodies.ignored import tell
from services.requests.context import RequestContext
from services.requests.dialects.openai.embeddings import EmbeddingBody
from services.requests.dialects.openai.intent import Intent
from services.requests.dialects.openai.messages import Message
from services.requests.dialects.openai.schemas import no_template
from services.requests.store.admission.admission import served_names
from services.requests.store.modules.store import ModuleStore
from services.requests.store.record import ResponseRecord, choice_params, make_record, new_id
from services.requests.text.schemas.prepare import Enforceable
from shared.model.constraint import Constraint
from shared.model.parsing.answer import Parsing
from shared.model.parsing.forms import HARMONY, reads_calls, thought_marks
from shared.model.parsing.harmony import ANSWER
from shared.model.sampling_params import SamplingParams
from shared.process.errors import Invalid
from shared.wire.messages import ChatMessage, ChatOptions, GenerateRequest, PromptModule, SchedulingParams
from shared.wire.replica import Replica


async def prepare(
    context: RequestContext,
    intent: Intent,
    kind: str,
    gateway_id: str | None,
    *,
    name: str = "",
    key: str = "",
    **others: Any,
) -> tuple[ResponseRecord, list[GenerateRequest]]:
    """Make the record and the requests of a response, whichever API asks for it. Raises Invalid,
    Rejected, and what RequestContext.while_wanted raises.

    kind: of record.PREFIXES; gateway_id: of the gateway that reads the events, None if the log is
    enough; name: of the model, if the client called it otherwise than the intent does; key: the end
    of the response's id, by default random; others: further fields of the record.
    """
    # A wrong body and a missing model are refused first, at no charge; then what can't be compiled,
    # which is charged. Nothing is refused after that.
    model = check(context, intent)
    params = with_model_defaults(context, intent, model)
    parsing, options, constraint = for_parsers(intent, *parsers_of(context, model))
    modules = await modules_for(context, intent, model)
    messages, images = (
        await messages_for(context, intent.chat.messages, model) if intent.chat is not None else (None, {})
    )
    prepared = await constraint_for(context, constraint)
    constraint = prepared.constraint if prepared is not None else None
    if parsing is not None and parsing.reasoning and constraint is not None:
        constraint = after_thought(
            constraint, parsing.reasoning, may_think=intent.chat is not None and intent.chat.may_think
        )
    if parsing is not None and parsing.needs_special_tokens:
        params = structs.replace(params, skip_special_tokens=False)
    now = time.time()
    record = replace(
        intent.record,
        response_id=new_id(kind, key, context.mark),
        kind=kind,
        model=name or intent.model,
        created=int(now),
        served_model=model,
        parsing=parsing,
        fingerprint=fingerprint_of(context, model),
        checks=prepared.checks if prepared is not None else (),
        images=images,
        **others,
    )
    requests = []
    for index, request_id in enumerate(record.request_ids):
        number, choice = divmod(index, record.n)
        draft = intent.requests[number]
        group_id = f"{record.response_id}.{number}" if record.n > 1 else ""
        deadline_at = now + intent.deadline_s if intent.deadline_s is not None else 0.0
        requests.append(
            structs.replace(
                draft,
                request_id=request_id,
                gateway_id=gateway_id,
                model=model,
                # with a seed, they do not depend on the other prompts
                params=choice_params(params, intent.seed, choice),
                messages=messages,
                created_at=now,
                scheduling=structs.replace(draft.scheduling, deadline_at=deadline_at, group_id=group_id),
                constraint=constraint,
                chat=options,
                modules=modules,
            )
        )
    return record, requests


def check(context: RequestContext, intent: Intent) -> str:
    """The served model that the intent names. Raises Rejected, and Invalid for what is not
    available here."""
    if intent.suffix:
        raise Invalid(
            "suffix is not available in batches: give a prompt with the model's own tokens for infilling",
            param="suffix",
        )
    check_priority(context, intent.requests[0].scheduling.priority)
    model = context.resolve(intent.model)
    if intent.requests[0].chat.chat_template and not context.settings.trust_request_chat_template:
        raise no_template()
    return model


def check_priority(context: RequestContext, priority: int) -> None:
    if priority < (lowest := context.settings.min_priority):
        raise Invalid(f"priority must be at least {lowest} here (smaller is sooner), got {priority}", param="priority")


def for_parsers(
    intent: Intent, tool_calls: str, reasoning: str
) -> tuple[Parsing | None, ChatOptions, Constraint | None]:
    """How the answer is parsed, by the names of the model's parsers; the template's inputs; and the
    constraint on the answer. Raises Invalid."""
    if intent.chat is None:
        return None, ChatOptions(), intent.constraint
    parsing = intent.chat.calling.parsing(tool_calls, reasoning, may_think=intent.chat.may_think)
    begins_with_call = intent.chat.calling.is_forced and not parsing.reasoning
    options = intent.chat.options_without_thought if begins_with_call else intent.requests[0].chat
    return parsing, options, intent.constraint or intent.chat.calling.offered(tool_calls)


def embedder(context: RequestContext, name: str) -> tuple[str, str]:
    """The served model of embeddings that the client calls so, and what the answer calls it. Clients
    have names built in: where one encoder is served, it answers to a name that no model has. Raises
    as RequestContext.resolve."""
    try:
        return context.resolve(name), name
    except Invalid as unknown:
        served = served_names(context.registry, context.tenant).values()
        encoders = {
            replica.model
            for replica in served
            if replica.model is not None and replica.is_encoder and not replica.labels
        }
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


def refuse_modules(intent: Intent) -> None:
    """Raises Invalid for prompt modules, where the prompt itself is the answer: they are no text of it."""
    if intent.modules is not None:
        reason = "prompt_modules is not available here, where the prompt is the answer: leave it out"
        raise Invalid(reason, param="prompt_modules")


async def modules_for(context: RequestContext, intent: Intent, model: str) -> tuple[PromptModule, ...]:
    """The prompt modules that the intent names. Raises Invalid."""
    if intent.modules is None:
        return ()
    lengths = [
        replica.max_model_len for replica in context.registry.of("compute", model) if replica.max_model_len is not None
    ]
    return await ModuleStore(context.home).take(
        context.tenant.tenant_id, model, intent.modules, max(lengths, default=None)
    )


async def messages_for(
    context: RequestContext, messages: Sequence[Message], model: str
) -> tuple[tuple[ChatMessage, ...], dict[str, bytes]]:
    """The messages of the pipeline, and the files of their images by digest. Raises Invalid, and as
    ImageReader.read."""
    seen = next((number for number, message in enumerate(messages) if isinstance(message.content, Content)), None)
    if seen is None:
        return tuple(message.to_wire() for message in messages), {}
    if not sees(context, model):
        raise Invalid(
            f"the model {model} reads text only: images can't be understood",
            param=f"messages[{seen}].content",
            code="model_not_supported",
        )
    await context.admission.charge_request(context.caller)
    return await context.while_wanted(context.images.read(messages, context.tenant.tenant_id))


def after_thought(constraint: Constraint, reasoning: str, *, may_think: bool) -> Constraint:
    """Let the model think before the constrained answer. In Harmony's form a header stands before an
    answer in any case."""
    if may_think and (marks := thought_marks(reasoning)) is not None:
        return structs.replace(constraint, thought_begin=marks.starts[0], thought_end=marks.ends[0])
    return structs.replace(constraint, thought_begin=ANSWER, thought_end=ANSWER) if reasoning == HARMONY else constraint


def parsers_of(context: RequestContext, model: str) -> tuple[str, str]:
    """The names of the parsers of its calls and of its reasoning; empty: it has none."""
    replica = newest(context, "tokenizer", model)
    parsers = replica.parsers if replica is not None else {}
    tool_calls, reasoning = parsers.get("tool_calls", ""), parsers.get("reasoning", "")
    return tool_calls if reads_calls(tool_calls) else "", reasoning if thought_marks(reasoning) is not None else ""


def with_model_defaults(context: RequestContext, intent: Intent, model: str) -> SamplingParams:
    """The intent's params, with the defaults of the model's makers for those that the client did not
    set. A beam search draws nothing."""
    params = intent.requests[0].params
    if intent.beams is not None:
        return params
    defaults: dict[str, Any] = {
        name: value for name, value in makers_sampling(context, model).items() if name not in intent.given
    }
    longest = defaults.pop("max_tokens", None)
    if longest is not None and params.max_tokens is None:
        defaults["max_tokens"] = max(longest, params.min_tokens)
    return structs.replace(params, **defaults) if defaults else params


def makers_sampling(context: RequestContext, model: str) -> dict[str, int | float]:
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
    return max(
        context.registry.of(stage, model), key=lambda replica: (replica.started_at, replica.replica_id), default=None
    )


def prepare_embeddings(
    context: RequestContext, body: EmbeddingBody, gateway_id: str | None, kind: str = "embedding", **others: Any
) -> tuple[ResponseRecord, list[GenerateRequest]]:
    """Make the requests and the record of a list of inputs, as `prepare` of a chat. kind: of
    record.PREFIXES."""
    check_priority(context, body.priority)
    model, name = embedder(context, body.model)
    prompts = body.prompts(may_bring_template=context.settings.trust_request_chat_template)
    if len(prompts) > (most := context.settings.max_requests):
        raise Invalid(f"at most {most} inputs in one request here, got {len(prompts)}", param="input")
    record = make_record(kind, name, model, mark=context.mark, num_prompts=len(prompts), **others)
    now = time.time()
    scheduling = SchedulingParams(
        body.priority, now + body.deadline_s if body.deadline_s is not None else 0.0, "", body.cache_salt
    )
    requests = [
        GenerateRequest(
            request_id,
            gateway_id,
            model,
            SamplingParams(max_tokens=0),
            created_at=now,
            scheduling=scheduling,
            embedding=body.embedding,
            encoding=body.encoding(),
            **prompt,
        )
        for request_id, prompt in zip(record.request_ids, prompts, strict=True)
    ]
    return record, requests
