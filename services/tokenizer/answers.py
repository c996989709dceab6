"""What the tokenizer answers by itself, as JSON: then nothing is computed."""

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of the request's one event, with which it ends."""

    text: str


def tokenized(token_ids: list[int], max_model_len: int) -> Answer:
    return Answer(json.dumps({"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids}))
