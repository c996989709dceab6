"""Compute processes that die, again and again: what they were computing goes on elsewhere, and one
request's poison is its own.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from msgspec.structs import replace

from shared.model.sampling_params import ChainParams, DryParams, SamplingParams
from shared.wire.entries import append_to_group
from shared.wire.messages import TokenizedRequest
from shared.wire.streams import DEAD_LETTER, inflight_key, log_key, prompts
from shared.wire.token_log import parse_log
from tests import forge
from tests.conftest import running_redis
from tests.deployment import Deployment
from tests.stages.line_of_stages import MODEL
from tests.waiting import wait_until

POISON_TOKEN = 1999
NUM_KILLS = 5
NUM_IN_FLIGHT = 3  # of the processes, the first ones, have steps in flight

# KEYS[1]: the prompts stream; ARGV: group, a dead consumer. Its entries have been idle for a
# minute, and count as delivered no more often.
RUN_OUT = """
for _, each in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1000, ARGV[2])) do
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, each[1], 'IDLE', 60000, 'JUSTID')
end
"""


@pytest.fixture
def pool(tmp_path: Path, redis_binary: Path | None) -> Iterator[Deployment]:
    """A sampler, and as many compute processes as will die, and one; some as on a device that
    draws, where steps are in flight.
    """
    with running_redis(tmp_path / "redis", redis_binary) as url:
        deployment = Deployment(url, tmp_path)
        try:
            deployment.start("sampler", "sampler-1")
            draws = [{"FRAGILE_DRAWS": "10"}] * NUM_IN_FLIGHT + [{}] * (NUM_KILLS + 1 - NUM_IN_FLIGHT)
            names = [start_fragile(deployment, f"compute-{number}", **each) for number, each in enumerate(draws)]
            deployment.wait_live("sampler-1", *names)
            with leases_end_with_processes(deployment):
                yield deployment
        finally:
            for process in deployment.processes.values():
                process.kill()
                process.wait()


@contextmanager
def leases_end_with_processes(deployment: Deployment) -> Iterator[None]:
    """A process's entries may be claimed as soon as it is dead: how long a lease is, is not what these
    tests show. And no sooner: theirs are the product's seconds, which a busy machine needs."""
    is_over = threading.Event()

    def watch() -> None:
        seen: dict[str, forge.ForkedProcess] = {}
        with deployment.redis() as client:
            while not is_over.wait(0.05):
                seen |= deployment.processes
                for replica_id in [each for each, process in seen.items() if process.poll() is not None]:
                    client.eval(RUN_OUT, 1, prompts(MODEL).key, prompts(MODEL).group, replica_id)
                    del seen[replica_id]

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def start_fragile(deployment: Deployment, replica_id: str, **settings: str) -> str:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PENSTOCK_REDIS_URL": deployment.redis_url,
        "PENSTOCK_REPLICA_ID": replica_id,
        "PENSTOCK_KV_CACHE_MEMORY": "64MiB",
        "PENSTOCK_NUM_THREADS": "1",
        "FRAGILE_TOKEN": str(POISON_TOKEN),
        "FRAGILE_STEP_S": "0.01",
        **settings,
    }
    deployment.processes[replica_id] = forge.start(
        "tests.stages.fragile_compute", environment, deployment.folder / f"{replica_id}.log"
    )
    return replica_id


def request(name: str, number: int, max_tokens: int, *, is_poison: bool = False) -> TokenizedRequest:
    prompt = np.array([30 + number, 40, 50 + number % 7, POISON_TOKEN if is_poison else 60], np.int32)
    params = SamplingParams(max_tokens=max_tokens, seed=number, temperature=0.9)
    if number % 2:  # what is decided by the whole history and by draws of its own
        params = replace(
            params, dry=DryParams(0.8), chain=ChainParams(typical_p=0.9, xtc_probability=0.3, dynatemp_range=0.4)
        )
    return TokenizedRequest(f"{name}{number}.0", None, MODEL, params, prompt, ())


def submit(client: "redis.Redis", asked: list[TokenizedRequest]) -> None:
    with client.pipeline(transaction=True) as pipe:
        for each in asked:
            pipe.hset(inflight_key(MODEL), each.request_id, "1")
            pipe.hincrby(inflight_key(MODEL), "", 1)
            append_to_group(pipe, prompts(MODEL), each)
        pipe.execute()


def events(client: "redis.Redis", each: TokenizedRequest) -> list[Any]:
    return parse_log(client.xrange(log_key(each.request_id)))


def wait_for_all(deployment: Deployment, asked: list[TokenizedRequest]) -> None:
    client = deployment.redis()
    try:
        wait_until(
            lambda: all((log := events(client, each)) and log[-1].finish_reason for each in asked),
            description="all have ended",
            timeout_s=150,
        )
        wait_until(
            lambda: not client.xlen(prompts(MODEL).key) and not client.exists(inflight_key(MODEL)),
            description="nothing is left",
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{deployment.logs()}") from None


def answers(client: "redis.Redis", asked: list[TokenizedRequest]) -> list[Any]:
    return [[(event.token_id, event.text, event.finish_reason) for event in events(client, each)] for each in asked]


def longest_pause(client: "redis.Redis", asked: list[TokenizedRequest]) -> float:
    """Waits until all have ended. Returns the longest time, in seconds, in which one that had not
    ended got no token.
    """
    heard_at, held = (
        dict.fromkeys((each.request_id for each in asked), time.monotonic()),
        dict.fromkeys((each.request_id for each in asked), 0),
    )
    longest, deadline = 0.0, time.monotonic() + 200
    while heard_at:
        assert time.monotonic() < deadline, f"{len(heard_at)} have not ended"
        for each in asked:
            if each.request_id in heard_at and (log := events(client, each)) and len(log) > held[each.request_id]:
                longest = max(longest, time.monotonic() - heard_at[each.request_id])
                heard_at[each.request_id], held[each.request_id] = time.monotonic(), len(log)
                if log[-1].finish_reason:
                    del heard_at[each.request_id]
        time.sleep(0.05)
    return longest


def num_tokens(client: "redis.Redis", asked: list[TokenizedRequest]) -> int:
    return sum(int(client.xlen(log_key(each.request_id))) for each in asked)


def undisturbed(deployment: Deployment, asked: list[TokenizedRequest]) -> list[Any]:
    """The answers when nobody dies, under other names."""
    copies = [
        TokenizedRequest("again" + each.request_id, None, MODEL, each.params, each.prompt_token_ids, ())
        for each in asked
    ]
    submit(deployment.redis(), copies)
    wait_for_all(deployment, copies)
    return answers(deployment.redis(), copies)


def test_a_poison_ends_with_one_error_and_takes_nobody_along(pool: Deployment) -> None:
    client = pool.redis()
    bystanders, poison = [request("by", number, 12) for number in range(64)], request("poison", 1, 12, is_poison=True)
    submit(client, [*bystanders[:11], poison, *bystanders[11:]])
    pause = longest_pause(client, bystanders)
    wait_for_all(pool, [*bystanders, poison])
    print(f"the longest that a bystander waited for a token: {pause:.1f} s")
    (error,) = events(client, poison)
    assert (
        error.finish_reason == "error"
        and "crashed 2 compute replicas in a row while it ran alone" in error.error.message
    )
    (letter,) = client.xrange(DEAD_LETTER)
    assert b"while it ran alone" in letter[1][b"error"]
    died = [name for name, process in pool.processes.items() if process.poll() is not None]
    assert len(died) == 4, "together with all, among eight, and twice alone"
    assert answers(client, bystanders) == undisturbed(pool, bystanders)


def test_five_deaths_in_a_row_cost_no_sequence_a_token(pool: Deployment) -> None:
    """Each time the successor has begun: what makes progress is nobody's poison, however often its
    replica dies. Who has steps in flight dies, by SIGKILL or of its device, when one was launched
    on another that nobody has read. Whoever survives says what all should have come to."""
    client, asked = pool.redis(), [request("kill", number, 160) for number in range(48)]
    in_flight = [(signal.SIGUSR1, -signal.SIGKILL), (signal.SIGUSR2, 1)]  # what it is told, and how it then ends
    submit(client, asked)
    for _ in range(NUM_KILLS):
        before = num_tokens(client, asked)
        wait_until(
            lambda before=before: num_tokens(client, asked) >= before + len(asked),
            description="the successor has begun",
        )
        owners = client.xpending(prompts(MODEL).key, prompts(MODEL).group)["consumers"]
        owner = max(
            (each for each in owners if each["name"].decode() in pool.processes), key=lambda each: each["pending"]
        )["name"].decode()
        if int(owner.removeprefix("compute-")) < NUM_IN_FLIGHT and in_flight:
            process, (told, ends_with) = pool.processes.pop(owner), in_flight.pop(0)
            process.send_signal(told)
            assert process.wait(60) == ends_with, pool.logs()
        else:
            pool.kill(owner)
    assert not in_flight
    assert not any(event.finish_reason for each in asked for event in events(client, each)[-1:]), (
        "they were over before they could be disturbed"
    )
    wait_for_all(pool, asked)
    assert answers(client, asked) == undisturbed(pool, asked)
    assert client.xlen(DEAD_LETTER) == 0
