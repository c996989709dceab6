"""The models that are served, in OpenAI's words, and in Anthropic's for its clients: both APIs have
them under the same path.

All of Anthropic's are one page, so `limit`, `after_id` and `before_id` have nothing to choose.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from services.gateway.context import context_of
from services.gateway.http.errors import speaks_anthropic
from services.requests.bodies.fields import MAX_SEQUENCES
from services.requests.context import RequestContext
from services.requests.dialects.openai.schemas import MAX_MESSAGES, ChatCompletionBody
from services.requests.prepare import makers_sampling, parsers_of, sees
from shared.model.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams
from shared.wire.replica import Replica

SAMPLING = {
    name: getattr(SamplingParams(), name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
}
LIMITS = {
    "max_logprobs": MAX_LOGPROBS,
    "max_sequences": MAX_SEQUENCES,
    "max_stop_strings": MAX_STOP_STRINGS,
    "max_messages": MAX_MESSAGES,
}

PERMISSION = {
    "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False,
}  # fmt: skip  # older clients of OpenAI's look for it

# What a chat takes, of the names that OpenRouter's clients look for
OF_CHATS = [
    name
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "max_tokens",
        "max_completion_tokens",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "prediction",
        "seed",
        "response_format",
        "structured_outputs",
        "stop",
        "verbosity",
    )
    if name in ChatCompletionBody.model_fields
]
OF_TOOLS, OF_THOUGHTS = (
    ["tools", "tool_choice", "parallel_tool_calls"],
    ["include_reasoning", "reasoning_effort"],
)  # where answers are parsed for them
FREE = {"prompt": "0", "completion": "0"}  # the server charges nothing

router = APIRouter()


@router.get("/v1/models")
@router.get("/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The models that are served. One whose compute is away for a moment is among them, without its length."""
    context = context_of(request)
    if speaks_anthropic(request.scope):
        return anthropic_list(context.served_names())
    cards = [card(context, name, replica) for name, replica in sorted(context.served_names().items())]
    return {"object": "list", "data": cards, "links": {"next": None}, "total_count": len(cards)}


@router.get("/v1/models/{model:path}")
async def get_model(model: str, request: Request) -> dict[str, Any]:
    """One model by its name."""
    context = context_of(request)
    replica = context.served(model)
    return anthropic_card(model, replica) if speaks_anthropic(request.scope) else card(context, model, replica)


def card(context: RequestContext, name: str, replica: Replica) -> dict[str, Any]:
    """A model in OpenAI's list; `root` is its own name, `sampling` what a request gets that says
    nothing, `input_modalities` what it reads, `meta` llama.cpp's, and `permission` vLLM's. The last
    ones are OpenRouter's."""
    sampling = SAMPLING | makers_sampling(context, replica.model or "")
    reads, writes = (
        ["text", "image"] if sees(context, replica.model or "") else ["text"],
        ["embeddings" if replica.is_encoder else "text"],
    )
    return {
        "id": name,
        "object": "model",
        "created": int(replica.started_at),
        "owned_by": "penstock",
        "root": replica.model,
        "parent": None,
        "max_model_len": replica.max_model_len,
        "limits": LIMITS,
        "sampling": sampling,
        "meta": replica.sizes or None,
        "input_modalities": reads,
        "permission": [
            {"id": f"modelperm-{name}", "object": "model_permission", "created": int(replica.started_at)} | PERMISSION
        ],
        "name": name,
        "canonical_slug": name,
        "context_length": replica.max_model_len,
        "default_parameters": sampling,
        "pricing": FREE,
        "architecture": {
            "modality": f"{'+'.join(reads)}->{writes[0]}",
            "input_modalities": reads,
            "output_modalities": writes,
        },
        "supported_parameters": [] if replica.is_encoder else parameters_of(context, replica.model or ""),
        "per_request_limits": None,
        "top_provider": {
            "is_moderated": False,
            "context_length": replica.max_model_len,
            "max_completion_tokens": replica.max_model_len,
        },
        "supported_voices": None,
        "links": {"details": f"/v1/models/{name}"},
    }


def parameters_of(context: RequestContext, model: str) -> list[str]:
    """The fields of a chat with this model."""
    tool_calls, reasoning = parsers_of(context, model)
    return [*OF_CHATS, *(OF_TOOLS if tool_calls else []), *(OF_THOUGHTS if reasoning else [])]


def anthropic_list(served: Mapping[str, Replica]) -> dict[str, Any]:
    """The models by their names."""
    cards = [anthropic_card(name, replica) for name, replica in sorted(served.items())]
    return {
        "data": cards,
        "has_more": False,
        "first_id": cards[0]["id"] if cards else None,
        "last_id": cards[-1]["id"] if cards else None,
    }


def anthropic_card(name: str, replica: Replica) -> dict[str, Any]:
    """A model in Anthropic's list. A sequence's length bounds prompt and answer together; it is
    null while no compute of the model is alive."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(replica.started_at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": replica.max_model_len,
        "max_tokens": replica.max_model_len,
    }
