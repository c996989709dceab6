"""Does every request end exactly once, with its own text, whatever fails?

Method: start Redis and a deployment, and learn the answers of some eighty requests without any
fault. Then come rounds. In a round, clients send the requests again and again, streamed and whole,
while faults begin at random (`--list` shows them). Then everything is healed, every request must
end, and streams, token logs and keys must be as before. A process that dies or stops, or an error
of Redis that passes, excuses no error: a client sees a pause, a 503 or 429 before its stream began,
or a cut stream that it resumes. Only where Redis has lost acknowledged data (flushall, cut-aof,
promote-replica) may a request end with one clear error instead.

    python -m tests.chaos --seconds 60 [--seed 7] [--only kill-*,readonly] [--except cut-aof]
    python -m tests.chaos --minutes 10 --more --max-pause 20     also partitions, full disks, keys
    python -m tests.chaos --minutes 15 --long                    outages longer than the time-outs
    python -m tests.chaos --soak 60 --rss-tolerance 24           no fault; memory must not grow
    python -m tests.chaos --minutes 10 --quantization w8a8 --kv-cache-memory 3MiB
    python -m tests.chaos --minutes 10 --speculate off           else the seed draws it, for each life
    python -m tests.chaos --minutes 10 --tensor-parallel-size 2  each compute is a group, whose ranks die

Clients write what they did and got into a history (history.py), and the judge (judge.py) judges by
that alone; `python -m tests.chaos.check FILE` has it judged again. The last line is one JSON
document. The exit code is 1 if anything was wrong. All is on this machine, in a folder of its own.
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

from shared.model.files import open_model
from tests.chaos.arena import Arena
from tests.chaos.check import document, report
from tests.chaos.checks import Checks
from tests.chaos.clocks import Clocks, find_library
from tests.chaos.cluster import Cluster
from tests.chaos.faults import STAGES, Fault, choose
from tests.chaos.history import History
from tests.chaos.load import Load
from tests.chaos.memory import sample_memory
from tests.chaos.options import Options, parse
from tests.chaos.rounds import Rounds
from tests.chaos.specs import MODULES, make_specs
from tests.chaos.store import Store
from tests.chaos.upgrade import UPGRADE, check_out

SETTLE_S = 10.0  # what a round takes after its last fault has begun; some take longer
HISTORY = "history.jsonl"  # in the run's folder
CONSUMERS_SETTLE_S = 3.0  # after the last round, for whoever tidies up


async def run(options: Options, faults: list[Fault], folder: Path) -> int:
    """The whole run; returns the exit code."""
    needs = {fault.needs for fault in faults}
    library = find_library() if "clocks" in needs else None
    clocks = None if library is None else Clocks(folder / "clocks", library)
    store = Store(folder / "redis", clocks)
    cluster = Cluster(options, folder, store, random.Random(f"{options.seed}:supervisor"), "proxies" in needs, clocks)
    headers = {"Authorization": f"Bearer {cluster.make_key('load')}"} if "keys" in needs else {}
    history = History(options.history or folder / HISTORY)
    bounds = dict.fromkeys(STAGES, options.rss_tolerance_mib) | {"redis": options.redis_tolerance_mib}
    history.write(
        "run", seed=options.seed, arguments=options.arguments, most_pause_s=options.max_pause_s, most_growth_mib=bounds
    )
    started, tasks = time.monotonic(), []
    try:
        if options.older is not None:
            cluster.tree = check_out(options.older, folder)
        await cluster.start()
        tasks = [asyncio.create_task(cluster.supervise()), asyncio.create_task(sample_memory(cluster, history))]
        sees = open_model(options.model).vision is not None
        specs = make_specs(
            await served_model(cluster, headers), options.seed, await module_set(cluster, headers), sees=sees
        )
        load = Load(cluster, specs, history, options.seed, headers)
        ready_s = time.monotonic() - started
        await load.learn()
        print(
            f"ready after {ready_s:.1f} s; {len(load.specs)} answers learned after {time.monotonic() - started:.1f} s",
            flush=True,
        )
        rounds = Rounds(Arena(cluster, store, load, history), options, faults, Checks(cluster))
        await go_round(rounds, options)
        num_idle = await settled_consumers(rounds.checks)
        history.judge.close()
        print(f"\n{report(history.judge)}\nidle consumers of dead replicas: {num_idle}", flush=True)
        print(rounds.checks.told_drafts(), flush=True)
        print(
            f"{cluster.num_restarts} restarts, {store.num_starts - 1} of Redis; {time.monotonic() - started:.0f} s\n",
            flush=True,
        )
        tally = history.judge.tally
        print(
            f"{history.num_faults} faults, of which {2 * rounds.num_pairs} began two at once, in different processes",
            flush=True,
        )
        print(
            f"{'ok' if not tally.wrong else f'{len(tally.wrong)} WRONG'}; again with: make verify SUITE=chaos "
            f"ARGS='{options.arguments}'",
            flush=True,
        )
        seconds = round(time.monotonic() - started, 1)
        print(
            document(
                history.judge,
                rounds=rounds.number,
                seconds=seconds,
                restarts=cluster.num_restarts,
                pairs=rounds.num_pairs,
                idle_consumers=num_idle,
            )
        )
        return 1 if tally.wrong else 0
    finally:
        for task in tasks:
            task.cancel()
        cluster.close()
        history.close()


async def go_round(rounds: Rounds, options: Options) -> None:
    """Rounds, until the time or the faults are used up. The last one may take longer than what is
    left.
    """
    until = time.monotonic() + options.seconds
    num_left = options.max_faults if options.max_faults is not None else sys.maxsize
    while (left_s := until - SETTLE_S - time.monotonic()) > 0 and num_left > 0:
        before = rounds.arena.history.num_faults
        if not await rounds.run(num_left, left_s) and not options.keep_going:
            return
        num_left -= rounds.arena.history.num_faults - before


async def served_model(cluster: Cluster, headers: dict[str, str]) -> str:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        reply = await http.get(f"http://127.0.0.1:{cluster.of('gateway')[0].port}/v1/models", headers=headers)
    return str(reply.json()["data"][0]["id"])


async def module_set(cluster: Cluster, headers: dict[str, str]) -> str:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        reply = await http.post(
            f"http://127.0.0.1:{cluster.of('gateway')[0].port}/v1/prompt_modules",
            headers=headers,
            json={"modules": MODULES},
        )
    return str(reply.json()["id"])


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
        faults = (
            []
            if options.soak
            else [UPGRADE]
            if options.older
            else choose(
                options.only,
                options.excluded,
                ("long",) if options.long else ("always", "more") if options.more else ("always",),
            )
        )
    except ValueError as error:
        print(f"python -m tests.chaos: {error}", file=sys.stderr)
        return 2
    if any(fault.needs == "clocks" for fault in faults) and find_library() is None:
        print("left out: faults of clocks, which need libfaketime (in Debian: apt install faketime)", flush=True)
        faults = [fault for fault in faults if fault.needs != "clocks"]
    if "kv_disk" not in options.compute:
        faults = [fault for fault in faults if fault.needs != "kv-disk"]
    if options.num_ranks == 1:
        faults = [fault for fault in faults if fault.needs != "ranks"]
    if not faults and not options.soak:
        print("python -m tests.chaos: no fault is left", file=sys.stderr)
        return 2
    print(f"seed {options.seed}: make verify SUITE=chaos ARGS='{options.arguments}'", flush=True)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    code = 130
    try:
        with suppress(asyncio.CancelledError):
            code = asyncio.run(interruptible(options, faults, folder))
        if code == 130:
            print("interrupted", file=sys.stderr)
        return code
    finally:
        if code == 1 and options.folder is None:
            print(f"logs and history: {folder}", file=sys.stderr)
        elif options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
