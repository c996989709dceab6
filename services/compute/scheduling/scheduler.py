"""The scheduler: which sequences run in a step, and how many tokens of each.

There are no phases. Every sequence has tokens and a number of them computed; a step raises that
number within a token budget. What is called decoding is a sequence that is one token behind,
prefill one that is many behind. Those that are one token behind go first, so a long prompt fills
the rest of the budget in chunks and never stalls them.

One order rules who begins and who gives way: the rank, arrival time plus aging_s for each level of
priority. All that waits ages alike, so ranks never change, a level of priority is worth aging_s of
waiting, and nothing starves. The smallest rank begins first; when the KV cache is full the largest
gives its blocks back, waits at its place, and is computed again when admission finds that it fits.

Tenants share the places. Within a priority, each place that a tenant has already counts like
aging_s of waiting for all others. If every place is taken, the first sequence of a tenant takes one
from whoever has most.

Some may run apart (StepPolicy.apart): in steps of their own, by turns with everybody else's.

A sequence's last tokens may be foreseen: compute has chosen them, the log does not hold them yet.
They are computed on like any others, up to run_ahead steps of them; `confirm` says that the next
one was decided, `truncate` that it was not. The very last may be PENDING until
`settle`.

A step may have drafts: tokens that somebody guesses to follow. They are appended as foreseen, for
this step alone: `settle` says how many of them came true.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable

from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.admission import Admission
from services.compute.scheduling.found_prefixes import FoundPrefixes
from services.compute.scheduling.groups import Groups
from services.compute.scheduling.new_step import NewStep, advance
from services.compute.scheduling.policy import PLAIN, StepPolicy
from services.compute.scheduling.shares import Shares
from services.compute.scheduling.step_cost import StepCostFit
from services.compute.scheduling.verdict import Begin, Wait
from services.compute.scheduling.waiting import WaitingQueue
from services.compute.sequence import Prefix, Sequence
from services.compute.sequence.batch import BatchRow, ScheduledBatch

AGING_S = 30.0
RETRY_EVERY = 8  # steps between two looks at a queue whose head did not fit, while nothing ends


class Scheduler:
    """Plain Python over plain data. `schedule` a step, and when it has run `append` a token to each
    sequence that was sampled."""

    def __init__(
        self,
        block_manager: BlockManager,
        admission: Admission,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        aging_s: float = AGING_S,
        target_itl_s: float | None = None,
        run_ahead: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: s, goes forward only."""
        self.clock = clock
        self.block_manager = block_manager
        self.admission = admission
        self.max_num_seqs = max_num_seqs
        # every running sequence can have its one token
        self.max_batched_tokens = max(max_batched_tokens, max_num_seqs)
        self.aging_s = aging_s
        self.target_itl_s = target_itl_s
        self.run_ahead = run_ahead  # steps whose foreseen tokens a sequence may be computed on
        self.policy = PLAIN  # of the step in the making, or of the last one
        self._is_apart = False  # the step in the making, or the last one, is that of sequences that run apart
        self.step_cost = StepCostFit()
        self.shares = Shares()
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}  # by handle
        self._num_running: Counter[str] = Counter()  # by tenant
        self.num_preemptions = 0
        self.prefixes = FoundPrefixes(block_manager)
        self.groups = Groups()
        self._refused: dict[bool, tuple[int, int]] = {}  # by _is_apart: the queue's head that did not fit, steps since
        self._is_observed = False  # the admission has looked at what runs now

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        """The sequence waits its turn. It must fit an otherwise empty cache at its longest."""
        assert self.block_manager.num_blocks_for(sequence.max_num_tokens) <= self.block_manager.num_blocks
        sequence.rank = sequence.request.arrived_at + sequence.request.priority * self.aging_s
        self.waiting.push(sequence)
        if self.policy.splits_prompts:  # else no step is bounded
            self.shares.arrived(sequence.request.tenant_id, self.clock())

    def next_to_begin(self, policy: StepPolicy) -> list[Sequence]:
        """Sequences that may begin in the next step: the heads of the queue, and by rank as many as there are places."""
        self.policy = policy
        heads = [head for is_apart in (False, True) if (head := self._head(is_apart=is_apart)) is not None]
        return [*heads, *heapq.nsmallest(self.max_num_seqs - len(self.running), self.waiting, key=_rank)] if heads else []

    def get(self, handle: int) -> Sequence:
        """A sequence that runs."""
        return self.running[handle]

    def schedule(self, policy: StepPolicy = PLAIN) -> ScheduledBatch | None:
        """The next step, or None if there is nothing to compute. From here on its tokens count as
        computed."""
        self.policy = policy
        self._is_apart = bool(self.policy.apart) and not self._is_apart
        batch = self._schedule_step()
        if batch is None and self.policy.apart:
            self._is_apart = not self._is_apart
            batch = self._schedule_step()
        return batch

    def _schedule_step(self) -> ScheduledBatch | None:
        """A step of those whose turn it is."""
        step = NewStep()
        num_preemptions = self.num_preemptions
        behind = self._schedule_decodes(step)
        budget = self._schedule_chunks(step, behind, self._prompt_budget(step))
        if self.num_preemptions == num_preemptions:
            self._admit(step, budget)
        if not step.decodes and not step.chunks:  # those for whom tokens were kept can't begin
            self.shares.num_awaited_tokens = 0
            self._schedule_chunks(step, behind, budget)
        num_drafts = self._add_drafts(step)
        copies = self.block_manager.take_copies()
        if not step.decodes and not step.chunks:
            return None
        decodes = [self._advance(each, 1 + num_drafts.get(each.handle, 0), num_drafts.get(each.handle, 0)) for each in step.decodes]
        chunks = [self._advance(sequence, count) for sequence, count in step.chunks]
        return ScheduledBatch((*decodes, *chunks), len(decodes), copies)

    def append(self, sequence: Sequence, token_id: int) -> None:
        """The sequence's next token was decided."""
        sequence.tokens.append(token_id)

    def settle(self, sequence: Sequence, token_id: int, *, num_standing: int, is_continued: bool) -> None:
        """The token that was PENDING, behind the drafts that stand. is_continued: what a step computes
        on it already, if one does, stands; else it is to be computed, or never will be."""
        num_tokens = len(sequence.tokens)
        sequence.tokens.settle(token_id, num_standing=num_standing)
        if len(sequence.tokens) < num_tokens:
            self.block_manager.forget_hashes(sequence, len(sequence.tokens) - 1)
        if not is_continued:
            sequence.kv.rewind(len(sequence.tokens) - 1)

    def take_back(self, prefix: Prefix) -> None:
        """The row computed on these tokens comes to nothing: the last of them is computed again, and
        drafts behind them go."""
        sequence = prefix.sequence
        if len(sequence.tokens) > prefix.num_tokens:
            self.truncate(sequence, prefix.num_tokens)
        sequence.kv.recompute(prefix.num_tokens - 1, self.block_manager.block_size)

    def confirm(self, sequence: Sequence) -> None:
        """The first of the foreseen tokens was decided."""
        sequence.tokens.confirm()
        if sequence.tokens.num_decided % self.block_manager.block_size == 0:
            self.block_manager.commit(sequence)

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Drop the undecided tokens behind the first num_tokens. What follows is `append`, or
        `finish`."""
        sequence.tokens.truncate(num_tokens)
        sequence.kv.rewind(num_tokens)
        self.block_manager.forget_hashes(sequence, num_tokens)

    def finish(self, sequence: Sequence, *, is_complete: bool = False) -> None:
        """The sequence has ended, waiting or running, with its answer (is_complete, its last token
        appended) or without. Its blocks are free at once."""
        sequence.is_finished = True
        if sequence.handle in self.running:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        self.admission.ended(sequence, is_complete=is_complete)
        self._refused.clear()

    def _can_run(self, sequence: Sequence) -> bool:
        """Whether it is its turn, and what it would be computed on is decided as far as it must
        be."""
        is_in = (sequence.handle in self.policy.apart) == self._is_apart
        if sequence.handle in self.policy.in_stages or (sequence.handle in self.policy.held and sequence.handle in self.running):
            return False
        return is_in and not sequence.tokens.is_ending and sequence.tokens.num_undecided_steps <= self.run_ahead

    def _advance(self, sequence: Sequence, num_tokens: int, num_drafts: int = 0) -> BatchRow:
        """The sequence's row of the step, which counts as computed from now on."""
        row = advance(sequence, num_tokens, num_drafts)
        if num_tokens > 1 or sequence.kv.num_computed % self.block_manager.block_size == 0:
            self.block_manager.commit(sequence)
        return row

    def _add_drafts(self, step: NewStep) -> dict[int, int]:
        """Append drafts to sequences of a step without prompts. Returns how many, by handle."""
        if self.policy.drafting is None or step.chunks or self._is_apart:
            return {}
        able = [each for each in step.decodes if self.shares.least in (None, each.request.tenant_id)]  # where tenants bound the step, who wants least
        room = min(self._budget(step, at_least=0), self.policy.drafting.max_sampled - len(step.decodes))
        num_spare = 0 if len(self.waiting) else self.block_manager.num_free_blocks - len(self.running)
        found = self.policy.drafting.draft(able, room, self.block_manager, num_spare)
        for handle, token_ids in found.items():
            self.running[handle].tokens.draft(token_ids)
        return {handle: len(token_ids) for handle, token_ids in found.items()}

    def _schedule_decodes(self, step: NewStep) -> list[Sequence]:
        """Schedule all that are one token behind. Returns the others, which are further behind."""
        able = [sequence for sequence in self.running.values() if self._can_run(sequence)]
        behind = [sequence for sequence in able if sequence.num_uncomputed_tokens != 1]
        if self.policy.splits_prompts:
            waiting = {} if self._is_apart in self._refused else self.waiting.num_tokens
            self.shares.begin_step(able, waiting, self.step_cost.cost, self.max_batched_tokens, self.clock())
        turns = self.shares.turns([sequence for sequence in able if sequence.num_uncomputed_tokens == 1])
        # so that each stage has its part of them to compute
        for sequence in turns[: -(-(len(turns) + len(self.policy.in_stages)) // self.policy.num_stages)]:
            num_computed = sequence.kv.num_computed
            has_block = num_computed < len(sequence.kv.block_table) * self.block_manager.block_size and not sequence.kv.has_shared_tail
            if has_block or self._make_room(sequence, num_computed + 1, step):
                step.decodes.append(sequence)
        return behind

    def _prompt_budget(self, step: NewStep) -> int:
        """The tokens that prompts may add to the step: they never stand still for long."""
        return self._budget(step, at_least=max(self.block_manager.block_size * self.shares.is_prompts_turn, self.shares.num_awaited_tokens))

    def _budget(self, step: NewStep, at_least: int) -> int:
        """The tokens that may be added to the step: within its size, and so many at least within what
        tenants expect of each other, and within the target for who is decoding. With stages a
        sequence has a token of each so many-th step."""
        bounds = [self.shares.bound_s, self.target_itl_s if step.decodes else None]
        bound_s = min((each / self.policy.num_stages for each in bounds if each is not None), default=None)
        return step.room(self.max_batched_tokens, self.step_cost.cost, bound_s, at_least)

    def _schedule_chunks(self, step: NewStep, behind: list[Sequence], budget: int) -> int:
        """The next chunk of each running sequence that is further behind, while the budget lasts.
        Returns what is left of it."""
        for sequence in sorted(behind, key=self.shares.order):
            self.prefixes.reuse(sequence)
            num_tokens = sequence.chunk(budget - self.shares.kept_from(sequence), self.max_batched_tokens - step.num_tokens)
            if num_tokens > 0 and self._make_room(sequence, sequence.kv.num_computed + num_tokens, step):
                step.chunks.append((sequence, num_tokens))
                budget -= num_tokens
        return budget

    def _admit(self, step: NewStep, budget: int) -> None:
        """Waiting sequences begin by rank, while there are budget, a place, and memory as the strategy counts it."""
        self._is_observed = False
        while budget > 0 and (sequence := self._head(is_apart=self._is_apart)) is not None:
            verdict = self._verdict(sequence, budget)
            if isinstance(verdict, Wait):
                if verdict.num_steps is not None:
                    self._refused[self._is_apart] = (sequence.handle, verdict.num_steps)
                return
            if verdict.victim is not None:
                self._preempt(verdict.victim, step)
            budget -= self._begin(sequence, verdict, step, budget)

    def _verdict(self, sequence: Sequence, budget: int) -> Begin | Wait:
        """Whether the head of the queue may begin: what costs least to find out comes first."""
        if not self._can_run(sequence) or not (self.policy.splits_prompts or len(sequence.tokens) <= budget):
            return Wait()
        if (num_steps := self._num_steps_refused(sequence, is_apart=self._is_apart)) is not None:
            return Wait(num_steps + 1)
        if self.policy.awaits_restoring and not sequence.kv.is_restored:
            return Wait()
        if len(self.running) < self.max_num_seqs:
            return self._fit(sequence, budget)
        if (victim := self._victim(sequence)) is None:
            return Wait()
        with self.block_manager.without(victim):
            return self._fit(sequence, budget, victim)

    def _fit(self, sequence: Sequence, budget: int, victim: Sequence | None = None) -> Begin | Wait:
        """Whether there is memory for the head of the queue, which has a place, or takes the victim's."""
        twin = self.groups.twin(sequence)
        if twin is victim:
            twin = None  # its blocks are given back before the head begins
        if twin is not None and twin.handle in self.policy.in_stages and not sequence.is_scored:
            return Wait()
        if twin is not None and twin.kv.num_computed < twin.tokens.num_prompt:
            if self._can_run(twin):
                return Wait()  # when the twin's prompt is computed, this one need not be
            twin = None
        if victim is not None or not self._is_observed:
            self.admission.observe([each for each in self.running.values() if each is not victim])
            self._is_observed = True
        matched = self.block_manager.match(sequence) if twin is None else self.block_manager.common_blocks(twin, sequence)
        if self.block_manager.has_room_for(sequence, matched, budget) and self.admission.admits(sequence, matched):
            return Begin(matched, twin, victim)
        return Wait(0)

    def _num_steps_refused(self, sequence: Sequence, *, is_apart: bool) -> int | None:
        """Steps since this head of a queue did not fit. None: it may be looked at again."""
        handle, num_steps = self._refused.get(is_apart, (None, 0))
        return num_steps if handle == sequence.handle and num_steps < RETRY_EVERY else None

    def _head(self, *, is_apart: bool) -> Sequence | None:
        """The head of the queue, of those that run apart or of the others."""
        if is_apart:
            return self.waiting.head_of(self.policy.apart)
        return self.waiting.head(lambda tenant_id: self.aging_s * self._num_running[tenant_id], self.policy.apart)

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Every place is taken: whose place goes to a tenant's first sequence, or to its first one
        of such urgency. None: nobody's.

        One that is less urgent and later in rank gives way; for a tenant that has no place at all,
        also one of a tenant that has many.
        """
        if not self.admission.preempts or self._is_apart:
            return None
        own = [each.request.priority for each in self.running.values() if each.request.tenant_id == sequence.request.tenant_id]
        if own and min(own) <= sequence.request.priority:
            return None
        others = [
            each
            for each in self.running.values()
            if each.request.priority >= sequence.request.priority and each.handle not in self.policy.apart and not each.tokens.is_ending
        ]
        able = [each for each in others if each.request.priority > sequence.request.priority and each.rank > sequence.rank]
        # each of the others' places but the first counts like aging_s of waiting, as it does for
        # who begins
        if not able and not own:
            able = [each for each in others if each.rank + self.aging_s * (self._num_running[each.request.tenant_id] - 1) > sequence.rank]
        return max(able, key=lambda each: (each.request.priority, self._num_running[each.request.tenant_id], *_rank(each)), default=None)

    def _begin(self, sequence: Sequence, verdict: Begin, step: NewStep, budget: int) -> int:
        """The sequence leaves the queue, with its first chunk. Returns its tokens."""
        matched, twin = verdict.matched, verdict.twin
        self.waiting.remove(sequence)
        self.running[sequence.handle] = sequence
        self._num_running[sequence.request.tenant_id] += 1
        if twin is not None:
            self.block_manager.fork(twin, sequence)
            if not sequence.is_scored:
                sequence.num_scored_tokens, sequence.scored = twin.num_scored_tokens, list(twin.scored)
        else:
            self.prefixes.share(sequence, matched)
        self.groups.join(sequence)
        self.prefixes.begun(sequence)
        num_tokens = sequence.chunk(budget, self.max_batched_tokens - step.num_tokens)
        last = sequence.kv.num_computed + num_tokens
        has_grown = self.block_manager.grow(sequence, self.admission.num_tokens_held(sequence, last))
        assert has_grown, "admitted without blocks"
        if num_tokens:  # else its image waits for a step with more room
            step.chunks.append((sequence, num_tokens))
        return num_tokens

    def _make_room(self, sequence: Sequence, num_tokens: int, step: NewStep) -> bool:
        """Blocks for the running sequence's first num_tokens tokens, taken from the last in rank if
        need be: that may be itself."""
        while sequence.handle in self.running:
            if self.block_manager.grow(sequence, num_tokens):
                return True
            self._preempt(max(self.running.values(), key=_rank), step)
        return False

    def _preempt(self, sequence: Sequence, step: NewStep) -> None:
        """Give its blocks back; it waits, and is computed again, with the tokens it has."""
        if sequence in step.decodes:
            step.decodes.remove(sequence)
        step.chunks = [chunk for chunk in step.chunks if chunk[0] is not sequence]
        self._leave(sequence)
        self.waiting.push(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.handle]
        self._num_running[sequence.request.tenant_id] -= 1
        if not self._num_running[sequence.request.tenant_id]:
            del self._num_running[sequence.request.tenant_id]
        self.block_manager.free(sequence)
        self.groups.leave(sequence)


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank, sequence.handle
