"""A step in flight, under random arrivals, ends, cancels, preemptions and decisions, on a device that draws wrongly at times: what compute sends is right.

The device is a model of the cache's content: what is written where, on which tokens. Its logits follow from what is there, so a row that was computed on a
wrong token, or over blocks that are another's, has other logits. What lands is compared with the same request computed alone, from its tokens.
"""

import hashlib
import random
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.compute.backends.torch.row_search import TorchRowSearch
from services.compute.batch import ScheduledBatch
from services.compute.cache.block_manager import BlockManager
from services.compute.candidates.reduction import begin_reduction, reduce
from services.compute.executor import DrawnTokens
from services.compute.flight import Flight, collect, launch, rows_still_valid
from services.compute.scheduling.new_step import NewStep
from services.compute.sequence import PENDING, Sequence
from shared.model.sampling_params import SamplingParams
from shared.wire.messages import encode
from tests.examples import examples
from tests.kernels.drawing import DrawingSearch
from tests.unit.sequences import BLOCK_SIZE, make_scheduler

VOCAB, EOS = 12, 0
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.6, "temperature": 1.5}, {"frequency_penalty": 2.0, "temperature": 0.0},
    {"repetition_penalty": 3.0, "min_p": 0.1}, {"logprobs": 2, "min_tokens": 6}, {"stop_token_ids": (3,), "seed": 5},
)  # fmt: skip
OUTCOMES = ("as foreseen", "otherwise", "the end", "lost")


class Device:
    """Computes what it is told to, and knows no sequences."""

    def __init__(self) -> None:
        self.content: dict[int, tuple[int, ...]] = {}  # by slot: the token whose keys and values are there, after all before it

    def run(self, batch: ScheduledBatch, drawn: DrawnTokens | None) -> dict[int, tuple[int, ...]]:
        """By handle, the tokens on which each row's last one was computed, itself among them."""
        read = [[self.content.get(source * BLOCK_SIZE + at) for at in range(BLOCK_SIZE)] for source, _ in batch.block_copies]
        for (_, target), values in zip(batch.block_copies, read, strict=True):
            self.content.update({target * BLOCK_SIZE + at: value for at, value in enumerate(values) if value is not None})
        computed = {}
        for row in batch.rows:
            token_ids = list(row.token_ids)
            for index in [index for index, token_id in enumerate(token_ids) if token_id == PENDING]:
                assert drawn is not None
                token_ids[index] = int(drawn.token_ids[drawn.rows[row.key(index)]])
            slots = [row.block_table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(row.num_context_tokens)]
            seen = self.content[slots[row.num_computed_tokens - 1]] if row.num_computed_tokens else ()
            for slot, token_id in zip(slots[row.num_computed_tokens :], token_ids, strict=True):
                self.content[slot] = seen = (*seen, token_id)
            assert all(self.content[slot] == seen[: at + 1] for at, slot in enumerate(slots)), "reads what is not its own"
            computed[row.handle] = seen
        return computed


def logits_of(token_ids: tuple[int, ...]) -> torch.Tensor:
    """[VOCAB] float32 that follow from all tokens."""
    seed = int.from_bytes(hashlib.blake2b(repr(token_ids).encode(), digest_size=6).digest(), "little")
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


class FlightMachine(RuleBasedStateMachine):
    @initialize(run_ahead=st.integers(0, 4), num_blocks=st.integers(20, 40), share_wrong=st.sampled_from([0.0, 0.1, 0.6]), seed=st.integers(0, 99))
    def start(self, run_ahead: int, num_blocks: int, share_wrong: float, seed: int) -> None:
        self.rng = random.Random(seed)
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        self.scheduler = make_scheduler(blocks=self.blocks, run_ahead=run_ahead)
        self.device = Device()
        self.search = DrawingSearch(TorchRowSearch(), self.rng, share_wrong)
        self.flight: Flight | None = None
        self.sequences: list[Sequence] = []
        self.sent: dict[int, dict[int, int]] = {}  # by handle, by position: what the sampler will decide

    @rule(length=st.integers(1, 30), output=st.integers(1, 20), kind=st.sampled_from(KINDS), group=st.sampled_from([None, None, "one"]))
    def arrive(self, length: int, output: int, kind: dict[str, Any], group: str | None) -> None:
        handle, prompt = len(self.sequences), [1 + at % 7 for at in range(length)]
        params = SamplingParams(**{"seed": handle, "max_tokens": output, **kind, "min_tokens": min(kind.get("min_tokens", 0), output)})
        sequence = Sequence(handle, str(handle), prompt, length, params, (EOS,), arrived_at=float(handle), group_id=group and f"{group} {length}")
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
            self.scheduler._preempt(list(self.scheduler.running.values())[which % len(self.scheduler.running)], NewStep())

    @rule(decisions=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(OUTCOMES)), min_size=1, max_size=6))
    @precondition(lambda self: self.sequences)
    def step(self, decisions: list[tuple[int, str]]) -> None:
        for number, outcome in decisions:
            self.run_step()
            for sequence in self.undecided()[:number]:
                self.decide(sequence, "as foreseen")
            if undecided := self.undecided():
                self.decide(undecided[number % len(undecided)], outcome)

    def run_step(self) -> bool:
        """As services/compute/service.py does it."""
        batch = self.scheduler.schedule()
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
        assert all(found[key] == tuple(prefix.sequence.token_ids[: prefix.num_tokens]) for key, prefix in rows.items()), "a row of other tokens stands"
        logits = torch.stack([logits_of(each) for each in found.values()]) if found else torch.zeros(0, VOCAB)
        self.flight = launch(batch, None, begin_reduction(logits, list(rows.values()), self.search), self.scheduler)
        return True

    def collect(self, flight: Flight) -> None:
        self.flight = None
        collected = collect(flight, self.scheduler)
        assert not collected.failures
        for row, handle in enumerate(collected.rows.handles.tolist()):
            sequence, position = self.sequences[handle], int(collected.rows.positions[row])
            assert not sequence.is_pending and position == sequence.num_output_tokens
            own = Sequence(handle, "r", sequence.token_ids[:-1], sequence.num_prompt_tokens, sequence.params, sequence.eos_token_ids)
            alone = reduce(logits_of(tuple(own.token_ids))[None], [own], TorchRowSearch())
            assert encode(collected.rows.message([row], "c", 1, (), [])) == encode(alone.message([0], "c", 1, (), []))
            assert sequence.token_ids[-1] == alone.chosen[0]
            self.sent[handle][position] = sequence.token_ids[-1]

    def undecided(self) -> list[Sequence]:
        """Those of which the sampler has rows to decide."""
        return [each for each in self.sequences if not each.is_finished and each.num_undecided_tokens - each.is_pending]

    def decide(self, sequence: Sequence, outcome: str) -> None:
        """As ComputeService.apply does it."""
        at = sequence.num_decided_tokens
        token_id = self.sent[sequence.handle][at - sequence.num_prompt_tokens + 1]
        assert token_id == sequence.token_ids[at]
        if outcome == "lost":
            self.scheduler.truncate(sequence, at)
            return self.scheduler.finish(sequence)
        if outcome == "otherwise":
            token_id = 1 + (token_id + 1) % (VOCAB - 1)
            self.scheduler.truncate(sequence, at)
            self.scheduler.append(sequence, token_id)
        else:
            self.scheduler.confirm(sequence)
        is_last = at + 1 - sequence.num_prompt_tokens == sequence.params.max_tokens
        if outcome == "the end" or is_last or token_id in (EOS, *sequence.params.stop_token_ids):
            self.scheduler.truncate(sequence, at + 1)
            self.scheduler.finish(sequence, is_complete=True)
        elif not sequence.num_undecided_tokens:
            sequence.is_ending = False

    @invariant()
    def only_the_last_token_may_be_pending(self) -> None:
        for sequence in self.sequences:
            assert PENDING not in sequence.token_ids[:-1]
            assert (
                not sequence.is_pending
                or sequence.is_finished
                or (self.flight is not None and sequence in [prefix.sequence for prefix in self.flight.rows.values()])
            )
            assert sequence.is_finished or sequence.num_undecided_tokens <= self.scheduler.run_ahead + 1

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
