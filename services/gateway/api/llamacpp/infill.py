"""Infilling: a prompt of the tokens that a model was trained to fill a gap by."""

from dataclasses import dataclass

import numpy as np

from services.gateway.answering.ask import token_ids_of
from services.gateway.api.llamacpp.schemas import InfillBody
from services.gateway.context import Context
from services.requests.bodies.fields import TokenIds
from services.requests.errors import RequestFailed
from shared.wire.messages import EncodingParams, RequestError

# Before the text, after it, and where the answer begins: Qwen and StarCoder 2, StarCoder, Code
# Llama, DeepSeek, Codestral.
SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)
MARK = EncodingParams(add_special_tokens=False, parse_special_tokens=True)
TEXT = EncodingParams(add_special_tokens=False, parse_special_tokens=False)


@dataclass(frozen=True, slots=True)
class Marks:
    """One token each."""

    prefix: TokenIds
    suffix: TokenIds
    middle: TokenIds


async def find_marks(context: Context, model: str) -> Marks:
    """The model's tokens for infilling. Raises RequestFailed (501) if it has none."""
    spelt = [mark for spelling in SPELLINGS for mark in spelling]
    found = await token_ids_of(context, model, spelt, [MARK] * len(spelt))
    for at in range(0, len(found), 3):
        marks = found[at : at + 3]
        if all(len(each) == 1 for each in marks) and len({int(each[0]) for each in marks}) == 3:
            return Marks(*marks)
    raise RequestFailed(RequestError(f"{model} has no tokens for infilling: it was not trained for it", 501, "model", "model_not_supported"))


async def infill_prompt(context: Context, model: str, marks: Marks, body: InfillBody) -> TokenIds:
    """The token ids of the whole prompt: other files, the text before the gap, the text after it,
    the beginning of the answer."""
    extra = "".join(f"{each.filename}\n{each.text}\n" for each in body.input_extra)
    texts = [extra, body.input_prefix, body.input_suffix, body.prompt]
    files, before, after, begun = await token_ids_of(context, model, texts, [TEXT] * len(texts))
    return np.concatenate([files, marks.prefix, before, marks.suffix, after, marks.middle, begun])
