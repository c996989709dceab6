"""Does every request end exactly once, with its own text, whatever dies? Real processes, faults drawn from a seed, and a load of known answers.

Method: start Redis and a deployment; learn the answers of some seventy requests without any fault, twice; then rounds. In a round, clients
send the requests over and over, streamed and whole, while faults begin at random (`--list` shows them); then everything is healed, every
request must end, and streams, token logs and keys must be as if nothing had happened. A plain death, a stop, or an error of Redis that passes
explains no error: a client sees a pause, a 503 or 429 before its stream began, or a cut stream that it resumes. Only where Redis has lost what it
had acknowledged (flushall, cut-aof) may a request end with one clear error instead.

    python -m tests.chaos --seconds 60 [--seed 7] [--only kill-*,readonly] [--except cut-aof] [--list]
    python -m tests.chaos --minutes 10 --quantization w8a8 --kv-cache-dtype int8 --kv-cache-memory 3MiB

The last line is one JSON document; the exit code is 1 if anything was wrong. Everything runs on this machine, in a folder of its own.
"""

import asyncio
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx

from tests.chaos.arena import Arena
from tests.chaos.checks import Checks
from tests.chaos.cluster import Cluster
from tests.chaos.faults import Fault, choose
from tests.chaos.load import Load
from tests.chaos.memory import Memory
from tests.chaos.options import Options, parse
from tests.chaos.rounds import Rounds
from tests.chaos.specs import make_specs
from tests.chaos.store import Store
from tests.chaos.tally import Tally

SETTLE_S = 10.0  # what a round takes after its last fault has begun; some take longer
CONSUMERS_SETTLE_S = 3.0  # after the last round, for whoever tidies up


async def run(options: Options, faults: list[Fault], folder: Path) -> int:
    """The whole run; returns the exit code."""
    store = Store(folder / "redis")
    cluster = Cluster(options, folder, store, random.Random(f"{options.seed}:supervisor"))
    tally = Tally()
    started = time.monotonic()
    try:
        await cluster.start()
        supervising = asyncio.create_task(cluster.supervise())
        load = Load(cluster, make_specs(await served_model(cluster), options.seed), tally, options.seed)
        ready_s = time.monotonic() - started
        await load.learn()
        print(f"ready after {ready_s:.1f} s; {len(load.specs)} answers learned after {time.monotonic() - started:.1f} s", flush=True)
        rounds = Rounds(Arena(cluster, store, load, tally), options, faults, Checks(cluster), Memory())
        await go_round(rounds, options)
        tally.idle_consumers = await settled_consumers(rounds.checks)
        for stage, mib in tally.rss_growth_mib.items():
            if mib > options.rss_tolerance_mib:
                tally.find(f"memory: a {stage} grew by {mib:.0f} MiB")
        print(f"\n{tally.table()}\n{cluster.num_restarts} restarts, {store.num_starts - 1} of Redis; {time.monotonic() - started:.0f} s\n", flush=True)
        print(f"{'ok' if not tally.wrong else f'{len(tally.wrong)} WRONG'}; again with: make chaos ARGS='{options.arguments}'", flush=True)
        print(tally.document(seed=options.seed, rounds=rounds.number, seconds=round(time.monotonic() - started, 1), restarts=cluster.num_restarts))
        supervising.cancel()
        return 1 if tally.wrong else 0
    finally:
        cluster.close()


async def go_round(rounds: Rounds, options: Options) -> None:
    """Rounds, until the time or the faults are used up. The last one may take longer than what is left."""
    until = time.monotonic() + options.seconds
    num_left = options.max_faults if options.max_faults is not None else sys.maxsize
    while (left_s := until - SETTLE_S - time.monotonic()) > 0 and num_left > 0:
        before = rounds.arena.tally.faults.total()
        if not await rounds.run(num_left, left_s) and not options.keep_going:
            return
        num_left -= rounds.arena.tally.faults.total() - before


async def served_model(cluster: Cluster) -> str:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        reply = await http.get(f"http://127.0.0.1:{cluster.of('gateway')[0].port}/v1/models")
    return str(reply.json()["data"][0]["id"])


async def settled_consumers(checks: Checks) -> int:
    """How many dead replicas' names the groups still hold, some seconds after the last round."""
    await asyncio.sleep(CONSUMERS_SETTLE_S)
    return len(await checks.idle_consumers())


async def interruptible(options: Options, faults: list[Fault], folder: Path) -> int:
    """The run, which SIGINT and SIGTERM end in order: no process is left behind."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await run(options, faults, folder)


def main() -> int:
    options = parse(sys.argv[1:])
    try:
        faults = choose(options.only, options.excluded)
    except ValueError as error:
        print(f"python -m tests.chaos: {error}", file=sys.stderr)
        return 2
    print(f"seed {options.seed}: make chaos ARGS='{options.arguments}'", flush=True)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with suppress(asyncio.CancelledError):
            return asyncio.run(interruptible(options, faults, folder))
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
