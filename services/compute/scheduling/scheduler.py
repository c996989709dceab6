"""The scheduler: which sequences run in a step, and how many tokens of each.

There are no phases. Every sequence has tokens, of which some are computed; a step computes more of
them, within a token budget. A sequence that is one token behind is decoding, one that is many behind
is in prefill. Sequences that are one token behind go first, so a long prompt fills the rest of the
budget in chunks and never stalls them.

One order decides which sequence begins and which gives way: the rank, which is its arrival time plus
aging_s for each level of priority. All waiting sequences age alike, so ranks never change, a level of
priority is worth aging_s of waiting, and no sequence starves. The smallest rank begins first; when the
KV cache is full, the largest gives its blocks back, waits at its place, and is computed again when
admission finds that it fits.

Tenants share the places. Within a priority, each place that a tenant has already counts like aging_s
of waiting for all others. If every place is taken, a tenant's first sequence takes one from the tenant
that has most.

Some sequences may run apart (StepPolicy.apart): in steps of their own, by turns with all others.

A sequence's last tokens may be foreseen: compute has chosen them, the log does not hold them yet.
The next tokens are computed on them, up to run_ahead steps; `confirm` says that the next one was
decided, `truncate` that it was not. The very last may be PENDING until `settle`.

A step may have drafts: guesses of the tokens that follow. They are appended as foreseen, for this step
alone: `settle` says how many of them came true.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.admission import AdmissionStrategy
from services.compute.scheduling.new_step import NewStep, advance
from services.compute.scheduling.policy import PLAIN, StepPolicy
from services.compute.scheduling.shares import Shares
from services.compute.scheduling.step_cost import StepCostFit
from services.compute.scheduling.waiting import WaitingQueue
from services.compute.sequence import Prefix, Sequence
from services.compute.sequence.batch import BatchRow, ScheduledBatch

AGING_S = 30.0
RETRY_EVERY = 8  # steps between two looks at a queue whose head did not fit, while no sequence ends


@dataclass(frozen=True, slots=True)
class Begin:
    """The head of the queue begins."""

    matched: list[int]  # blocks of its first tokens that are computed already
    twin: Sequence | None  # a sequence of the same prompt whose blocks it takes
    victim: Sequence | None  # a sequence that gives its place back first; None if there is a free place


@dataclass(frozen=True, slots=True)
class Wait:
    """The head of the queue waits, and so do all behind it."""

    num_steps: int | None = None  # steps since there was too little memory for it; None: it waits for another reason


class Scheduler:
    """Plain Python over plain data. `schedule` a step, and when it has run `append` a token to each
    sequence that was sampled."""

    def __init__(
        self,
        block_manager: BlockManager,
        admission: AdmissionStrategy,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        aging_s: float = AGING_S,
        target_itl_s: float | None = None,
        run_ahead: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: s, never goes back."""
        self.clock = clock
        self.block_manager = block_manager
        self.admission = admission
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max(max_batched_tokens, max_num_seqs)  # so every running sequence can have its token
        self.aging_s = aging_s
        self.target_itl_s = target_itl_s
        self.run_ahead = run_ahead  # steps whose foreseen tokens a sequence may be computed on
        self.policy = PLAIN  # of the current step, or of the last one
        self._is_apart = False  # the current step, or the last one, is of sequences that run apart
        self.step_cost = StepCostFit()
        self.shares = Shares()
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}  # by handle
        self._num_running: Counter[str] = Counter()  # by tenant
        self.num_preemptions = 0
        self.prefixes = PrefixHits(block_manager)
        self._refused: dict[bool, tuple[int, int]] = {}  # by _is_apart: the queue's head that did not fit, steps since
        self._is_observed = False  # the admission strategy knows the sequences that run now

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        """The sequence waits for its turn. At its longest it must fit into an otherwise empty cache."""
        assert self.block_manager.num_blocks_for(sequence.max_num_tokens) <= self.block_manager.num_blocks
        sequence.rank = sequence.request.arrived_at + sequence.request.priority * self.aging_s
        self.waiting.push(sequence)
        if self.policy.splits_prompts:  # else no step is bounded
            self.shares.arrived(sequence.request.tenant_id, self.clock())

    def next_to_begin(self, policy: StepPolicy) -> list[Sequence]:
        """Sequences that may begin in the next step: the heads of the queue, and by rank as many as there are
        places."""
        self.policy = policy
        heads = [head for is_apart in (False, True) if (head := self._head(is_apart=is_apart)) is not None]
        return (
            [*heads, *heapq.nsmallest(self.max_num_seqs - len(self.running), self.waiting, key=_rank)] if heads else []
        )

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
        """A step of the sequences whose turn it is: those that run apart, or the others."""
        step = NewStep()
        num_preemptions = self.num_preemptions
        behind = self._schedule_decodes(step)
        budget = self._schedule_chunks(step, behind, self._prompt_budget(step))
        if self.num_preemptions == num_preemptions:
            self._admit(step, budget)
        if step.is_empty:  # the prompts that tokens were kept for can't begin
            self.shares.num_awaited_tokens = 0
            self._schedule_chunks(step, behind, budget)
        num_drafts = self._add_drafts(step)
        copies = self.block_manager.take_copies()
        if step.is_empty:
            return None
        decodes = [
            self._advance(sequence, 1 + count, count) for sequence, count in zip(step.decodes, num_drafts, strict=True)
        ]
        chunks = [self._advance(sequence, count) for sequence, count in step.chunks]
        return ScheduledBatch((*decodes, *chunks), len(decodes), copies)

    def append(self, sequence: Sequence, token_id: int) -> None:
        """The sequence's next token was decided."""
        sequence.tokens.append(token_id)

    def settle(self, sequence: Sequence, token_id: int, *, num_standing: int, is_continued: bool) -> None:
        """The token that was PENDING, behind the drafts that stand. is_continued: a step that computes on it
        already, if there is one, stands; otherwise the token is computed again, or never."""
        num_tokens = len(sequence.tokens)
        sequence.tokens.settle(token_id, num_standing=num_standing)
        if len(sequence.tokens) < num_tokens:
            self.block_manager.forget_hashes(sequence, len(sequence.tokens) - 1)
        if not is_continued:
            sequence.kv.rewind(len(sequence.tokens) - 1)

    def take_back(self, prefix: Prefix) -> None:
        """The row computed on these tokens is dropped: the last of them is computed again, and drafts behind
        them go."""
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
        """Drop the undecided tokens behind the first num_tokens. `append` or `finish` comes next."""
        sequence.tokens.truncate(num_tokens)
        sequence.kv.rewind(num_tokens)
        self.block_manager.forget_hashes(sequence, num_tokens)

    def finish(self, sequence: Sequence, *, is_complete: bool = False) -> None:
        """The sequence has ended, waiting or running, with its whole answer (is_complete, its last token
        appended) or without. Its blocks are free at once."""
        sequence.is_finished = True
        if sequence.handle in self.running:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        self.admission.ended(sequence, is_complete=is_complete)
        self._refused.clear()

    def _schedule_decodes(self, step: NewStep) -> list[Sequence]:
        """Schedule the sequences that are one token behind. Returns those that are further behind."""
        able = [sequence for sequence in self.running.values() if self._can_run(sequence)]
        behind = [sequence for sequence in able if sequence.num_uncomputed_tokens != 1]
        if self.policy.splits_prompts:
            waiting = {} if self._is_apart in self._refused else self.waiting.num_tokens
            self.shares.begin_step(able, waiting, self.step_cost.cost, self.max_batched_tokens, self.clock())
        turns = self.shares.turns([sequence for sequence in able if sequence.num_uncomputed_tokens == 1])
        # each stage of the model gets an equal part of them to compute
        for sequence in turns[: -(-(len(turns) + len(self.policy.in_stages)) // self.policy.num_stages)]:
            num_computed = sequence.kv.num_computed
            has_block = (
                num_computed < len(sequence.kv.block_table) * self.block_manager.block_size
                and not sequence.kv.has_shared_tail
            )
            if has_block or self._make_room(sequence, num_computed + 1, step):
                step.decodes.append(sequence)
        return behind

    def _prompt_budget(self, step: NewStep) -> int:
        """The tokens that prompts may add to the step: now and then a block at least."""
        at_least = max(self.block_manager.block_size * self.shares.is_prompts_turn, self.shares.num_awaited_tokens)
        return self._budget(step, at_least=at_least)

    def _budget(self, step: NewStep, at_least: int) -> int:
        """The tokens that may be added to the step, within its size; and, beyond at_least, within the time
        that tenants leave each other, and the target for the sequences that decode. With stages, a
        sequence gets a token in each num_stages-th step."""
        bounds = [self.shares.bound_s, self.target_itl_s if step.decodes else None]
        bound_s = min((bound / self.policy.num_stages for bound in bounds if bound is not None), default=None)
        return step.room(self.max_batched_tokens, self.step_cost.cost, bound_s, at_least)

    def _schedule_chunks(self, step: NewStep, behind: list[Sequence], budget: int) -> int:
        """The next chunk of each running sequence that is further behind, while the budget lasts. Returns
        the tokens left of it."""
        for sequence in sorted(behind, key=self.shares.order):
            self.prefixes.reuse(sequence)
            num_tokens = sequence.chunk(
                budget - self.shares.kept_from(sequence), self.max_batched_tokens - step.num_tokens
            )
            if num_tokens > 0 and self._make_room(sequence, sequence.kv.num_computed + num_tokens, step):
                step.chunks.append((sequence, num_tokens))
                budget -= num_tokens
        return budget

    def _admit(self, step: NewStep, budget: int) -> None:
        """Waiting sequences begin by rank, while there are budget, a place, and memory as the admission
        strategy counts it."""
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
        """Whether the head of the queue may begin. The cheapest checks come first."""
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
        twin = self._twin(sequence)
        if twin is victim:
            twin = None  # its blocks are given back before the head begins
        if twin is not None and twin.handle in self.policy.in_stages and not sequence.is_scored:
            return Wait()
        if twin is not None and twin.kv.num_computed < twin.tokens.num_prompt:
            if self._can_run(twin):
                return Wait()  # when the twin's prompt is computed, this one need not be
            twin = None
        if victim is not None or not self._is_observed:
            self.admission.observe([running for running in self.running.values() if running is not victim])
            self._is_observed = True
        matched = (
            self.block_manager.match(sequence) if twin is None else self.block_manager.common_blocks(twin, sequence)
        )
        if self.block_manager.has_room_for(sequence, matched, budget) and self.admission.admits(sequence, matched):
            return Begin(matched, twin, victim)
        return Wait(0)

    def _twin(self, sequence: Sequence) -> Sequence | None:
        """A running sequence of the same prompt, if there is one; rather one whose prompt is computed. It has
        the logprobs that are asked of the prompt."""
        request, num_prompt = sequence.request, sequence.tokens.num_prompt
        if request.group_id is None or self.block_manager.slots is not None:
            return None
        group = [other for other in self.running.values() if other.request.group_id == request.group_id]
        prompt_logprobs = request.params.prompt_logprobs
        able = [
            other for other in group if sequence.is_scored or other.request.params.prompt_logprobs == prompt_logprobs
        ]
        if not able:
            return None
        twin = max(able, key=lambda other: other.kv.num_computed >= other.tokens.num_prompt)
        is_same = twin.tokens.ids[: twin.tokens.num_prompt] == sequence.tokens.ids[:num_prompt]
        is_same = is_same and twin.request.cache_salt == request.cache_salt and twin.request.layout == request.layout
        return twin if is_same else None

    def _num_steps_refused(self, sequence: Sequence, *, is_apart: bool) -> int | None:
        """Steps since this head of a queue did not fit; None if it may be tried again."""
        handle, num_steps = self._refused.get(is_apart, (None, 0))
        return num_steps if handle == sequence.handle and num_steps < RETRY_EVERY else None

    def _head(self, *, is_apart: bool) -> Sequence | None:
        """The head of the queue: among the sequences that run apart, or among the others."""
        if is_apart:
            return self.waiting.head_of(self.policy.apart)
        return self.waiting.head(lambda tenant_id: self.aging_s * self._num_running[tenant_id], self.policy.apart)

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Every place is taken: the running sequence that gives its place to this one, which must be its
        tenant's first, or its first of such a priority. None if there is no such sequence.

        A sequence that is less urgent and later in rank gives way; for a tenant that has no place at all,
        also one of a tenant that has many.
        """
        if not self.admission.preempts or self._is_apart:
            return None
        priority, running = sequence.request.priority, list(self.running.values())
        own = [other.request.priority for other in running if other.request.tenant_id == sequence.request.tenant_id]
        if own and min(own) <= priority:
            return None
        others = [other for other in running if other.request.priority >= priority and not other.tokens.is_ending]
        others = [other for other in others if other.handle not in self.policy.apart]
        able = [other for other in others if other.request.priority > priority and other.rank > sequence.rank]
        # each place of a tenant but the first counts like aging_s of waiting, as it does in the queue
        if not able and not own:
            able = [
                other for other in others if other.rank + self.aging_s * (self._num_places(other) - 1) > sequence.rank
            ]
        return max(
            able, key=lambda other: (other.request.priority, self._num_places(other), *_rank(other)), default=None
        )

    def _num_places(self, sequence: Sequence) -> int:
        """The places that the sequence's tenant has."""
        return self._num_running[sequence.request.tenant_id]

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
        self.prefixes.begun(sequence)
        num_tokens = sequence.chunk(budget, self.max_batched_tokens - step.num_tokens)
        last = sequence.kv.num_computed + num_tokens
        has_grown = self.block_manager.grow(sequence, self.admission.num_tokens_held(sequence, last))
        assert has_grown, "admitted without blocks"
        if num_tokens:  # otherwise its image waits for a step with more room
            step.chunks.append((sequence, num_tokens))
        return num_tokens

    def _can_run(self, sequence: Sequence) -> bool:
        """Whether it is the sequence's turn, and enough of its tokens are decided."""
        handle, tokens = sequence.handle, sequence.tokens
        is_turn = (handle in self.policy.apart) == self._is_apart
        if handle in self.policy.in_stages or (handle in self.policy.held and handle in self.running):
            return False
        return is_turn and not tokens.is_ending and tokens.num_undecided_steps <= self.run_ahead

    def _add_drafts(self, step: NewStep) -> list[int]:
        """Append drafts to the decodes of a step without prompts. Returns how many each gets."""
        if self.policy.drafting is None or step.chunks or self._is_apart:
            return [0] * len(step.decodes)
        # where tenants bound the step, only the tenant with the least work may draft
        able = [sequence for sequence in step.decodes if self.shares.lightest in (None, sequence.request.tenant_id)]
        room = min(self._budget(step, at_least=0), self.policy.drafting.max_sampled - len(step.decodes))
        num_spare = 0 if len(self.waiting) else self.block_manager.num_free_blocks - len(self.running)
        drafts = self.policy.drafting.draft(able, room, self.block_manager, num_spare)
        for handle, token_ids in drafts.items():
            self.running[handle].tokens.draft(token_ids)
        return [len(drafts.get(sequence.handle, ())) for sequence in step.decodes]

    def _advance(self, sequence: Sequence, num_tokens: int, num_drafts: int = 0) -> BatchRow:
        """The sequence's row of the step, which counts as computed from now on."""
        row = advance(sequence, num_tokens, num_drafts, self.block_manager.slots)
        if num_tokens > 1 or sequence.kv.num_computed % self.block_manager.block_size == 0:
            self.block_manager.commit(sequence)
        return row

    def _make_room(self, sequence: Sequence, num_tokens: int, step: NewStep) -> bool:
        """Take blocks for the running sequence's first num_tokens tokens; if too few are free, preempt the
        last in rank, which may be the sequence itself. Returns whether it has them."""
        while sequence.handle in self.running:
            if self.block_manager.grow(sequence, num_tokens):
                return True
            self._preempt(max(self.running.values(), key=_rank), step)
        return False

    def _preempt(self, sequence: Sequence, step: NewStep) -> None:
        """The sequence gives its blocks back, waits, and is computed again, with the tokens it has."""
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


class PrefixHits:
    """Blocks of the prefix cache that sequences begin with, and go on with where a segment begins; and how
    many of their tokens these hold."""

    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager
        self.num_queries = 0  # tokens of prompts that were looked up, once for each sequence
        self.num_hits = 0  # those that were in the cache

    def share(self, sequence: Sequence, matched: list[int]) -> None:
        """Begin with the matched blocks, and a part of one more if there is room for a copy."""
        blocks = self.block_manager
        end = (
            blocks.match_end(sequence, matched)
            if blocks.num_free_blocks > blocks.num_blocks_for(sequence.max_num_tokens) + 1
            else None
        )
        block_ids, num_tokens = ([*matched, end[0]], end[1]) if end is not None else (matched, 0)
        blocks.share(sequence, block_ids, len(matched) * blocks.block_size + num_tokens)

    def begun(self, sequence: Sequence) -> None:
        """The sequence has begun, with blocks that it shares: count their tokens, the first time."""
        if not sequence.has_begun:
            sequence.has_begun = True
            self.num_queries += sequence.num_prompt_ids
            self._count(sequence, 0)
        self.reuse(sequence)

    def reuse(self, sequence: Sequence) -> None:
        """Skip the cached tokens of the segments that begin where the sequence is."""
        num_computed = sequence.kv.num_computed
        while self.block_manager.reuse(sequence):
            pass
        if sequence.kv.num_computed > num_computed and sequence.num_preemptions == 0:
            self._count(sequence, num_computed)

    def _count(self, sequence: Sequence, num_computed: int) -> None:
        """Count the tokens of the prompt that are computed now, behind the first num_computed slots."""
        layout, num_prompt = sequence.request.layout, sequence.tokens.num_prompt
        first, last = min(num_computed, num_prompt), min(sequence.kv.num_computed, num_prompt)
        num_hits = layout.num_tokens_in(last) - layout.num_tokens_in(first)
        sequence.num_cached_tokens += num_hits
        self.num_hits += num_hits


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank, sequence.handle
