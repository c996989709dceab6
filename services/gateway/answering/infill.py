"""Infilling: a prompt of the tokens that a model was trained to fill a gap by, however it was asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.gateway.answering.ask import token_ids_of
from services.gateway.context import GatewayContext
from services.requests.bodies.fields import Prompt, TokenIds
from services.requests.dialects.openai.intent import Intent
from services.requests.dialects.openai.schemas import with_prompt
from shared.process.errors import Invalid
from shared.wire.messages import EncodingParams

# Before the text, after it, and where the answer begins: Qwen and StarCoder 2, StarCoder, Code
# Llama, DeepSeek, Codestral.
SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)
SUFFIX_FIRST = ("[PREFIX]",)  # Codestral reads what is behind the gap first, and answers where the text before it ends
MARK = EncodingParams(add_special_tokens=False, parse_special_tokens=True)
FIRST = EncodingParams(add_special_tokens=True, parse_special_tokens=True)
TEXT = EncodingParams(add_special_tokens=False, parse_special_tokens=False)


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """One token each, and what every prompt of the model begins with."""

    beginning: TokenIds
    prefix: TokenIds
    suffix: TokenIds
    middle: TokenIds
    has_suffix_first: bool

    def around(self, files: TokenIds, before: TokenIds, after: TokenIds, begun: TokenIds) -> TokenIds:
        """The whole prompt. begun: how the answer begins."""
        if self.has_suffix_first:
            return np.concatenate([self.beginning, files, self.suffix, after, self.prefix, before, begun])
        return np.concatenate([self.beginning, files, self.prefix, before, self.suffix, after, self.middle, begun])


async def find_marks(context: GatewayContext, model: str) -> InfillMarks | None:
    """The model's tokens for infilling, if it has them."""
    spelt = [mark for spelling in SPELLINGS for mark in spelling]
    firsts = [prefix for prefix, _, _ in SPELLINGS]
    token_ids = await token_ids_of(context, model, spelt + firsts, [MARK] * len(spelt) + [FIRST] * len(firsts))
    for number, spelling in enumerate(SPELLINGS):
        prefix, suffix, middle = token_ids[3 * number : 3 * number + 3]
        if (
            all(len(each) == 1 for each in (prefix, suffix, middle))
            and len({int(each[0]) for each in (prefix, suffix, middle)}) == 3
        ):
            first = token_ids[len(spelt) + number]
            return InfillMarks(
                first[: first.tolist().index(int(prefix[0]))], prefix, suffix, middle, spelling[0] in SUFFIX_FIRST
            )
    return None


async def infill_prompts(
    context: GatewayContext,
    model: str,
    marks: InfillMarks,
    befores: Sequence[Prompt],
    after: str,
    files: str = "",
    begun: str = "",
) -> list[TokenIds]:
    """The token ids of each prompt: other files, the text before the gap, the text after it, the
    beginning of the answer.
    """
    texts = [files, after, begun, *(each for each in befores if isinstance(each, str))]
    ids_of_files, ids_after, ids_begun, *others = await token_ids_of(context, model, texts, [TEXT] * len(texts))
    encoded = iter(others)
    return [
        marks.around(ids_of_files, next(encoded) if isinstance(each, str) else each, ids_after, ids_begun)
        for each in befores
    ]


async def infilled(context: GatewayContext, intent: Intent, *, is_asked: bool = False) -> Intent:
    """The completion by which the gap between prompt and suffix is filled, if there is a suffix;
    is_asked: in any case. Raises Invalid, and as ask_all.
    """
    if not intent.suffix and not is_asked:
        return intent
    if intent.requests[0].echo:
        raise Invalid(
            "echo is not available in infilling, where the prompt is no text that the answer follows: leave it out",
            param="echo",
        )
    model = context.resolve(intent.model)
    if (marks := await find_marks(context, model)) is None:
        reason = "it was not trained for it: /v1/completions without suffix continues the prompt"
        param = "suffix" if intent.suffix else "model"
        raise Invalid(f"{model} has no tokens for infilling, {reason}", param=param, code="model_not_supported")
    befores = [
        request.prompt if request.prompt is not None else np.asarray(request.prompt_token_ids, np.int32)
        for request in intent.requests
    ]
    prompts = await infill_prompts(context, model, marks, befores, intent.suffix)
    return replace(intent, requests=tuple(map(with_prompt, intent.requests, prompts)), suffix="")
