"""FoundPrefixes: what sequences find computed in the prefix cache when they begin, and at the
beginning of each of their segments."""

from services.compute.cache.block_manager import BlockManager
from services.compute.sequence import Sequence


class FoundPrefixes:
    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager
        self.num_queries = 0  # tokens of prompts that were looked up, once for each sequence
        self.num_hits = 0  # those that were found

    def share(self, sequence: Sequence, matched: list[int]) -> None:
        """Begin with the blocks that were found, and a part of one more if there is room for a copy."""
        blocks = self.block_manager
        end = blocks.match_end(sequence, matched) if blocks.num_free_blocks > blocks.num_blocks_for(sequence.max_num_tokens) + 1 else None
        block_ids, num_tokens = ([*matched, end[0]], end[1]) if end is not None else (matched, 0)
        blocks.share(sequence, block_ids, len(matched) * blocks.block_size + num_tokens)

    def begun(self, sequence: Sequence) -> None:
        """The sequence has begun, with what it shares: count that, the first time."""
        if not sequence.has_begun:
            sequence.has_begun = True
            self.num_queries += sequence.num_prompt_ids
            self._count(sequence, 0)
        self.reuse(sequence)

    def reuse(self, sequence: Sequence) -> None:
        """Pass over what is cached of the segments that begin where the sequence is."""
        num_computed = sequence.kv.num_computed
        while self.block_manager.reuse(sequence):
            pass
        if sequence.kv.num_computed > num_computed and sequence.num_preemptions == 0:
            self._count(sequence, num_computed)

    def _count(self, sequence: Sequence, num_computed: int) -> None:
        """Count the tokens that were found beyond so many slots."""
        layout, num_prompt = sequence.request.layout, sequence.tokens.num_prompt
        first, last = min(num_computed, num_prompt), min(sequence.kv.num_computed, num_prompt)
        num_found = layout.num_tokens_in(last) - layout.num_tokens_in(first)
        sequence.num_cached_tokens += num_found
        self.num_hits += num_found
