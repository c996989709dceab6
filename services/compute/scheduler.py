"""The scheduler: which sequences run in a step, and how many tokens of each.

There are no phases. Every sequence has tokens and a number of them computed; a step raises that number within a token budget. What is
called decoding is a sequence that is one token behind, prefill one that is many behind. Running sequences go first, the ones that are
one token behind before the others, so a long prompt fills the rest of the budget in chunks and never stalls them. When the KV cache
is full the youngest running sequence gives its blocks back and is computed again later.
"""

from collections import deque

from services.compute.batch import ScheduledBatch, ScheduledSequence
from services.compute.block_manager import BlockManager
from services.compute.sequence import Sequence


class Scheduler:
    """Plain Python over plain data. `schedule`, then `advance` when the step has run, then `append` each decided token."""

    def __init__(self, block_manager: BlockManager, *, max_num_seqs: int, max_batched_tokens: int) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max(max_batched_tokens, max_num_seqs)  # every running sequence can have its one token
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def room(self) -> int:
        """How many more sequences are worth taking from the queue now."""
        return max(0, self.max_num_seqs - self.num_unfinished)

    def add(self, sequence: Sequence) -> None:
        """The sequence waits its turn. It must fit an otherwise empty cache at its longest."""
        assert self.block_manager.num_blocks_for(sequence.max_num_tokens) <= self.block_manager.num_blocks
        self.waiting.append(sequence)

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None if there is nothing to compute."""
        budget = self.max_batched_tokens
        scheduled: dict[int, ScheduledSequence] = {}
        for sequence in sorted(self.running, key=lambda sequence: sequence.num_uncomputed_tokens > 1):
            if sequence not in self.running:
                continue  # preempted for an older one, in this very loop
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            while num_tokens and not self.block_manager.grow(sequence, sequence.num_computed_tokens + num_tokens):
                youngest = self.running[-1]
                self._preempt(youngest)
                dropped = scheduled.pop(youngest.handle, None)
                budget += dropped.num_scheduled_tokens if dropped else 0
                if youngest is sequence:
                    num_tokens = 0
            if num_tokens:
                scheduled[sequence.handle] = ScheduledSequence(sequence, num_tokens)
                budget -= num_tokens
        self._admit(scheduled, budget)
        if not scheduled:
            return None
        # single tokens first: attention computes them together
        return ScheduledBatch(sorted(scheduled.values(), key=lambda each: each.num_scheduled_tokens > 1))

    def advance(self, batch: ScheduledBatch) -> None:
        """The step has run: its tokens' KV is written."""
        for scheduled in batch.sequences:
            scheduled.sequence.num_computed_tokens += scheduled.num_scheduled_tokens

    def append(self, sequence: Sequence, token_id: int) -> None:
        """The sequence's next token was decided."""
        sequence.token_ids.append(token_id)

    def finish(self, sequence: Sequence) -> None:
        """The sequence has ended, for whatever reason, waiting or running; its blocks are free at once."""
        sequence.is_finished = True
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.block_manager.free(sequence)

    def _admit(self, scheduled: dict[int, ScheduledSequence], budget: int) -> None:
        """Waiting sequences join in order, while there are budget, a place, and blocks for all their tokens and one more."""
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            missing = self.block_manager.num_missing_blocks(sequence, min(sequence.num_tokens + 1, sequence.max_num_tokens))
            # one spare block for each running sequence, so that who joins is not preempted at the next border
            if self.running and missing + len(self.running) > self.block_manager.num_free_blocks:
                return
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            if not self.block_manager.grow(sequence, sequence.num_computed_tokens + num_tokens):
                return
            self.running.append(self.waiting.popleft())
            scheduled[sequence.handle] = ScheduledSequence(sequence, num_tokens)
            budget -= num_tokens

    def _preempt(self, sequence: Sequence) -> None:
        """Give its blocks back; it waits at the head of the queue and is computed anew, with the tokens it has."""
        self.running.remove(sequence)
        self.block_manager.free(sequence)
        sequence.num_computed_tokens = 0
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
