"""llama.cpp's own endpoints, for the programs that speak them. docs/use/other-apis.md says what is understood."""

from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from services.gateway.context import Context, context_of
from services.gateway.llamacpp.answers import LlamaResponder
from services.gateway.llamacpp.infill import find_marks, infill_prompt
from services.gateway.llamacpp.schemas import DEFAULTS, Biases, InfillBody, LlamaBody, LlamaCompletionBody, LlamaEmbeddingBody, Pieces
from services.gateway.measured import Measured
from services.gateway.openai import parse
from services.gateway.openai.ask import ask_tokenizer, question, token_ids_of
from services.gateway.openai.docs import takes
from services.gateway.openai.embeddings import EmbeddingResponder, submit_embeddings
from services.gateway.openai.fields import TokenIds
from services.gateway.openai.routes import chat_completions, list_models, prepare_chat, prepare_completion
from services.gateway.openai.schemas import ChatCompletionBody, CompletionBody, EmbeddingBody
from services.gateway.translate import name_of, own_terms
from shared.wire.messages import EncodingParams

Json = dict[str, Any]

NAMES = {
    "max_tokens": "n_predict", "logprobs": "n_probs", "n": "n_cmpl", "repetition_penalty": "repeat_penalty", "structured_outputs.grammar": "grammar",
    "structured_outputs.json": "json_schema", "structured_outputs": "grammar",
}  # fmt: skip  # what a completion calls otherwise

router = APIRouter()
router.add_api_route("/chat/completions", chat_completions, methods=["POST"], openapi_extra=takes("chat"))
router.add_api_route("/models", list_models, methods=["GET"])


@router.post("/completion", openapi_extra=takes("llama_completion"))
@router.post("/completions", openapi_extra=takes("llama_completion"))
async def completion(request: Request) -> Response:
    """Continue a prompt, or several."""
    context = context_of(request)
    body = await context.read(request, "llama_completion")
    assert isinstance(body, LlamaCompletionBody)
    model = context.resolve(body.model)
    return await answer(context, request, body, model, await one_piece_each(context, model, body.prompt))


@router.post("/infill", openapi_extra=takes("llama_infill"))
async def infill(request: Request) -> Response:
    """Write what stands between two pieces of code, with a model that was trained for it."""
    context = context_of(request)
    body = await context.read(request, "llama_infill")
    assert isinstance(body, InfillBody)
    model = context.resolve(body.model)
    marks = await find_marks(context, model)
    return await answer(context, request, body, model, [await infill_prompt(context, model, marks, body)])


async def answer(context: Context, request: Request, body: LlamaBody, model: str, prompts: list[str | TokenIds]) -> Response:
    """Submit the completion that this is here, and answer as llama.cpp would."""
    biases = await biases_of(context, model, body.logit_bias or [])
    texts = [each if isinstance(each, str) else each.tolist() for each in prompts]
    asked = parse.check(CompletionBody, body.as_completion(model, texts, biases), lambda path: name_of(path, NAMES))
    measured = Measured(context.metrics)
    with own_terms(NAMES):
        record, requests = await prepare_completion(context, asked, context.stage.replica_id, kind="llama")
    if body.limit is None:
        requests = [replace(each, params=replace(each.params, max_tokens=None)) for each in requests]
    generation = await context.pipeline.submit(context.caller, record, requests)
    context.log_submitted(record, body.user, request.state.request_id)
    responder = LlamaResponder(generation, measured, context.settings.ping_interval_s)
    responder.describe(settings=requests[0].params, prompts=prompts, has_tokens=bool(body.return_tokens))
    return await (responder.stream() if body.stream else responder.whole(request))


async def one_piece_each(context: Context, model: str, prompts: list[Pieces]) -> list[str | TokenIds]:
    """Each prompt as a text or as token ids: of a mixture, each text is encoded by itself."""
    found: list[str | TokenIds] = []
    for pieces in prompts:
        if len(pieces) == 1:
            found.append(pieces[0])
            continue
        texts = [piece for piece in pieces if isinstance(piece, str)]
        encodings = [EncodingParams(add_special_tokens=piece is pieces[0]) for piece in pieces if isinstance(piece, str)]
        encoded = iter(await token_ids_of(context, model, texts, encodings))
        found.append(np.concatenate([next(encoded) if isinstance(piece, str) else piece for piece in pieces]))
    return found


async def biases_of(context: Context, model: str, biases: Biases) -> dict[str, float]:
    """The biases by token id. A text gives its bias to each of its tokens."""
    texts = [token for token, _ in biases if isinstance(token, str)]
    encoded = iter(await token_ids_of(context, model, texts, [EncodingParams(add_special_tokens=False)] * len(texts)) if texts else [])
    found: dict[str, float] = {}
    for token, bias in biases:
        found |= dict.fromkeys(map(str, next(encoded).tolist()) if isinstance(token, str) else [str(token)], bias)
    return found


@router.post("/apply-template", openapi_extra=takes("chat"))
async def apply_template(request: Request) -> Json:
    """The text that the model's chat template makes of a conversation."""
    context = context_of(request)
    body = await context.read(request, "chat")
    assert isinstance(body, ChatCompletionBody)
    _, [asked, *_] = await prepare_chat(context, body, "internal", body.model, context.stage.replica_id)
    return await ask_tokenizer(context, asked.model, "render", asked)


class LlamaEmbeddings(EmbeddingResponder):
    """Vectors as llama.cpp lists them."""

    def _body(self) -> Any:
        return [{"index": choice.index, "embedding": [choice.embedding]} for choice in self.choices]


@router.post("/embedding", openapi_extra=takes("llama_embedding"))
@router.post("/embeddings", openapi_extra=takes("llama_embedding"))
async def embedding(request: Request) -> Response:
    """A vector of each text."""
    context = context_of(request)
    body = await context.read(request, "llama_embedding")
    assert isinstance(body, LlamaEmbeddingBody)
    asked = EmbeddingBody.model_construct(model=context.resolve(body.model), input=[*body.content])
    return await (await submit_embeddings(context, asked, request, LlamaEmbeddings)).whole(request)


@router.get("/props")
async def props(request: Request, model: str | None = None) -> Json:
    """The model, and what a request gets that says nothing."""
    context = context_of(request)
    name = context.resolve(model or context.only_model())
    described = await ask_tokenizer(context, name, "describe", question(context, name))
    replicas = context.stage.registry.of("compute", name)
    return {
        "default_generation_settings": {"n_ctx": described["max_model_len"], "params": DEFAULTS | {"n_predict": -1}},
        "total_slots": int(sum(replica.load.get("max_num_seqs", 0) for replica in replicas)),
        "model_alias": name,
        "model_path": name,
        "chat_template": described["chat_template"] or "",
        "bos_token": described.get("bos_token") or "",
        "eos_token": described.get("eos_token") or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"penstock {version('penstock')}",
    }
