"""The logprobs of a prompt as clients know them: as OpenAI's completions echo them, and as vLLM's
field `prompt_logprobs` has them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shared.wire.logprobs import PromptLogprobs

PART = "bytes:\\x"  # begins the text of a token that is a part of a character
LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def likeliest(tokens: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Tokens and their logprobs as a map; of those that are named alike, the likeliest."""
    found: dict[str, float] = {}
    for name, logprob in tokens:
        found[name] = max(finite(logprob), found.get(name, LOWEST_LOGPROB))
    return found


@dataclass(slots=True)
class EchoedLogprobs:
    """OpenAI's old form: lists in step, over what is echoed of the prompt and the answer. Nothing
    predicts a prompt's first token."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(
        default_factory=list
    )  # the likeliest in the token's place, and the token itself
    text_offset: list[int] = field(default_factory=list)


def echoed(prompt: PromptLogprobs, num_top: int, *, by_id: bool) -> EchoedLogprobs:
    """The logprobs of a prompt, with the num_top likeliest. by_id: tokens are named by their
    ids."""
    text_of = {token_id: f"token_id:{token_id}" if by_id else text for token_id, text in texts(prompt).items()}
    tokens = [text_of[token_id] for token_id in prompt.token_ids.tolist()]
    own = zip(tokens[1:], prompt.logprobs.tolist(), strict=True)
    tops = [
        likeliest((each, *((text_of[token_id], logprob) for token_id, logprob in row)))
        for each, row in zip(own, top_rows(prompt, num_top), strict=True)
    ]
    return EchoedLogprobs(
        tokens,
        [None, *map(finite, prompt.logprobs.tolist())],
        [None, *tops],
        prompt.text_offsets.tolist() or [0] * len(tokens),
    )


def by_token_id(prompt: PromptLogprobs, num_top: int) -> list[dict[str, dict[str, Any]] | None]:
    """Map token ids to logprobs for each token of the prompt, its own first, then the num_top
    likeliest; null for the first. Parts of characters are U+FFFD there, as vLLM has them: the ids
    say which."""
    text_of = {token_id: "\ufffd" if text.startswith(PART) else text for token_id, text in texts(prompt).items()}
    own = zip(prompt.token_ids[1:].tolist(), prompt.logprobs.tolist(), prompt.ranks.tolist(), strict=True)
    found: list[dict[str, dict[str, Any]] | None] = [None]
    for (token_id, logprob, rank), row in zip(own, top_rows(prompt, num_top), strict=True):
        entry = {str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": text_of[token_id]}}
        for place, (top_id, top_logprob) in enumerate(row, 1):
            entry.setdefault(
                str(top_id), {"logprob": finite(top_logprob), "rank": place, "decoded_token": text_of[top_id]}
            )
        found.append(entry)
    return found


def texts(prompt: PromptLogprobs) -> dict[int, str]:
    return dict(zip(prompt.spelled_token_ids.tolist(), prompt.texts, strict=True))


def top_rows(prompt: PromptLogprobs, num_top: int) -> list[list[tuple[int, float]]]:
    """Token ids and logprobs of each row's first num_top."""
    shape = len(prompt.logprobs), prompt.num_top
    token_ids, logprobs = (
        each.reshape(shape)[:, :num_top].tolist() for each in (prompt.top_token_ids, prompt.top_logprobs)
    )
    return [list(zip(*row, strict=True)) for row in zip(token_ids, logprobs, strict=True)]
