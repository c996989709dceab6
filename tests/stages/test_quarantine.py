"""Whom a death is blamed on: who makes progress goes free, and suspects run apart from all others, however full the replica is."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from services.compute.cache.block_manager import BlockManager
from services.compute.quarantine import GROUP_SIZE, MAX_ALONE, Attempts, Quarantine
from services.compute.scheduling.admission import STRATEGIES, make_admission
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Sequence
from shared.sampling_params import SamplingParams
from shared.transport import Transport
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
    yield Quarantine(transport)
    transport.close()


def sequence(handle: int, *, num_prompt: int = 4, num_output: int = 0, max_tokens: int = 40) -> Sequence:
    tokens = [handle] * (num_prompt + num_output)
    return Sequence(handle, f"r{handle}.0", tokens, num_prompt, SamplingParams(max_tokens=max_tokens), arrived_at=float(handle))


def make_scheduler(strategy: str, *, num_blocks: int = 100, max_num_seqs: int = 4) -> Scheduler:
    blocks = BlockManager(num_blocks, 4, prefix_caching=False)
    return Scheduler(blocks, make_admission(strategy, blocks), max_num_seqs=max_num_seqs, max_batched_tokens=64)


def run_step(scheduler: Scheduler, quarantine: Quarantine) -> list[int]:
    """As ComputeService does, every decision at once. Returns who ran."""
    scheduler.only = quarantine.step(scheduler.add)
    batch = scheduler.schedule()
    if batch is None:
        return []
    for handle in batch.sampled:
        scheduler.append(scheduler.get(handle), 7)
        if scheduler.get(handle).num_output_tokens == 40:
            quarantine.forget(scheduler.get(handle))
            scheduler.finish(scheduler.get(handle), is_complete=True)
    return [row.handle for row in batch.rows]


def test_who_made_progress_is_above_suspicion_and_who_did_not_is_remembered(quarantine: Quarantine) -> None:
    assert quarantine.judge(["a", "b"], [0, 3]) == [Attempts(0, 0), None]
    assert quarantine.judge(["a", "b"], [0, 3]) == [Attempts(0, 0), Attempts(0, 3)]
    assert quarantine.judge(["a", "b"], [1, 4]) == [None, None]


def test_suspects_run_in_groups_once_and_then_alone_until_they_are_the_poison(quarantine: Quarantine) -> None:
    """Each look is a new process that finds its predecessor dead."""
    names = [f"r{handle}.0" for handle in range(1, GROUP_SIZE + 3)]
    begun: list[list[int]] = []
    for _ in range(40):
        verdicts = quarantine.judge(names, [0] * len(names))
        if any(each is not None and each.is_poison for each in verdicts):
            break
        life = Quarantine(quarantine.transport)
        for handle, attempts in enumerate(verdicts, 1):
            assert attempts is not None
            life.hold(sequence(handle), attempts)
        begun.append(sorted(life.step(lambda _: None) or ()))
    assert [len(each) for each in begun[:2]] == [GROUP_SIZE, 2]
    assert all(len(each) == 1 for each in begun[2:])
    assert all(sum(each == [handle] for each in begun) <= MAX_ALONE for handle in range(1, len(names) + 1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_suspects_begin_though_every_place_is_taken(strategy: str, quarantine: Quarantine) -> None:
    scheduler = make_scheduler(strategy, max_num_seqs=4)
    for handle in range(1, 5):
        scheduler.add(sequence(handle))
    assert len(run_step(scheduler, quarantine)) == 4
    for handle in (11, 12):
        quarantine.hold(sequence(handle), Attempts())
    assert sorted(run_step(scheduler, quarantine)) == [11, 12]
    assert {*run_step(scheduler, quarantine)} <= {1, 2, 3, 4, 11, 12} and not quarantine.begun
    ran: set[int] = set()
    while scheduler.num_unfinished:
        ran |= {*run_step(scheduler, quarantine)}
    assert ran == {1, 2, 3, 4, 11, 12}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_suspects_begin_though_the_cache_is_full(strategy: str, quarantine: Quarantine) -> None:
    scheduler = make_scheduler(strategy, num_blocks=36, max_num_seqs=16)
    for handle in range(1, 4):
        scheduler.add(sequence(handle, num_prompt=8))
    for _ in range(30):
        run_step(scheduler, quarantine)
    for handle in (11, 12):
        quarantine.hold(sequence(handle, num_prompt=40), Attempts())
    ran: list[list[int]] = []
    while scheduler.num_unfinished or quarantine.suspects:
        ran.append(run_step(scheduler, quarantine))
        assert len(ran) < 400, "nobody runs any more"
    apart = [each for each in ran if {11, 12} & {*each}]
    assert not {*apart[0]} & {1, 2, 3}
