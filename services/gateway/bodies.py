"""`python -m services.gateway.bodies`: the gateway's helper that parses long bodies, so that no
body stalls the streams of others.

It knows every kind of body that the gateway takes. A question is a line of JSON, the name of the
body's class or such names by field, and the body; the answer is the checked body, or Invalid.
Schemas in it are looked through here, too: one that is too long is refused, and its megabytes never
come to the gateway's loop.
"""

import gc

import orjson

from services.gateway.api.batches.schemas import BatchBody
from services.gateway.api.openai.fim import FimBody
from services.gateway.api.openai.token_schemas import ContentBody, DetokenizeBody, TokenizeBody
from services.gateway.api.pooling.schemas import ClassificationBody, PoolingBody, RerankBody, ScoreBody, TextsBody
from services.requests.bodies.body import Body
from services.requests.bodies.parse import parse
from services.requests.dialects.anthropic.schemas import CountTokensBody, MessageBatchBody, MessagesBody
from services.requests.dialects.llamacpp.schemas import InfillBody, LlamaCompletionBody, LlamaEmbeddingBody
from services.requests.dialects.ollama.schemas import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaModelBody,
    OllamaPullBody,
)
from services.requests.dialects.openai.embeddings import EmbeddingBody
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody, GenerateBody
from services.requests.dialects.responses.schemas import ResponseBody
from services.requests.store.modules.schemas import PromptModulesBody
from shared.process.worker import run_worker

BODIES: tuple[type[Body], ...] = (
    ChatCompletionBody,
    CompletionBody,
    FimBody,
    TokenizeBody,
    ContentBody,
    DetokenizeBody,
    EmbeddingBody,
    PoolingBody,
    ScoreBody,
    RerankBody,
    TextsBody,
    ClassificationBody,
    LlamaCompletionBody,
    InfillBody,
    LlamaEmbeddingBody,
    ResponseBody,
    BatchBody,
    PromptModulesBody,
    MessagesBody,
    CountTokensBody,
    MessageBatchBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaModelBody,
    OllamaPullBody,
)


BY_NAME = {each.__name__: each for each in BODIES}


def answer(question: bytes) -> object:
    line, _, data = question.partition(b"\n")
    names = orjson.loads(line)
    kind = BY_NAME[names] if isinstance(names, str) else {field: BY_NAME[name] for field, name in names.items()}
    body = parse(kind, data)
    if isinstance(body, GenerateBody):
        body.constraint()
    if isinstance(body, ChatCompletionBody):
        body.calling().forced()
    return body


if __name__ == "__main__":
    # millions of small objects at once, freed as soon as they are checked: looking for cycles among
    # them doubles the time
    gc.disable()
    run_worker(answer)
