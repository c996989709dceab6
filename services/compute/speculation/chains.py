"""Chains: drafts by a model, a token a step, for all sequences at once.

The model draws each token as the target will: by the same parameters, edits and noise. So where its
logits are near the target's, it mostly draws the same token, greedy or not
(shared/model/decision.py). It stops where it is not sure: what stands behind a draft that falls is
lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.compute.candidates.reduction import begin_reduction
from services.compute.execution.model_runner import ModelRunner
from services.compute.sequence import Sequence
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from services.compute.speculation.draft_kv import DraftKV
from services.compute.speculation.margins import Margins, margins_of
from services.compute.speculation.proposer import Drafts, Wanted

# that all of a chain stands, below which no more is drafted behind it
MIN_CHANCE = 0.7


@dataclass(slots=True)
class Chain:
    """The drafts of a sequence, on their way: they are its last tokens until all are there."""

    sequence: Sequence
    num_tokens: int  # of the sequence, without drafts
    max_drafts: int
    levels: list[int] = field(default_factory=list)  # of the drafts: see Margins
    chance: float = 1.0  # that all stand

    @property
    def drafts(self) -> list[int]:
        return self.sequence.tokens.ids[self.num_tokens :]

    def row(self, first: int, last: int) -> BatchRow:
        """The tokens [first, last) of the sequence; they draw the next if they are the last."""
        sequence, num = self.sequence, last - first
        sampled = range(num - 1, num) if last == len(sequence.tokens) else range(0)
        return BatchRow(
            sequence.handle,
            tuple(sequence.tokens.ids[first:last]),
            first,
            sequence.kv.block_table.frozen,
            sampled,
            sequence.tokens.num_prompt,
        )

    def withdraw(self) -> None:
        """The sequence is as it was."""
        self.sequence.tokens.truncate(self.num_tokens)


class ChainProposer:
    """A Proposer that runs a model."""

    needs_hidden = False
    runs_model = True
    stops_itself = True

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        kv: DraftKV,
        *,
        max_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        """runner: of the model that drafts; max_batched_tokens: that a step of it may have;
        max_model_len: tokens of a sequence that it may read; vocab_size: of the target."""
        self.name = name
        self.runner = runner
        self.kv = kv
        self.max_batched_tokens = max_batched_tokens
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.margins = Margins()
        self._levels: dict[int, list[int]] = {}  # of the last chain, by handle

    def propose(self, wanted: Mapping[int, Wanted]) -> dict[int, Drafts]:
        chains = {handle: self._chain(each.sequence, each.max_drafts) for handle, each in wanted.items()}
        try:
            rows = self._first_rows([chain for chain in chains.values() if chain.max_drafts > 0])
            while rows:
                going = [chains[handle] for handle in self._step(chains, rows)]
                rows = [
                    chain.row(len(chain.sequence.tokens) - 1, len(chain.sequence.tokens))
                    for chain in going
                    if len(chain.levels) < chain.max_drafts and chain.chance >= MIN_CHANCE
                ]
            found = {handle: chain for handle, chain in chains.items() if chain.levels}
            self._levels.update({handle: chain.levels for handle, chain in found.items()})
            return {handle: Drafts(chain.drafts) for handle, chain in found.items()}
        finally:
            for chain in chains.values():
                chain.withdraw()

    def computed(self, batch: ScheduledBatch, hidden: Any, decided: Mapping[int, int]) -> None:  # noqa: ARG002
        for row in batch.rows:
            levels = self._levels.pop(row.handle, None)
            if levels is not None and row.handle in decided:
                self.margins.learn(levels[: len(row.sampled) - 1], decided[row.handle] - 1)

    def forget(self, handle: int) -> None:
        self._levels.pop(handle, None)

    def _chain(self, sequence: Sequence, max_drafts: int) -> Chain:
        return Chain(sequence, len(sequence.tokens), min(max_drafts, self.max_model_len - len(sequence.tokens)))

    def _first_rows(self, chains: list[Chain]) -> list[BatchRow]:
        """The tokens of each sequence that the model has not read yet, while the budget lasts: mostly its last
        token, or two. One that it can't catch up with in a step has drafts in a later one."""
        rows, budget = [], self.max_batched_tokens
        for known, chain in sorted(
            [(self.kv.num_known(chain.sequence), chain) for chain in chains],
            key=lambda each: each[0] - each[1].num_tokens,
            reverse=True,
        ):
            last = min(chain.num_tokens, known + budget)
            if known < last and max(chain.sequence.tokens.ids[known:last]) < self.runner.vocab_size:
                rows.append(chain.row(known, last))
                budget -= last - known
        return rows

    def _step(self, chains: Mapping[int, Chain], rows: list[BatchRow]) -> list[int]:
        """Run the rows, and append what those that draw have drawn. Returns their handles, but for
        sequences that this ends."""
        batch = ScheduledBatch(tuple(rows), sum(row.num_tokens == 1 for row in rows))
        hidden = self.runner.run(batch)
        for row in rows:
            self.kv.wrote(chains[row.handle].sequence, row.num_computed_tokens, row.num_context_tokens)
        drawing = [chains[row.handle] for row in rows if row.sampled]
        if not drawing:
            return []
        logits = self.runner.logits(batch, hidden)
        if logits.shape[1] > self.vocab_size:
            logits = logits[:, : self.vocab_size].contiguous()
        reduction = begin_reduction(logits, [chain.sequence.prefix() for chain in drawing], self.runner.row_search)
        found = reduction.finish()
        going = []
        for handle, token_id, margin in zip(
            found.handles.tolist(), found.chosen.tolist(), margins_of(reduction, found), strict=True
        ):
            chain = chains[handle]
            if token_id not in chain.sequence.request.end_token_ids:
                chain.sequence.tokens.draft([token_id])
                level = self.margins.level_of(margin)
                chain.levels.append(level)
                chain.chance *= self.margins.chance(level)
                going.append(handle)
        return going
