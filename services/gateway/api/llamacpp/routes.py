"""llama.cpp's own endpoints, for the programs that speak them. docs/use/other-apis.md says what is
understood."""

from importlib.metadata import version
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

from services.gateway.answering.ask import ask_tokenizer, question, token_ids_of
from services.gateway.answering.embeddings import EmbeddingResponder, submit_embeddings
from services.gateway.answering.infill import find_marks, infill_prompts
from services.gateway.api.llamacpp.answers import LlamaResponder, generation_settings
from services.gateway.context import GatewayContext, context_of
from services.gateway.http.docs import takes
from services.gateway.telemetry.measured import ResponseMeter
from services.requests.bodies import parse
from services.requests.bodies.fields import TokenIds
from services.requests.dialects.llamacpp.schemas import (
    DEFAULTS,
    RANDOM_SEED,
    Biases,
    InfillBody,
    LlamaBody,
    LlamaCompletionBody,
    LlamaEmbeddingBody,
    Pieces,
)
from services.requests.dialects.openai.embeddings import EmbeddingBody
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody
from services.requests.dialects.openai.translate import name_of, own_terms
from services.requests.errors import RequestFailed
from services.requests.prepare import embedder, prepare, refuse_modules, sees
from shared.model.sampling_params import SamplingParams
from shared.process.errors import Invalid, Rejected
from shared.wire.messages import EncodingParams, RequestError

Json = dict[str, Any]

NAMES = {
    "max_tokens": "n_predict", "logprobs": "n_probs", "n": "n_cmpl", "repetition_penalty": "repeat_penalty",
    "structured_outputs.grammar": "grammar",
    "structured_outputs.json": "json_schema", "structured_outputs": "grammar",
}  # fmt: skip  # what a completion calls otherwise

SILENT = SamplingParams(seed=RANDOM_SEED, **DEFAULTS)  # of a request that says nothing

router = APIRouter()


@router.post("/completion", openapi_extra=takes(LlamaCompletionBody))
@router.post("/completions", openapi_extra=takes(LlamaCompletionBody))
async def completion(request: Request) -> Response:
    """Continue a prompt, or several."""
    context, body = await context_of(request).read(request, LlamaCompletionBody)
    model = context.resolve(body.model)
    return await answer(context, request, body, model, await one_piece_each(context, model, body.prompt))


@router.post("/infill", openapi_extra=takes(InfillBody))
async def infill(request: Request) -> Response:
    """Write what stands between two pieces of code, with a model that was trained for it."""
    context, body = await context_of(request).read(request, InfillBody)
    model = context.resolve(body.model)
    if (marks := await find_marks(context, model)) is None:
        raise RequestFailed(
            RequestError(
                f"{model} has no tokens for infilling: it was not trained for it", 501, "model", "model_not_supported"
            )
        )
    files = "".join(f"{each.filename}\n{each.text}\n" for each in body.input_extra)
    prompts = await infill_prompts(context, model, marks, [body.input_prefix], body.input_suffix, files, body.prompt)
    return await answer(context, request, body, model, [*prompts])


async def answer(
    context: GatewayContext, request: Request, body: LlamaBody, model: str, prompts: list[str | TokenIds]
) -> Response:
    """Submit the completion that this is here, and answer as llama.cpp would."""
    biases = await biases_of(context, model, body.logit_bias or [])
    texts = [prompt if isinstance(prompt, str) else prompt.tolist() for prompt in prompts]
    asked = parse.check(CompletionBody, body.as_completion(model, texts, biases), lambda path: name_of(path, NAMES))
    measured = ResponseMeter(context.metrics)
    with own_terms(NAMES):
        record, requests = await prepare(context, asked.intent(), "llama", context.stage.replica_id)
    if not body.limit:
        requests = [replace(each, params=replace(each.params, max_tokens=body.limit)) for each in requests]
    generation = await context.pipeline.submit(context.caller, record, requests)
    context.log_submitted(record, body.user, request.state.request_id)
    responder = LlamaResponder(
        generation, measured, context.settings.ping_interval_s, has_timings=body.timings_per_token
    )
    responder.describe(body, requests[0].params, prompts)
    return await (responder.stream() if body.stream else responder.whole(request))


async def one_piece_each(context: GatewayContext, model: str, prompts: list[Pieces]) -> list[str | TokenIds]:
    """Each prompt as one piece: all of them texts, or all token ids, as a completion takes them. Each
    text of a mixture is encoded by itself."""
    texts = [pieces[0] for pieces in prompts if len(pieces) == 1 and isinstance(pieces[0], str)]
    if len(texts) == len(prompts):
        return list(texts)
    joined: list[str | TokenIds] = []
    for pieces in prompts:
        encodings = [
            EncodingParams(add_special_tokens=piece is pieces[0]) for piece in pieces if isinstance(piece, str)
        ]
        texts = [piece for piece in pieces if isinstance(piece, str)]
        encoded = iter(await token_ids_of(context, model, texts, encodings) if texts else [])
        joined.append(np.concatenate([next(encoded) if isinstance(piece, str) else piece for piece in pieces]))
    return joined


async def biases_of(context: GatewayContext, model: str, biases: Biases) -> dict[str, float]:
    """The biases by token id. A text gives its bias to each of its tokens."""
    texts = [token for token, _ in biases if isinstance(token, str)]
    encoded = iter(
        await token_ids_of(context, model, texts, [EncodingParams(add_special_tokens=False)] * len(texts))
        if texts
        else []
    )
    bias_of: dict[str, float] = {}
    for token, bias in biases:
        bias_of |= dict.fromkeys(map(str, next(encoded).tolist()) if isinstance(token, str) else [str(token)], bias)
    return bias_of


@router.post("/apply-template", openapi_extra=takes(ChatCompletionBody))
async def apply_template(request: Request) -> Json:
    """The text that the model's chat template makes of a conversation."""
    context, body = await context_of(request).read(request, ChatCompletionBody)
    intent = body.intent()
    refuse_modules(intent)
    _, [asked, *_] = await prepare(context, intent, "internal", context.stage.replica_id)
    return await ask_tokenizer(context, asked.model, "render", asked)


class LlamaEmbeddings(EmbeddingResponder):
    """Vectors as llama.cpp lists them."""

    def _body(self) -> Any:
        return [{"index": choice.index, "embedding": [choice.embedding]} for choice in self.choices]


@router.post("/embedding", openapi_extra=takes(LlamaEmbeddingBody))
@router.post("/embeddings", openapi_extra=takes(LlamaEmbeddingBody))
async def embedding(request: Request) -> Response:
    """A vector of each text."""
    context, body = await context_of(request).read(request, LlamaEmbeddingBody)
    model, _ = embedder(context, body.model)
    asked = EmbeddingBody.model_construct(
        model=model, input=await one_piece_each(context, model, body.inputs), normalize=body.embd_normalize == 2
    )
    return await (await submit_embeddings(context, asked, request, LlamaEmbeddings)).whole(request)


@router.get("/slots")
async def slots(request: Request, model: str | None = None, fail_on_no_slot: bool = False) -> list[Json]:
    """The places in the model's steps, as its replicas announced them last; of what runs in them
    nothing is shown. Raises Rejected (503) where none is free and the client asks for that."""
    context, name = context_of(request).named(model)
    found: list[Json] = []
    for replica in context.stage.registry.of("compute", name):
        num_slots, num_running = int(replica.load.max_num_seqs or 0), int(replica.load.running or 0)
        own = range(len(found), len(found) + num_slots)
        found += [
            {
                "id": number,
                "n_ctx": replica.max_model_len,
                "speculative": False,
                "is_processing": number - own.start < num_running,
            }
            for number in own
        ]
    if fail_on_no_slot and all(slot["is_processing"] for slot in found):
        raise Rejected("no slot available", status=503, retry_after_s=1, code="no_slot_available")
    return found


@router.post("/slots/{slot}")
async def change_slot() -> None:
    """Refused: a slot's cache can't be saved, restored or erased."""
    raise RequestFailed(
        RequestError(
            "a slot has no cache of its own here: prefixes are cached for all requests alike",
            501,
            "action",
            "not_supported",
        )
    )


@router.get("/lora-adapters")
async def lora_adapters() -> list[Json]:
    """The LoRA adapters: there are none."""
    return []


@router.post("/lora-adapters")
async def set_lora_adapters(request: Request) -> Json:
    """Take an empty list, and refuse any other."""
    async with context_of(request).bodies.receiving(request) as data:
        if data.strip().replace(b" ", b"") != b"[]":
            raise Invalid("there are no LoRA adapters here: the only list to set is the empty one", param="lora")
    return {"success": True}


@router.get("/props")
async def props(request: Request, model: str | None = None) -> Json:
    """The model, and what a request gets that says nothing."""
    context, name = context_of(request).named(model)
    described = await ask_tokenizer(context, name, "describe", question(context, name))
    replicas = context.stage.registry.of("compute", name)
    return {
        "default_generation_settings": {
            "n_ctx": described["max_model_len"],
            "params": generation_settings(SILENT, LlamaBody()),
        },
        "total_slots": int(sum(replica.load.max_num_seqs or 0 for replica in replicas)),
        "model_alias": name,
        "model_path": name,
        "chat_template": described["chat_template"] or "",
        **{name: text for name, text in described.items() if name == "chat_template_tool_use"},
        "bos_token": described.get("bos_token") or "",
        "eos_token": described.get("eos_token") or "",
        "modalities": {"vision": sees(context, name), "audio": False},
        "is_sleeping": False,
        "build_info": f"penstock {version('penstock')}",
    }
