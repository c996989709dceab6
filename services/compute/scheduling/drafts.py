"""Drafts of a step: guesses of the tokens that follow the last of a sequence, which the step computes with
it. No sequence waits for them: they get the part of the step's budget, of its rows of logits and of the
cache that is left."""

from collections.abc import Callable
from dataclasses import dataclass

from services.compute.cache.block_manager import BlockManager
from services.compute.sequence import Sequence

# guesses the tokens after the last of each sequence, up to a number; the second argument is the number
# of sequences that get a token in the step. Returns them by handle, for some
Drafter = Callable[[list[tuple[Sequence, int]], int], dict[int, list[int]]]


@dataclass(frozen=True, slots=True)
class Drafting:
    """The function that guesses, and the bounds on its guesses."""

    drafter: Drafter
    max_drafts: int  # of a sequence
    max_sampled: int  # rows of logits of a step

    def draft(
        self, decodes: list[Sequence], budget: int, blocks: BlockManager, num_spare_blocks: int
    ) -> dict[int, list[int]]:
        """Drafts by handle for sequences that are one token behind and get that token. budget: tokens that the
        step may have in addition to these; num_spare_blocks: blocks that may be taken for drafts."""
        max_drafts = min(budget, self.max_sampled - len(decodes), self.max_drafts)
        wanted = []
        for sequence in decodes if max_drafts > 0 else ():
            count = room_for_drafts(sequence, max_drafts, blocks, has_spare=num_spare_blocks > 0)
            num_spare_blocks -= 1
            if count > 0:
                wanted.append((sequence, count))
        drafts = self.drafter(wanted, len(decodes)) if wanted else {}
        return {
            sequence.handle: drafts[sequence.handle][:count]
            for sequence, count in wanted
            if drafts.get(sequence.handle)
        }


def room_for_drafts(sequence: Sequence, max_drafts: int, blocks: BlockManager, *, has_spare: bool) -> int:
    """How many drafts the sequence may have, and has slots for. has_spare: it may take one more block."""
    num_tokens = len(sequence.tokens)
    is_copied = (
        sequence.kv.has_shared_tail
        or sequence.kv.block_table[sequence.kv.num_computed // blocks.block_size] in blocks.copies
    )
    if is_copied or sequence.tokens.is_pending or not sequence.is_scored:
        return 0
    wanted = min(max_drafts, sequence.max_num_tokens - num_tokens - 1)
    if has_spare and wanted > 0:
        blocks.grow(sequence, min(num_tokens + wanted, (len(sequence.kv.block_table) + 1) * blocks.block_size))
    return min(wanted, len(sequence.kv.block_table) * blocks.block_size - num_tokens)
