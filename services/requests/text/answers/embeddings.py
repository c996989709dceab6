"""The answer of a request for embeddings."""

import base64
from typing import Any

from services.requests.store.record import ResponseRecord
from services.requests.text.answers.choice import Choice
from shared.model.arrays import Float32Array


def embeddings_body(record: ResponseRecord, choices: list[Choice], *, is_base64: bool) -> dict[str, Any]:
    """The answer: the vectors as arrays, or spelt in base64."""
    num_tokens = sum(choice.num_prompt_tokens for choice in choices)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": choice.index, "embedding": _vector(choice.embedding, is_base64=is_base64)}
            for choice in choices
        ],
        "model": record.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _vector(vector: Float32Array | None, *, is_base64: bool) -> Any:
    assert vector is not None, "the end of an embedding's log has its vector"
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_base64 else vector
