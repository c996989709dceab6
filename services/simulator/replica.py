"""SimulatedReplica: a Scheduler with a clock. While its sequences only decode, a step costs a few
additions."""

from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Numbers
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar, cast

from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.policy import PLAIN, StepPolicy
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from services.simulator.machine import Cost
from services.simulator.roofline import Work, pairs_of
from services.simulator.trace import TraceRequest
from shared.model.sampling_params import SamplingParams

AnyScheduler = TypeVar("AnyScheduler", bound=Scheduler)
ROW = BatchRow(0, (), 0, ())  # in the place of every row


class CountedBlocks(BlockManager):
    """A BlockManager without a prefix cache, where blocks need no names: it counts those that are
    free. A table of blocks has its length alone."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(0, block_size, prefix_caching=False)
        self.num_blocks = self._num_free = num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._num_free + self._num_unheld

    @contextmanager
    def without(self, sequence: Sequence) -> Iterator[None]:
        self._num_unheld = len(sequence.kv.block_table)
        try:
            yield
        finally:
            self._num_unheld = 0

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        missing = self.num_blocks_for(num_tokens) - len(sequence.kv.block_table)
        if missing > self._num_free:
            return False
        if missing > 0:
            sequence.kv.block_table.extend(bytes(missing))
            self._num_free -= missing
        return True

    def free(self, sequence: Sequence) -> None:
        self._num_free += len(sequence.kv.block_table)
        sequence.kv.clear()


class SteadyScheduler(Scheduler):
    """A Scheduler of sequences without tenants, priorities and grammars, which says when a step of
    decodes alone need not ask it. Its steps are counted; their rows hold nothing."""

    num_tokens = 0  # of the step that was scheduled last
    num_context_tokens = 0
    num_pairs = 0
    num_rows = 0
    sampled: list[Sequence]  # those that get a token

    def schedule(self, policy: StepPolicy = PLAIN) -> ScheduledBatch | None:
        self.num_tokens = self.num_context_tokens = self.num_pairs = self.num_rows = 0
        self.sampled = []
        return super().schedule(policy)

    def _advance(self, sequence: Sequence, num_tokens: int, num_drafts: int = 0) -> BatchRow:  # noqa: ARG002
        last = sequence.kv.num_computed + num_tokens
        sequence.kv.advance(last)
        self.num_tokens += num_tokens
        self.num_context_tokens += last
        self.num_pairs += pairs_of(num_tokens, last)
        self.num_rows += 1
        if last == len(sequence.tokens.ids):
            self.sampled.append(sequence)
        return ROW

    @property
    def is_blocked(self) -> bool:
        """Whether no waiting sequence would begin in a step of decodes alone: there is none, or its
        memory was refused of late, or every place is taken."""
        return not len(self.waiting) or self._num_steps_waited() is not None or len(self.running) >= self.max_num_seqs

    def _num_steps_waited(self) -> int | None:
        """Steps since the head of the queue did not fit, if that keeps it now."""
        head = self._head(is_apart=False)
        return None if head is None else self._num_steps_refused(head, is_apart=False)

    def pass_step(self) -> None:
        """A step of decodes alone ran without the scheduler: the refused head waits for it, too."""
        if self._refused and len(self.waiting) and (num_steps := self._num_steps_waited()) is not None:
            self._refused[False] = (self._refused[False][0], num_steps + 1)


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """Bounds on a replica's steps and sequences."""

    max_num_seqs: int
    max_batched_tokens: int
    block_size: int
    admission: str
    max_total_tokens: int  # that each request asks for, prompt and answer together
    target_itl_s: float | None = None

    def scheduler(self, kind: type[AnyScheduler], kv_tokens: int) -> AnyScheduler:
        """A scheduler whose KV cache has room for so many tokens."""
        blocks = CountedBlocks(kv_tokens // self.block_size, self.block_size)
        return kind(
            blocks,
            make_admission(self.admission, blocks),
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            target_itl_s=self.target_itl_s,
        )


class Outcomes:
    """When each request of a trace got its first and its last token, by its number: s on the
    simulated clock."""

    def __init__(self, requests: Numbers[TraceRequest]) -> None:
        self.requests = requests
        self.first_at = array("d", bytes(8 * len(requests)))
        self.last_at = array("d", bytes(8 * len(requests)))
        self.num_ends = bytearray(len(requests))  # by request
        self.num_ended = 0
        self.num_steps = 0
        self.num_asked = 0  # of the steps, those that the scheduler made
        self.num_tokens = 0  # computed, of prompts and answers
        self.num_preemptions = 0


class SimulatedReplica:
    """Alternate `begin_step` and `end_step`; between an end and a beginning, `add` what has come.

    A sequence's tokens are zeros, a byte each: they are not read, for the prefix cache is off.
    Steady steps, in which all that runs decodes and no sequence begins or is preempted, are only counted;
    the sequences catch up before the scheduler is asked again. The results are those of asking it
    at each step.
    """

    def __init__(self, scheduler: SteadyScheduler, cost: Cost, outcomes: Outcomes, max_total_tokens: int) -> None:
        """max_total_tokens: what each request asks for, prompt and answer together."""
        self.scheduler = scheduler
        self.cost = cost
        self.outcomes = outcomes
        self.max_total_tokens = max_total_tokens
        self._num_rounds = 0  # times that it handed something on
        self._is_steady = False  # the step that runs
        self._num_steady = 0  # steady steps that the sequences lag behind
        self._most_steady = 0  # steady steps that may be made before the scheduler is asked
        self._ends: list[tuple[int, Sequence]] = []  # steady steps until its end: the next one last
        self._num_context_tokens = 0  # of the next steady step
        self._step, self._seconds = Work(0, 0, 0, 0), 0.0  # the step that runs

    def add(self, number: int, num_output_tokens: int = 0) -> None:
        """A request of the trace waits for its turn, with the tokens that it has got elsewhere."""
        request = self.outcomes.requests[number]
        tokens = cast(list[int], bytearray(request.num_prompt_tokens + num_output_tokens))
        params = params_for(self.max_total_tokens - request.num_prompt_tokens)
        handle = number + self._num_rounds * len(self.outcomes.requests)  # what comes back has another
        asked = Request(handle, "", params, arrived_at=request.arrived_at)
        self.scheduler.add(Sequence(asked, Tokens(tokens, request.num_prompt_tokens)))

    def begin_step(self, now: float) -> float | None:
        """The next step begins. Returns when it will end, in s; None if there is nothing to do."""
        if self._num_steady == self._most_steady:
            self._catch_up()
            self._look_ahead()
        scheduler = self.scheduler
        self._is_steady = self._num_steady < self._most_steady and bool(self._ends) and scheduler.is_blocked
        if self._is_steady:
            scheduler.pass_step()
            num_sequences, num_context_tokens = len(scheduler.running), self._num_context_tokens
            self._step = Work(num_sequences, num_context_tokens, num_context_tokens, num_sequences)
        else:
            self._catch_up()
            if scheduler.schedule() is None:
                return None
            self._step = Work(
                scheduler.num_tokens, scheduler.num_context_tokens, scheduler.num_pairs, scheduler.num_rows
            )
            self.outcomes.num_asked += 1
        self._seconds = self.cost.seconds(self._step)
        return now + self._seconds

    def end_step(self, now: float) -> None:
        """The step that began has run: its tokens are there."""
        num_tokens, num_context_tokens = int(self._step.num_tokens), int(self._step.num_context_tokens)
        self.outcomes.num_steps += 1
        self.outcomes.num_tokens += num_tokens
        if self.scheduler.target_itl_s is not None:
            self.scheduler.step_cost.observe(num_tokens, num_context_tokens, self._seconds)
        if not self._is_steady:
            self._append(now)
            return
        self._num_steady += 1
        self._num_context_tokens += num_tokens
        while self._ends and self._ends[-1][0] == self._num_steady:
            _, sequence = self._ends.pop()
            self._num_context_tokens -= len(sequence.tokens) + self._num_steady
            self._advance(sequence)
            self._finish(sequence, now)

    def release(self) -> list[tuple[int, int]]:
        """The replica ends, and hands its sequences on: their numbers, and how many tokens each has
        got."""
        self._catch_up()
        held = [*self.scheduler.running.values(), *self.scheduler.waiting]
        return [(self._number(each), each.tokens.num_output) for each in held]

    def hand_on(self, count: int) -> list[int]:
        """Release the last in rank of those that have not begun, so many at most."""
        waiting = sorted(
            (each.rank, each.handle, each)
            for each in self.scheduler.waiting
            if not each.tokens.num_output and not each.has_begun
        )
        for _, _, sequence in waiting[-count:]:
            self.scheduler.finish(sequence)
        self._num_rounds += 1
        return [self._number(each) for _, _, each in waiting[-count:]]

    def _number(self, sequence: Sequence) -> int:
        """The number of its request."""
        return sequence.handle % len(self.outcomes.requests)

    def _append(self, now: float) -> None:
        """The sequences that the step sampled get their tokens."""
        for sequence in self.scheduler.sampled:
            token_ids = sequence.tokens.ids
            num_output_tokens = len(token_ids) - sequence.tokens.num_prompt
            if num_output_tokens == 0:
                self.outcomes.first_at[self._number(sequence)] = now
            token_ids.append(0)
            if num_output_tokens + 1 == self.outcomes.requests[self._number(sequence)].num_output_tokens:
                self._finish(sequence, now)

    def _finish(self, sequence: Sequence, now: float) -> None:
        number = self._number(sequence)
        self.outcomes.last_at[number] = now
        self.outcomes.num_ends[number] += 1
        self.outcomes.num_ended += 1
        self.outcomes.num_preemptions += sequence.num_preemptions
        self.scheduler.finish(sequence, is_complete=True)

    def _advance(self, sequence: Sequence) -> None:
        """The sequence gets the tokens of the steady steps."""
        sequence.tokens.ids.extend(bytes(self._num_steady))
        sequence.kv.advance(sequence.kv.num_computed + self._num_steady)

    def _catch_up(self) -> None:
        """All that runs gets the tokens of the steady steps, and blocks for them."""
        blocks = self.scheduler.block_manager
        if self._num_steady:
            for sequence in self.scheduler.running.values():
                self._advance(sequence)
                if sequence.kv.num_computed > len(sequence.kv.block_table) * blocks.block_size:
                    has_grown = blocks.grow(sequence, sequence.kv.num_computed)
                    assert has_grown, "more steady steps than memory"
        self._num_steady = self._most_steady = 0

    def _look_ahead(self) -> None:
        """Find how many steady steps can follow, and where they end sequences."""
        running, blocks = self.scheduler.running.values(), self.scheduler.block_manager
        if (
            not running
            or not self.scheduler.is_blocked
            or any(each.num_uncomputed_tokens != 1 or not each.tokens.num_output for each in reversed(running))
        ):
            return
        # a sequence takes a block for each block_size steps
        self._most_steady = blocks.num_free_blocks // len(running) * blocks.block_size
        requests, size = self.outcomes.requests, len(self.outcomes.requests)
        self._num_context_tokens = sum([len(each.tokens.ids) for each in running])
        self._ends = [
            (requests[each.handle % size].num_output_tokens + each.tokens.num_prompt - len(each.tokens.ids), each)
            for each in reversed(running)
        ]
        self._ends.sort(key=lambda end: -end[0])  # stable: of those that end together, the first that runs is last


def replicas_of(limits: ReplicaLimits, cost: Cost, kv_tokens: int) -> Callable[[Outcomes], SimulatedReplica]:
    """Makes the replicas of a fleet, whose KV caches have room for so many tokens each."""
    return lambda outcomes: SimulatedReplica(
        limits.scheduler(SteadyScheduler, kv_tokens), cost, outcomes, limits.max_total_tokens
    )


@lru_cache(65536)
def params_for(max_tokens: int) -> SamplingParams:
    """Parameters are the same object for all that ask for so many tokens."""
    return SamplingParams(max_tokens=max_tokens)
