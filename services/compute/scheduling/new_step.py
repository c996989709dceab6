"""A step in the making, and its rows."""

from dataclasses import dataclass, field

from services.compute.batch import BatchRow
from services.compute.sequence import Sequence


@dataclass(slots=True)
class NewStep:
    # one token behind: each computes that token and gets the next
    decodes: list[Sequence] = field(default_factory=list)
    # and how many of its uncomputed tokens
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)


def advance(sequence: Sequence, num_tokens: int, num_drafts: int = 0) -> BatchRow:
    """The row of the sequence's next num_tokens tokens, of which the last num_drafts are guessed.
    They count as computed from now on, and the logprobs of its prompt as scored that follow from
    them."""
    first, last = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
    is_sampled = last == len(sequence.token_ids) and sequence.embedding is None
    sampled = range(num_tokens - 1 - num_drafts, num_tokens) if is_sampled else range(0)
    pooled = sequence.pooled_tokens(first, last)
    first_target, target_ids = (0, ()) if sequence.is_scored else take_targets(sequence, last)
    sequence.num_computed_tokens = last
    return BatchRow(
        sequence.handle, tuple(sequence.token_ids[first:last]), first, tuple(sequence.block_table), sampled, sequence.num_prompt_tokens,
        first_target, target_ids, range(pooled.start - first, pooled.stop - first) if pooled else pooled,
    )  # fmt: skip


def take_targets(sequence: Sequence, num_computed: int) -> tuple[int, tuple[int, ...]]:
    """The place of the first token of its prompt that has no logprobs yet, and that token and those
    after it that follow one of its first num_computed tokens."""
    first_target = sequence.num_scored_tokens + 1
    target_ids = tuple(sequence.token_ids[first_target : min(num_computed + 1, sequence.num_prompt_tokens)])
    sequence.num_scored_tokens += len(target_ids)
    return first_target, target_ids
