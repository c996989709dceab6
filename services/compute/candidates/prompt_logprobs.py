"""The logprobs of a prompt's tokens: what the model's own logits say of the token that stands
there, and of the likeliest.

A prompt's rows come slice by slice, and each slice is reduced at once, so that the logits of a long
prompt are never in memory together. A row's result depends on nothing but the row.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate

import numpy as np
import torch

from services.compute.backends.backend import RowSearch
from services.compute.sequence import ScoredTokens, Sequence
from services.compute.sequence.batch import ScheduledBatch
from shared.model.arrays import Array
from shared.wire.logprobs import PromptLogprobs
from shared.wire.messages import RequestError

NOT_FINITE = "the model's numbers for this request's prompt are not finite"


def score_prompts(
    slices: Iterable[torch.Tensor], batch: ScheduledBatch, get: Callable[[int], Sequence], search: RowSearch
) -> dict[int, RequestError]:
    """Score the batch's target_ids, for the sequences that `get` finds by handle.

    slices: [n, vocab] float32 each, the rows that predict the targets, in their order. Returns by
    handle which prompts failed, and why.
    """
    asked = [(get(row.handle), row.target_ids) for row in batch.rows if row.target_ids]
    if not asked:
        return {}
    targets = np.array([token_id for _, target_ids in asked for token_id in target_ids], np.int64)
    k = max(sequence.request.params.prompt_logprobs or 0 for sequence, _ in asked)
    parts, at = [], 0
    for logits in slices:
        parts.append(score_rows(logits, targets[at : at + len(logits)], k, search))
        at += len(logits)
    whole = join_scored(parts)
    failures: dict[int, RequestError] = {}
    for (sequence, target_ids), end in zip(asked, accumulate(len(target_ids) for _, target_ids in asked), strict=True):
        rows, own = slice(end - len(target_ids), end), slice(sequence.request.params.prompt_logprobs)
        sequence.scored.append(
            ScoredTokens(
                whole.logprobs[rows], whole.ranks[rows], whole.top_token_ids[rows, own], whole.top_logprobs[rows, own]
            )
        )
        if np.isnan(whole.logprobs[rows]).any():
            failures[sequence.handle] = RequestError(NOT_FINITE)
    return failures


@torch.inference_mode()
def score_rows(logits: torch.Tensor, targets: Array, k: int, search: RowSearch) -> ScoredTokens:
    """logits: [n, vocab] float32; targets: [n] int64, the token whose logprob each row gives; k:
    how many of the likeliest to list.

    A row without finite numbers, or with a NaN anywhere, has NaN for its logprobs.
    """
    num_rows, vocab_size = logits.shape
    k = min(k, vocab_size)
    values, ids = search.find_largest(logits, max(k, 1))
    own = logits.gather(1, torch.from_numpy(targets).to(logits.device)[:, None])
    masses = search.total_masses(
        logits, np.arange(num_rows), np.ascontiguousarray(values[:, 0]), np.ones(num_rows, np.float32)
    )
    logsumexp = (values[:, 0] + np.log(masses)).astype(np.float32)
    logsumexp[~np.isfinite(values[:, 0])] = np.nan
    logprobs = own[:, 0].cpu().numpy() - logsumexp
    return ScoredTokens(
        logprobs, 1 + num_larger(logits, own), ids[:, :k].astype(np.int32), values[:, :k] - logsumexp[:, None]
    )


def num_larger(logits: torch.Tensor, values: torch.Tensor) -> Array:
    """How many of each row are larger than its value. logits: [n, vocab], values: [n, 1]. Returns
    [n] int32."""
    is_host = logits.device.type == "cpu"  # there numpy counts eight times as fast as torch sums
    counts = (
        np.count_nonzero(logits.numpy() > values.numpy(), axis=1)
        if is_host
        else (logits > values).sum(dim=1).cpu().numpy()
    )
    larger: Array = counts.astype(np.int32)
    return larger


def join_scored(parts: list[ScoredTokens]) -> ScoredTokens:
    """Parts that follow one another as one; of none, no rows."""
    if not parts:
        return ScoredTokens(
            np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
        )
    names = ("logprobs", "ranks", "top_token_ids", "top_logprobs")
    return ScoredTokens(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def prompt_logprobs(sequence: Sequence) -> PromptLogprobs | None:
    """The logprobs of the sequence's prompt, which is scored whole; None if they were not requested, or
    its first token's entry holds them already."""
    if sequence.request.params.prompt_logprobs is None or sequence.tokens.num_decided > sequence.tokens.num_prompt:
        return None
    whole = join_scored(sequence.scored)
    token_ids = np.array(sequence.tokens.ids[: sequence.tokens.num_prompt], np.int32)
    return PromptLogprobs(
        token_ids, whole.logprobs, whole.ranks, whole.top_token_ids.ravel(), whole.top_logprobs.ravel()
    )
