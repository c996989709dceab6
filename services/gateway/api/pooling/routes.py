"""vLLM's /pooling, /score, /rerank and /classify; /rerank is Cohere's and Jina's, and llama.cpp's.

A model with a classification head scores a pair of texts by reading both at once. Any other model
makes a vector of each text, and the score of a pair is the cosine of their angle.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from services.gateway.answering.embeddings import EmbeddingResponder, submit_embeddings
from services.gateway.api.pooling.schemas import (
    ClassificationBody,
    PairsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    TextsBody,
)
from services.gateway.context import GatewayContext, context_of
from services.gateway.http.docs import takes
from services.requests.dialects.openai.embeddings import EmbeddingBody
from services.requests.dialects.openai.translate import in_own_terms, own_terms
from services.requests.errors import RequestFailed
from services.requests.store.record import ResponseRecord
from services.requests.text.answers.choice import Choice
from shared.process.errors import Invalid
from shared.wire.replica import Replica

router = APIRouter()

Json = dict[str, Any]
RERANKED: Mapping[str, type[RerankBody | TextsBody]] = {"documents": RerankBody, "texts": TextsBody}
NAMES: dict[str, dict[str, str]] = {
    "rerank": {"input": "documents"},
    "score": {"input": "text_2"},
}  # by kind: what our fields are called there
Array = np.ndarray[Any, np.dtype[np.float64]]


class VectorsResponder(EmbeddingResponder):
    """Answers with what `to_body` makes of a generation's vectors."""

    to_body: Callable[[ResponseRecord, list[Array]], Json | list[Json]]

    def _body(self) -> Any:
        vectors = [np.asarray(choice.embedding, np.float64) for choice in self.choices]
        made = self.to_body(self.generation.record, vectors)
        return made | {"usage": usage_of(self.choices)} if isinstance(made, dict) else made


def usage_of(choices: list[Choice]) -> Json:
    num_tokens = sum(choice.num_prompt_tokens for choice in choices)
    return {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}


def listed(record: ResponseRecord, data: list[Json]) -> Json:
    return {"id": record.response_id, "object": "list", "created": record.created, "model": record.model, "data": data}


async def answer(
    request: Request,
    context: GatewayContext,
    body: EmbeddingBody,
    kind: str,
    to_body: Callable[[ResponseRecord, list[Array]], Json | list[Json]],
) -> Response:
    names = NAMES.get(kind, {})
    with own_terms(names):
        responder = await submit_embeddings(context, body, request, VectorsResponder, kind)
    responder.to_body = to_body
    try:
        return await responder.whole(request)
    except RequestFailed as failed:
        raise RequestFailed(in_own_terms(failed.error, names)) from None


@router.post("/pooling", openapi_extra=takes(PoolingBody))
@router.post("/v1/pooling", openapi_extra=takes(PoolingBody))
async def pooling(request: Request) -> Response:
    """One vector of each input; of a classifier, its numbers."""
    context, body = await context_of(request).read(request, PoolingBody)

    def to_body(record: ResponseRecord, vectors: list[Array]) -> Json:
        return listed(
            record,
            [
                {"index": index, "object": "pooling", "data": vector.astype(np.float32)}
                for index, vector in enumerate(vectors)
            ],
        )

    return await answer(request, context, body, "pooling", to_body)


@router.post("/score", openapi_extra=takes(ScoreBody))
@router.post("/v1/score", openapi_extra=takes(ScoreBody))
async def score(request: Request) -> Response:
    """How much the texts of each pair have to do with each other."""
    context, body = await context_of(request).read(request, ScoreBody)
    firsts, seconds = body.pairs()

    def to_body(record: ResponseRecord, scores: Sequence[float]) -> Json:
        return listed(record, [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)])

    return await answer_scores(request, context, body, firsts, seconds, "score", to_body)


@router.post("/rerank", openapi_extra=takes(RerankBody, TextsBody))
@router.post("/reranking", openapi_extra=takes(RerankBody, TextsBody))
@router.post("/v1/rerank", openapi_extra=takes(RerankBody, TextsBody))
@router.post("/v1/reranking", openapi_extra=takes(RerankBody, TextsBody))
@router.post("/v2/rerank", openapi_extra=takes(RerankBody, TextsBody))
async def rerank(request: Request) -> Response:
    """The documents, the best first."""
    context, body = await context_of(request).read(request, RERANKED)
    if isinstance(body, TextsBody):
        return await rerank_texts(request, context, body)
    shows_text = body.return_documents if body.return_text is None else body.return_text

    def to_body(record: ResponseRecord, scores: Sequence[float]) -> Json:
        order = best_first(scores, body.top_n)
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": body.documents[index]}} if shows_text else {})
            for index in order
        ]
        return {"id": record.response_id, "object": "list", "model": record.model, "results": results}

    return await answer_scores(request, context, body, [body.query], body.documents, "rerank", to_body)


async def rerank_texts(request: Request, context: GatewayContext, body: TextsBody) -> Response:
    """The answer is a list of scores, the best first."""

    def to_body(_: ResponseRecord, scores: Sequence[float]) -> list[Json]:
        order = best_first(scores, body.top_n)
        return [
            {"index": index, "score": scores[index]} | ({"text": body.texts[index]} if body.return_text else {})
            for index in order
        ]

    if body.truncate and body.truncate_prompt_tokens is None:
        body = body.model_copy(update={"truncate_prompt_tokens": -1})
    return await answer_scores(request, context, body, [body.query], body.texts, "rerank", to_body)


def best_first(scores: Sequence[float], max_results: int | None) -> list[int]:
    """The places of the scores, that of the highest first."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: max_results or None]


async def answer_scores(
    request: Request,
    context: GatewayContext,
    body: PairsBody,
    firsts: list[str],
    seconds: list[str],
    kind: str,
    to_body: Callable[[ResponseRecord, Sequence[float]], Json | list[Json]],
) -> Response:
    """firsts: one text, or as many as `seconds`."""
    replica = context.served(body.model)
    if not replica.labels:
        vectors = body.vectors_of([*firsts, *seconds])
        return await answer(
            request,
            context,
            vectors,
            kind,
            lambda record, vectors: to_body(record, cosines(vectors[: len(firsts)], vectors[len(firsts) :])),
        )
    if len(replica.labels) > 1:
        raise Invalid(
            f"this model has {len(replica.labels)} labels, and a score takes one: see /classify",
            param="model",
            code="model_not_supported",
        )
    pairs = body.logits_of(firsts if len(firsts) > 1 else firsts * len(seconds), seconds)
    return await answer(
        request,
        context,
        pairs,
        kind,
        lambda record, vectors: to_body(record, [float(probabilities(replica, vector)[0]) for vector in vectors]),
    )


def cosines(firsts: list[Array], seconds: list[Array]) -> list[float]:
    """The vectors have length 1, but for the last bits, so a product may be a little above. Pairs
    each of `firsts` with its own of `seconds`, or the only one with all."""
    return [
        min(max(float(np.dot(first, second)), -1.0), 1.0) for first, second in zip(cycle(firsts), seconds, strict=False)
    ]


@router.post("/classify", openapi_extra=takes(ClassificationBody))
@router.post("/v1/classify", openapi_extra=takes(ClassificationBody))
async def classify(request: Request) -> Response:
    """Each text's label, and the probabilities of all labels."""
    context, body = await context_of(request).read(request, ClassificationBody)
    replica = context.served(body.model)
    if not replica.labels:
        raise Invalid("this model has no classification head", param="model", code="model_not_supported")
    to_body = partial(classified, replica, has_activation=body.use_activation)
    return await answer(request, context, body.embedding(), "classification", to_body)


def classified(replica: Replica, record: ResponseRecord, logits: list[Array], *, has_activation: bool) -> Json:
    data = []
    for index, each in enumerate(logits):
        values = probabilities(replica, each) if has_activation else each
        label = replica.labels[int(np.argmax(values))]
        data.append({"index": index, "label": label, "probs": values, "num_classes": len(values)})
    return listed(record, data)


def probabilities(replica: Replica, logits: Array) -> Array:
    """Probabilities of labels: each by itself for one label, or where several may be true; else
    they sum to 1."""
    if len(logits) == 1 or replica.is_multi_label:
        return 1.0 / (1.0 + np.exp(-np.clip(logits, -700.0, 700.0)))
    exponentials = np.exp(logits - logits.max())
    shares: Array = exponentials / exponentials.sum()
    return shares
