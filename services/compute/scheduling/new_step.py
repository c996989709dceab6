"""The step that is being scheduled, and its rows."""

from dataclasses import dataclass, field

from services.compute.cache.state_slots import StateSlots
from services.compute.scheduling.step_cost import StepCost
from services.compute.sequence import Sequence
from services.compute.sequence.batch import BatchRow

FIRST_CHUNK = 64  # tokens of prompts in a step with decodes, while a step's cost is not known yet


@dataclass(slots=True)
class NewStep:
    decodes: list[Sequence] = field(default_factory=list)  # one token behind: they compute it, and get the next
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # with the number of tokens to compute

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum([count for _, count in self.chunks])

    def room(self, max_tokens: int, cost: StepCost | None, bound_s: float | None, at_least: int) -> int:
        """The tokens that may be added to the decodes: max_tokens in all, within the time bound, but
        at_least if the bound leaves fewer. cost: None while it is not known; bound_s: None if there is no
        time bound."""
        left = max_tokens - len(self.decodes)
        if bound_s is None:
            return left
        if cost is None:
            return min(left, FIRST_CHUNK)
        num_context_tokens = sum([len(sequence.tokens) for sequence in self.decodes])
        return min(left, max(cost.tokens_within(bound_s, num_context_tokens) - len(self.decodes), at_least))


def advance(sequence: Sequence, num_tokens: int, num_drafts: int = 0, slots: StateSlots | None = None) -> BatchRow:
    """The row of the sequence's next num_tokens tokens; the last num_drafts of them are drafts. The tokens
    count as computed from now on, and the prompt's logprobs that follow from them as scored. slots: of a
    model that keeps states."""
    request, token_ids, kv, num_prompt = sequence.request, sequence.tokens.ids, sequence.kv, sequence.tokens.num_prompt
    first, last = kv.num_computed, kv.num_computed + num_tokens
    is_sampled = last == len(token_ids) and request.embedding is None
    sampled = range(num_tokens - 1 - num_drafts, num_tokens) if is_sampled else range(0)
    pooled = sequence.pooled_tokens(first, last)
    first_target, target_ids = (0, ()) if sequence.is_scored else take_targets(sequence, last)
    context = request.layout.context(kv.block_table.frozen, first, num_tokens)
    kv.advance(request.layout.skip_holes(last))
    num_folded = kv.num_folded
    if slots is not None:
        kv.num_folded = slots.fold_to(sequence, last, is_sampled=is_sampled)
    return BatchRow(
        handle=sequence.handle,
        token_ids=tuple(token_ids[first:last]),
        num_computed_tokens=context.num_tokens,
        block_table=context.blocks,
        sampled=sampled,
        num_prompt_tokens=num_prompt,
        first_target=first_target,
        target_ids=target_ids,
        pooled=range(pooled.start - first, pooled.stop - first) if pooled else pooled,
        position_shift=context.position_shift + (request.position_shift if first >= num_prompt else 0),
        block_lens=context.block_lens,
        images=request.images_in(first, last),
        sees_whole_images=request.sees_whole_images,
        positions=positions_of(sequence, first, last),
        slot=kv.slot,
        num_folded=num_folded,
        fold_to=kv.num_folded,
    )


def positions_of(sequence: Sequence, first: int, last: int) -> tuple[tuple[int, ...], ...]:
    """The three-dimensional positions of the tokens [first, last); () if the prompt has none, or no token
    is of the prompt."""
    if sequence.request.positions is None or first >= sequence.tokens.num_prompt:
        return ()
    of_prompt = sequence.request.positions[:, first:last]
    behind = range(sequence.tokens.num_prompt + sequence.request.position_shift, last + sequence.request.position_shift)
    return tuple((*dimension, *behind) for dimension in of_prompt.tolist())


def take_targets(sequence: Sequence, num_computed: int) -> tuple[int, tuple[int, ...]]:
    """The tokens of the prompt whose logprobs follow from its first num_computed tokens, and are not
    computed yet: the place of the first, and their ids."""
    first_target = sequence.num_scored_tokens + 1
    target_ids = tuple(sequence.tokens.ids[first_target : min(num_computed + 1, sequence.tokens.num_prompt)])
    sequence.num_scored_tokens += len(target_ids)
    return first_target, target_ids
