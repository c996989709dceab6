"""A step in flight, under random arrivals, ends, cancels, preemptions and decisions, on a device that
draws wrongly at times, with drafts that are right, wrong, partly right and too many: what compute
sends is right.

The device is a model of the cache's content: what is written where, on which tokens. Its logits
follow from what is there, so a row that was computed on a wrong token, or over blocks that are
another's, has other logits. What lands is compared with the same request computed alone, from its
tokens.
"""

import hashlib
import random
from collections import Counter
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.compute.backends.torch.row_search import TorchRowSearch
from services.compute.cache.block_manager import BlockManager
from services.compute.candidates.reduction import begin_reduction, reduce
from services.compute.execution.executor import DrawnTokens
from services.compute.loop.flight import Flight, collect, launch, rows_still_valid
from services.compute.scheduling.drafts import Drafting
from services.compute.scheduling.new_step import NewStep
from services.compute.scheduling.policy import PLAIN, StepPolicy
from services.compute.sequence import PENDING, Request, Sequence, Tokens
from services.compute.sequence.batch import ScheduledBatch
from shared.model.sampling_params import SamplingParams
from shared.wire.messages import encode
from tests.examples import examples
from tests.kernels.drawing import DrawingSearch
from tests.unit.sequences import BLOCK_SIZE, make_scheduler

VOCAB, EOS, MAX_SAMPLED = 12, 0, 9
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"top_k": 3},
    {"top_p": 0.6, "temperature": 1.5},
    {"frequency_penalty": 2.0, "temperature": 0.0},
    {"repetition_penalty": 3.0, "min_p": 0.1},
    {"logprobs": 2, "min_tokens": 6},
    {"stop_token_ids": (3,), "seed": 5},
)
OUTCOMES = ("as foreseen", "otherwise", "the end", "lost")


class Device:
    """Computes what it is told to, and knows no sequences."""

    def __init__(self) -> None:
        self.content: dict[
            int, tuple[int, ...]
        ] = {}  # by slot: the token whose keys and values are there, after all before it

    def run(self, batch: ScheduledBatch, drawn: DrawnTokens | None) -> dict[int, tuple[int, ...]]:
        """The tokens on which each row's last one was computed, itself among them, by handle."""
        read = [
            [self.content.get(source * BLOCK_SIZE + at) for at in range(BLOCK_SIZE)] for source, _ in batch.block_copies
        ]
        for (_, target), values in zip(batch.block_copies, read, strict=True):
            self.content.update(
                {target * BLOCK_SIZE + at: value for at, value in enumerate(values) if value is not None}
            )
        computed = {}
        for row in batch.rows:
            token_ids = list(row.token_ids)
            for index in [index for index, token_id in enumerate(token_ids) if token_id == PENDING]:
                assert drawn is not None
                token_ids[index] = int(drawn.token_ids[drawn.rows[row.key(index)]])
            slots = [
                row.block_table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(row.num_context_tokens)
            ]
            seen = self.content[slots[row.num_computed_tokens - 1]] if row.num_computed_tokens else ()
            for slot, token_id in zip(slots[row.num_computed_tokens :], token_ids, strict=True):
                self.content[slot] = seen = (*seen, token_id)
            assert all(self.content[slot] == seen[: at + 1] for at, slot in enumerate(slots)), (
                "reads what is not its own"
            )
            computed[row.handle] = seen  # with its drafts
        return computed


def logits_of(token_ids: tuple[int, ...]) -> torch.Tensor:
    """[VOCAB] float32 that follow from all tokens."""
    seed = int.from_bytes(hashlib.blake2b(repr(token_ids).encode(), digest_size=6).digest(), "little")
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def answer_of(sequence: Sequence, count: int) -> list[int]:
    """The tokens that will be drawn behind the sequence's, its end among them if that comes."""
    own = Sequence(sequence.request, Tokens(list(sequence.tokens.ids), sequence.tokens.num_prompt))
    for _ in range(count):
        alone = reduce(logits_of(tuple(own.tokens.ids))[None], [own], TorchRowSearch())
        own.tokens.ids.append(int(alone.chosen[0]))
    return own.tokens.ids[len(sequence.tokens) :]


def next_decided(sequence: Sequence) -> int:
    """The position in the log of the first token that is undecided."""
    return sequence.tokens.num_decided - sequence.tokens.num_prompt + 1


class FlightMachine(RuleBasedStateMachine):
    @initialize(
        run_ahead=st.integers(0, 4),
        num_blocks=st.integers(20, 40),
        share_wrong=st.sampled_from([0.0, 0.1, 0.6]),
        seed=st.integers(0, 99),
        max_drafts=st.sampled_from([0, 1, 6]),
        is_draw_of_device=st.booleans(),
    )
    def start(
        self, run_ahead: int, num_blocks: int, share_wrong: float, seed: int, max_drafts: int, is_draw_of_device: bool
    ) -> None:
        self.rng = random.Random(seed)
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        self.scheduler = make_scheduler(blocks=self.blocks, run_ahead=run_ahead)
        self.device = Device()
        self.search = DrawingSearch(TorchRowSearch(), self.rng, share_wrong) if is_draw_of_device else TorchRowSearch()
        self.policy = PLAIN
        if max_drafts:
            self.policy = StepPolicy(drafting=Drafting(self.draft, max_drafts, MAX_SAMPLED))
        self.flight: Flight | None = None
        self.sequences: list[Sequence] = []
        self.sent: dict[int, dict[int, int]] = {}  # by handle, by position: what the sampler will decide

    @rule(
        length=st.integers(1, 30),
        output=st.integers(1, 20),
        kind=st.sampled_from(KINDS),
        group=st.sampled_from([None, None, "one"]),
    )
    def arrive(self, length: int, output: int, kind: dict[str, Any], group: str | None) -> None:
        handle, prompt = len(self.sequences), [1 + at % 7 for at in range(length)]
        params = SamplingParams(
            **{"seed": handle, "max_tokens": output, **kind, "min_tokens": min(kind.get("min_tokens", 0), output)}
        )
        sequence = Sequence(
            Request(
                handle, str(handle), params, (EOS,), arrived_at=float(handle), group_id=group and f"{group} {length}"
            ),
            Tokens(prompt, length),
        )
        self.sequences.append(sequence)
        self.sent[handle] = {}
        self.scheduler.add(sequence)

    @rule(which=st.integers(0, 1 << 20))
    def cancel(self, which: int) -> None:
        alive = [sequence for sequence in self.sequences if not sequence.is_finished]
        if alive:
            self.scheduler.finish(alive[which % len(alive)])

    @rule(which=st.integers(0, 1 << 20))
    def give_way(self, which: int) -> None:
        """Somebody is preempted, as if memory had run out."""
        if len(self.scheduler.running) > 1:
            self.scheduler._preempt(
                list(self.scheduler.running.values())[which % len(self.scheduler.running)], NewStep()
            )

    @rule(decisions=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(OUTCOMES)), min_size=1, max_size=6))
    @precondition(lambda self: self.sequences)
    def step(self, decisions: list[tuple[int, str]]) -> None:
        for number, outcome in decisions:
            self.run_step()
            for sequence in self.undecided()[:number]:
                self.decide(sequence, "as foreseen")
            if undecided := self.undecided():
                self.decide(undecided[number % len(undecided)], outcome)

    def draft(self, wanted: list[tuple[Sequence, int]], num_decodes: int) -> dict[int, list[int]]:
        """Drafts what will be drawn, in part or with one wrong token, and too much of it."""
        assert 0 < len(wanted) <= num_decodes
        found: dict[int, list[int]] = {}
        for sequence, most in wanted:
            assert not sequence.tokens.is_pending and sequence.num_uncomputed_tokens == 1 and most > 0
            assert len(sequence.kv.block_table) * BLOCK_SIZE >= len(sequence.tokens) + most
            right = answer_of(sequence, self.rng.randrange(most + 3))
            if right and self.rng.random() < 0.5:
                right[self.rng.randrange(len(right))] = self.rng.randrange(1, VOCAB)
            found[sequence.handle] = right
        return found

    def run_step(self) -> bool:
        """As services/compute/loop/service.py does it."""
        if self.flight is not None and (self.flight.batch.num_drafts or self.rng.random() < 0.2):
            self.collect(self.flight)
        batch = self.scheduler.schedule(self.policy)
        before = self.flight
        if batch is None:
            if before is not None:
                self.collect(before)
            return before is not None
        computed = self.device.run(batch, before.drawn if before is not None else None)
        if before is not None:
            self.collect(before)
        rows = rows_still_valid(batch, self.scheduler)
        found = {key: computed[key.handle][: prefix.num_tokens] for key, prefix in rows.items()}
        assert all(
            found[key] == tuple(prefix.sequence.tokens.ids[: prefix.num_tokens]) for key, prefix in rows.items()
        ), "a row of other tokens stands"
        logits = torch.stack([logits_of(each) for each in found.values()]) if found else torch.zeros(0, VOCAB)
        self.flight = launch(batch, None, begin_reduction(logits, list(rows.values()), self.search), self.scheduler)
        if self.flight.drawn is None:
            self.collect(self.flight)
        return True

    def collect(self, flight: Flight) -> None:
        self.flight = None
        rows, failures, _ = collect(flight, self.scheduler)
        assert not failures
        left = Counter(rows.handles.tolist())
        for row, handle in enumerate(rows.handles.tolist()):
            sequence, position = self.sequences[handle], int(rows.positions[row])
            left[handle] -= 1
            assert not sequence.tokens.is_pending and position == sequence.tokens.num_output - left[handle]
            at = sequence.tokens.num_prompt + position - 1
            own = Sequence(sequence.request, Tokens(sequence.tokens.ids[:at], sequence.tokens.num_prompt))
            alone = reduce(logits_of(tuple(own.tokens.ids))[None], [own], TorchRowSearch())
            assert encode(rows.message([row], "c", 1, (), [])) == encode(alone.message([0], "c", 1, (), []))
            assert sequence.tokens.ids[at] == alone.chosen[0]
            assert not left[handle] or sequence.tokens.ids[at] not in (EOS, *sequence.request.params.stop_token_ids), (
                "nothing is computed behind an end"
            )
            self.sent[handle][position] = sequence.tokens.ids[at]
        for handle in left:
            assert self.sequences[handle].tokens.is_ending or self.sequences[handle].num_uncomputed_tokens in (0, 1)

    def undecided(self) -> list[Sequence]:
        """Sequences of which the sampler has rows to decide."""
        return [
            each
            for each in self.sequences
            if not each.is_finished and each.tokens.num_undecided and next_decided(each) in self.sent[each.handle]
        ]

    def decide(self, sequence: Sequence, outcome: str) -> None:
        """As ComputeService.apply does it."""
        at = sequence.tokens.num_decided
        token_id = self.sent[sequence.handle][next_decided(sequence)]
        assert token_id == sequence.tokens.ids[at]
        if outcome == "lost":
            self.scheduler.truncate(sequence, at)
            return self.scheduler.finish(sequence)
        if outcome == "otherwise":
            token_id = 1 + (token_id + 1) % (VOCAB - 1)
            self.sent[sequence.handle] = {
                position: sent
                for position, sent in self.sent[sequence.handle].items()
                if position < next_decided(sequence)
            }
            self.scheduler.truncate(sequence, at)
            self.scheduler.append(sequence, token_id)
        else:
            self.scheduler.confirm(sequence)
        is_last = at + 1 - sequence.tokens.num_prompt == sequence.request.params.max_tokens
        if outcome == "the end" or is_last or token_id in (EOS, *sequence.request.params.stop_token_ids):
            self.scheduler.truncate(sequence, at + 1)
            self.scheduler.finish(sequence, is_complete=True)

    @invariant()
    def only_the_last_token_may_be_pending(self) -> None:
        for sequence in self.sequences:
            assert PENDING not in sequence.tokens.ids[:-1]
            assert (
                not sequence.tokens.is_pending
                or sequence.is_finished
                or (self.flight is not None and sequence in [prefix.sequence for prefix in self.flight.rows.values()])
            )
            assert sequence.is_finished or sequence.tokens.num_undecided_steps <= self.scheduler.run_ahead + 1
            assert all(
                sequence.tokens.num_decided <= place < len(sequence.tokens) for place in sequence.tokens.foreseen_drafts
            )

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            has_run = self.run_step()
            for sequence in self.undecided():
                if self.rng.random() < 0.7:
                    self.decide(sequence, self.rng.choices(OUTCOMES, weights=(12, 1, 1, 1))[0])
            if not has_run and not self.scheduler.num_unfinished:
                break
        assert all(sequence.is_finished for sequence in self.sequences)
        assert self.blocks.num_free_blocks == self.blocks.num_blocks


TestFlight = FlightMachine.TestCase
TestFlight.settings = examples(20, stateful_step_count=25)
