"""A body's bytes to a body, checked. Pure, and in time linear in its size: it runs in the gateway or, for long bodies, in its helper process."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from services.gateway.anthropic.schemas import CountTokensBody, MessageBatchBody, MessagesBody
from services.gateway.batches.schemas import BatchBody
from services.gateway.ignored import pass_over
from services.gateway.llamacpp.schemas import InfillBody, LlamaCompletionBody, LlamaEmbeddingBody
from services.gateway.ollama.schemas import OllamaChatBody, OllamaEmbedBody, OllamaEmbeddingsBody, OllamaGenerateBody, OllamaModelBody, OllamaPullBody
from services.gateway.openai.body import Body
from services.gateway.openai.fields import kind_of
from services.gateway.openai.schemas import ChatCompletionBody, CompletionBody, EmbeddingBody
from services.gateway.openai.tokenize import DetokenizeBody, TokenizeBody
from services.gateway.pooling.schemas import ClassificationBody, PoolingBody, RerankBody, ScoreBody
from services.gateway.responses.schemas import ResponseBody
from shared.process.errors import Invalid

BODIES: dict[str, type[Body]] = {
    "chat": ChatCompletionBody,
    "completion": CompletionBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
    "embedding": EmbeddingBody,
    "pooling": PoolingBody,
    "score": ScoreBody,
    "rerank": RerankBody,
    "classification": ClassificationBody,
    "llama_completion": LlamaCompletionBody,
    "llama_infill": InfillBody,
    "llama_embedding": LlamaEmbeddingBody,
    "response": ResponseBody,
    "batch": BatchBody,
    "message": MessagesBody,
    "count": CountTokensBody,
    "message_batch": MessageBatchBody,
    "ollama_chat": OllamaChatBody,
    "ollama_generate": OllamaGenerateBody,
    "ollama_embed": OllamaEmbedBody,
    "ollama_embeddings": OllamaEmbeddingsBody,
    "ollama_model": OllamaModelBody,
    "ollama_pull": OllamaPullBody,
}
INVOCATION = "invocation"  # any of a chat, a completion and an embedding
MAX_NAMED = 16  # of the wrong fields of a body
BRANCHES = ("str", "int", "float", "bool", "word", "named", "allowed", "own", "free", "hosted")  # of a union, which pydantic puts between the parts of a path
B = TypeVar("B", bound=Body)


def parse(kind: str, data: bytes) -> Body:
    """Raises Invalid (400), naming the fields that are wrong."""
    try:
        value = orjson.loads(data.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise Invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise Invalid(f"the body must be a JSON object, got {kind_of(value)}", code="invalid_json")
    return check(BODIES[invoked(value) if kind == INVOCATION else kind], value)


def invoked(value: dict[str, Any]) -> str:
    """The kind of a body that came without one: its fields say it. Raises Invalid for one that could be none."""
    for field, kind in (("messages", "chat"), ("prompt", "completion"), ("input", "embedding")):
        if field in value:
            return kind
    raise Invalid("missing required parameter: messages, prompt or input", param="messages", code="missing_required_parameter")


def check(model: type[B], value: dict[str, Any], rename: Callable[[str], str] = str) -> B:
    """The body that a JSON object is. Raises Invalid (400), naming the fields that are wrong, as `rename` calls them."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise describe(error.errors(include_url=False, include_input=False), rename) from None


def take(model: type[B], value: dict[str, Any], rename: Callable[[str], str] = str) -> B:
    """The same; what is passed over goes to whoever collects it."""
    body = check(model, value, rename)
    pass_over(*map(rename, body.passed_over))
    return body


def describe(errors: Sequence[Any], rename: Callable[[str], str] = str) -> Invalid:
    """Pydantic's errors in one line; `param` and `code` are of the first."""
    told: dict[str, str] = {}
    for error in errors:
        name = rename(path_of(error))
        told.setdefault(name, sentence(name, error))
    first, *_ = told
    more = f"; and {len(told) - MAX_NAMED} more" if len(told) > MAX_NAMED else ""
    return Invalid("; ".join([*told.values()][:MAX_NAMED]) + more, param=first or None, code=code_of(errors[0]["type"]))


def sentence(name: str, error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown or unsupported field: {name}"
    if error["type"] == "missing":
        return f"missing required parameter: {name}"
    return f"{name or 'the body'}: {error['msg']}"


def path_of(error: Any) -> str:
    """The field as a client would write it: messages[0].content. A union puts type names between the parts of the path."""
    path = [part for part in error["loc"] if not (isinstance(part, str) and ("[" in part or part in BRANCHES))]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path) + str(error.get("ctx", {}).get("at", ""))
    return name.lstrip(".")


def code_of(kind: str) -> str:
    """OpenAI's word for one of pydantic's kinds of errors."""
    if kind == "extra_forbidden":
        return "unknown_parameter"
    if kind == "missing":
        return "missing_required_parameter"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"
