"""Whom a death is blamed on: who makes progress or only waited goes free, and suspects are tried
beside everybody else.
"""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from msgspec import structs

from services.compute.cache.block_manager import BlockManager
from services.compute.exchange.active import ActiveRequest, Attempts, queue_records
from services.compute.intake.admit import is_prepared
from services.compute.intake.quarantine import MAX_ALONE, Quarantine, is_poison
from services.compute.scheduling.admission import STRATEGIES, make_admission
from services.compute.scheduling.policy import StepPolicy
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Request, Sequence, Tokens
from shared.model.sampling_params import SamplingParams
from shared.model.vision.images import Image, PromptImage
from shared.wire.messages import TokenizedRequest
from shared.wire.transport import Transport
from tests.conftest import running_redis


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("quarantine"), redis_binary) as url:
        yield url


@pytest.fixture
def quarantine(url: str) -> Iterator[Quarantine]:
    with redis.Redis.from_url(url) as client:
        client.flushall()
    transport = Transport(url, threading.Event())
    yield Quarantine(transport, {})
    transport.close()


def sequence(handle: int, *, num_prompt: int = 4, num_output: int = 0, max_tokens: int = 40) -> Sequence:
    tokens = [handle] * (num_prompt + num_output)
    return Sequence(
        Request(handle, f"r{handle}.0", SamplingParams(max_tokens=max_tokens), arrived_at=float(handle)),
        Tokens(tokens, num_prompt),
    )


def active_request(each: Sequence) -> ActiveRequest:
    name, params = each.request.request_id, each.request.params
    return ActiveRequest(each, TokenizedRequest(name, "g", "m", params, np.array([3], np.int32), ()), b"0-1", "g")


def make_scheduler(
    strategy: str, *, num_blocks: int = 400, max_num_seqs: int = 4, max_batched_tokens: int = 64
) -> Scheduler:
    blocks = BlockManager(num_blocks, 4, prefix_caching=False)
    return Scheduler(
        blocks, make_admission(strategy, blocks), max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens
    )


@dataclass
class Life:
    """A compute process with its scheduler. As ComputeService does it, with every decision at once.
    It dies of a step with a poison.
    """

    scheduler: Scheduler
    quarantine: Quarantine
    poisons: frozenset[int] = frozenset()
    begun: set[int] = field(default_factory=set)
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def active(self) -> dict[int, ActiveRequest]:
        assert isinstance(self.quarantine.active, dict)
        return self.quarantine.active

    def add(self, each: Sequence) -> ActiveRequest:
        """A request that this life has taken."""
        self.sequences.append(each)
        return self.active.setdefault(each.handle, active_request(each))

    def step(self) -> list[int] | None:
        """Handles that ran; None: the process has died."""
        batch = self.scheduler.schedule(StepPolicy(apart=self.quarantine.step(self.scheduler.add)))
        if batch is None:
            return []
        handles = [row.handle for row in batch.rows]
        new = [self.active[handle] for handle in handles if handle not in self.begun]
        groups = {each.sequence.request.group_id for each in new} - {None}
        new += [each for each in self.active.values() if each.sequence.request.group_id in groups]
        records = self.quarantine.records_of(new, has_run=True)
        self.quarantine.transport.run(lambda pipe: queue_records(pipe, records))
        self.begun |= {*handles}
        self.quarantine.blame(handles)
        if self.poisons & {*handles}:
            return None
        for handle, _ in batch.sampled:
            sequence = self.scheduler.get(handle)
            self.scheduler.append(sequence, 7)
            if sequence.tokens.num_output == sequence.request.params.max_tokens:
                del self.active[handle]
                self.scheduler.finish(sequence, is_complete=True)
        return handles

    def claim(self, sequences: list[Sequence]) -> list[int]:
        """Take over what another life left. Returns the poisons that were found."""
        verdicts = self.quarantine.judge(
            [each.request.request_id for each in sequences], [each.tokens.num_output for each in sequences]
        )
        found = []
        for sequence, verdict in zip(sequences, verdicts, strict=True):
            if verdict is not None and is_poison(verdict):
                found.append(sequence.handle)
                continue
            active = self.add(sequence)
            if verdict is not None:
                self.quarantine.hold(active, verdict)
                continue
            if sequence.tokens.num_output:
                self.quarantine.watch(active)
            self.scheduler.add(sequence)
        return found

    def left(self) -> list[Sequence]:
        """Sequences not ended, as the next life finds them: prompts, and the tokens of the logs."""
        return [again(each) for each in self.sequences if not each.is_finished]


def write(quarantine: Quarantine, sequences: list[Sequence]) -> None:
    """The records before a step of these sequences."""
    records = quarantine.records_of([active_request(each) for each in sequences], has_run=True)
    quarantine.transport.run(lambda pipe: queue_records(pipe, records))


def again(each: Sequence) -> Sequence:
    return Sequence(each.request, Tokens(list(each.tokens.ids), each.tokens.num_prompt))


def live_until_dead(
    quarantine: Quarantine, asked: list[Sequence], poisons: set[int], **limits: Any
) -> tuple[list[list[int]], int]:
    """Lives one after the other. Returns the poisons that each found when it began, and how many died."""
    found, num_died, left = [], 0, asked
    while left:
        life = Life(make_scheduler("predicted", **limits), Quarantine(quarantine.transport, {}), frozenset(poisons))
        found.append(life.claim(left))
        while (ran := life.step()) is not None and (ran or life.quarantine.suspects or life.scheduler.num_unfinished):
            pass
        num_died += ran is None
        assert num_died < 40
        left = life.left()
    return [each for each in found if each], num_died


def test_who_made_progress_or_only_waited_is_above_suspicion(quarantine: Quarantine) -> None:
    assert quarantine.judge(["a", "b"], [0, 3]) == [None, None], "neither has been in a step"
    ran = [sequence(handle, num_output=handle) for handle in (1, 2)]
    write(quarantine, ran)
    assert quarantine.judge(["r1.0", "r2.0"], [1, 3]) == [Attempts(0, 1, has_run=True), None]
    assert quarantine.judge(["r1.0", "r2.0"], [1, 3]) == [Attempts(0, 1, has_run=True), None]
    assert quarantine.judge(["r1.0", "r2.0"], [2, 4]) == [None, None]


@pytest.mark.parametrize("poisons", [{3}, {1, 2}, {2, 5, 9}])
def test_suspects_run_in_groups_once_and_then_alone_until_they_are_the_poison(
    poisons: set[int], quarantine: Quarantine
) -> None:
    asked = [sequence(handle, max_tokens=3) for handle in range(1, 11)]
    found, num_died = live_until_dead(quarantine, asked, poisons, max_num_seqs=16)
    assert sorted(handle for each in found for handle in each) == sorted(poisons), "and everybody else has ended"
    assert num_died <= 2 + (MAX_ALONE + 1) * len(poisons)


def test_the_choices_of_a_poisonous_prompt_end_together(quarantine: Quarantine) -> None:
    """One response, one error: they are tried as one."""
    choices = [
        Sequence(replace(sequence(handle, max_tokens=3).request, group_id="g"), Tokens([5] * 4))
        for handle in range(1, 9)
    ]
    found, num_died = live_until_dead(
        quarantine, [*choices, sequence(20, max_tokens=3)], {*range(1, 9)}, max_num_seqs=16
    )
    assert found == [[*range(1, 9)]]
    assert num_died == 2 + MAX_ALONE


def test_a_death_in_everybody_elses_step_is_not_blamed_on_a_trial(quarantine: Quarantine) -> None:
    """Again and again the process is killed from outside while a long prompt is tried."""
    suspect = sequence(1, num_prompt=400)
    write(quarantine, [suspect])
    for _ in range(2 * MAX_ALONE + 2):
        life = Life(make_scheduler("predicted", num_blocks=400), Quarantine(quarantine.transport, {}))
        assert life.claim([again(suspect)]) == []
        life.scheduler.add(life.add(sequence(2, max_tokens=300)).sequence)
        while life.step() != [2] or not life.quarantine.trials:
            pass


def test_while_suspects_are_tried_everybody_else_has_every_other_step(quarantine: Quarantine) -> None:
    """64 streams, and 64 prompts of 4,000 tokens that were in the step that died: no stream is
    preempted, and none waits for more than a step.
    """
    life = Life(make_scheduler("predicted", num_blocks=100_000, max_num_seqs=128, max_batched_tokens=512), quarantine)
    streams, prompts = (
        [sequence(handle, max_tokens=2000) for handle in range(1, 65)],
        [sequence(handle, num_prompt=4000) for handle in range(101, 165)],
    )
    write(quarantine, prompts)
    assert life.claim(streams) == []
    life.step()
    assert life.claim(prompts) == []
    without_a_token = list[bool]()
    while life.quarantine.suspects or life.quarantine.trials:
        ran = life.step()
        assert ran is not None
        without_a_token.append(not {*range(1, 65)} & {*ran})
    assert sum(without_a_token) == 64 * 4000 // 512 + 4, "the trial's own steps"
    assert not any(before and after for before, after in itertools.pairwise(without_a_token))
    assert life.scheduler.num_preemptions == 0


def test_prompts_that_only_waited_cost_no_stream_a_step(quarantine: Quarantine) -> None:
    """As above, but every place was taken by a stream: the prompts were in no step."""
    first = Life(make_scheduler("predicted", num_blocks=100_000, max_num_seqs=64, max_batched_tokens=512), quarantine)
    asked = [sequence(handle, max_tokens=400) for handle in range(1, 65)] + [
        sequence(handle, num_prompt=4000) for handle in range(101, 165)
    ]
    assert first.claim(asked) == []
    for _ in range(20):
        first.step()
    second = Life(
        make_scheduler("predicted", num_blocks=100_000, max_num_seqs=64, max_batched_tokens=512),
        Quarantine(quarantine.transport, {}),
    )
    assert second.claim(first.left()) == []
    assert not second.quarantine.suspects
    while (ran := second.step()) and not {*range(101, 165)} & {*ran}:
        assert {*range(1, 65)} & {*ran}
    assert second.scheduler.num_preemptions == 0


def test_a_suspect_whose_grammar_is_compiled_holds_up_nobody(quarantine: Quarantine) -> None:
    """Other suspects are tried before it, and who is none runs all the time."""
    life = Life(make_scheduler("predicted", max_num_seqs=8), quarantine)
    life.scheduler.add(life.add(sequence(1)).sequence)
    quarantine.hold(life.add(sequence(11)), Attempts(0, 0, has_run=True), is_prepared=True)
    quarantine.hold(life.add(sequence(12)), Attempts(1, 0, has_run=True))
    compiling = list[Sequence]()

    def add(each: Sequence) -> None:
        compiling.append(each) if each.handle == 11 else life.scheduler.add(each)

    ran = []
    for _ in range(12):
        batch = life.scheduler.schedule(StepPolicy(apart=quarantine.step(add)))
        assert batch is not None
        ran.append(sorted(row.handle for row in batch.rows))
        quarantine.blame(ran[-1])
        for handle, _ in batch.sampled:
            life.scheduler.append(life.scheduler.get(handle), 7)
    assert {*ran[0], *ran[1]} == {1, 12} and [12] in ran[:2]
    assert compiling and ran[-6:] == [[1, 12]] * 6
    assert quarantine.judge(["r11.0"], [0]) == [Attempts(1, 0, has_run=True)], "compiling may be what kills"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_suspects_get_their_places_in_turn_however_full_it_is(strategy: str, quarantine: Quarantine) -> None:
    """They preempt nobody, and wait no longer than others."""
    life = Life(make_scheduler(strategy, num_blocks=60, max_num_seqs=4), quarantine)
    for handle in range(1, 9):
        life.scheduler.add(life.add(sequence(handle)).sequence)
    assert len(life.step() or ()) == 4
    for handle in (11, 12):
        quarantine.hold(life.add(sequence(handle, num_prompt=40)), Attempts(0, 0, has_run=True))
    ran: list[list[int]] = []
    while life.scheduler.num_unfinished or quarantine.suspects:
        ran.append(life.step() or [])
        assert len(ran) < 1000, "nobody runs any more"
    apart = next(each for each in ran if {11, 12} & {*each})
    assert {*apart} <= {11, 12}
    assert {handle for each in ran for handle in each} == {*range(1, 9), 11, 12}


def test_a_request_that_kills_while_it_is_prepared_is_a_poison_too(quarantine: Quarantine) -> None:
    """Compute dies before any step, as of an image that the encoder can't hold."""
    prompt = PromptImage(Image("ab", 9, 9, 9), 4, 2, 2)
    request = TokenizedRequest(
        "r1.0",
        "g",
        "m",
        SamplingParams(max_tokens=4),
        prompt_token_ids=np.array([3], np.int32),
        eos_token_ids=(1,),
        images=(prompt,),
    )
    assert is_prepared(request) and not is_prepared(structs.replace(request, images=()))
    write(quarantine, [sequence(1)])
    num_died = 0
    while not (verdict := Quarantine(quarantine.transport, {}).judge(["r1.0"], [0])[0]) or not is_poison(verdict):
        active = active_request(sequence(1))
        life = Quarantine(quarantine.transport, {1: active})
        assert verdict is not None
        life.hold(active, verdict, is_prepared=is_prepared(request))
        assert life.step(lambda _: None)
        num_died += 1
        assert num_died < 10
    assert num_died == 3
