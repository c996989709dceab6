"""`make verify SUITE=failover`: Redis' primary dies again and again under load, and Sentinels name a replica that lacks what was written last.

Each stage has two replicas. Every so many seconds the replicas of Redis stand still for a moment, the primary is killed, and one of them takes its place:
what was written meanwhile is gone. The old primary comes back as a replica. Every answer must be the one that it was before, and end. A request whose own
entry was lost may end with an error, which is counted as excused.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx

from shared.wire.transport import connect
from tests.chaos.cluster import Cluster
from tests.chaos.history import History
from tests.chaos.load import Load
from tests.chaos.specs import MODULES, make_specs
from tests.deployment import MODEL, Deployment
from tests.sentinels import Guarded, running_sentinels
from tests.waiting import wait_until

DRAIN_S = 60.0
NUM_WRITES = 5000


@dataclass(frozen=True)
class Gateway:
    name: str
    port: int


@dataclass(frozen=True)
class Gateways:
    """The deployment, as the load knows a cluster."""

    deployment: Deployment

    def of(self, stage: str) -> list[Gateway]:
        assert stage == "gateway"
        return [Gateway(name, port) for name, port in self.deployment.ports.items()]


def price_of_waiting(servers: Guarded) -> str:
    """How long a write takes, and one that waits for the append-only file's or a replica's word: an entry of 200 bytes, as a step of few answers is."""
    waits = {"as it is": None, "and WAIT 1 (a replica has it)": ("WAIT", 1, 1000), "and WAITAOF 1 0 (it is on the disk)": ("WAITAOF", 1, 0, 5000)}
    lines = []
    with connect(servers.url) as client:
        for name, wait in waits.items():
            times = []
            for _ in range(NUM_WRITES if wait is None or wait[0] == "WAIT" else NUM_WRITES // 50):
                began = time.perf_counter()
                with client.pipeline(transaction=False) as pipe:
                    pipe.xadd("price", {"step": b"x" * 200}, maxlen=1000)
                    if wait is not None:
                        pipe.execute_command(*wait)
                    pipe.execute()
                times.append(1000 * (time.perf_counter() - began))
            lines.append(f"a write {name}: {statistics.median(times):.2f} ms, p99 {statistics.quantiles(times, n=100)[98]:.2f} ms")
        client.delete("price")
    return "\n".join(lines)


async def run(servers: Guarded, deployment: Deployment, options: argparse.Namespace, folder: Path) -> list[str]:
    """Returns what was wrong."""
    history = History(options.history or folder / "history.jsonl")
    history.write("run", seed=options.seed, arguments="", most_pause_s=None, most_growth_mib={})
    rng, lags = random.Random(options.seed), list[float]()
    try:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            made = await http.post(deployment.url() + "/v1/prompt_modules", json={"modules": MODULES})
        load = Load(cast(Cluster, Gateways(deployment)), make_specs(MODEL, options.seed, made.json()["id"], sees=False), history, options.seed)
        await load.learn()
        history.write("round", number=1, at="begin", may_lose=True)
        clients = load.begin(options.clients, 1)
        until = time.monotonic() + 60 * options.minutes
        while time.monotonic() < until:
            began, answered = time.monotonic(), history.judge.tally.total("answered")
            lags.append(rng.uniform(0, options.lag))
            history.write("fault", at="begin", number=len(lags), name="failover")
            await servers.fail_over(lags[-1])
            history.write("fault", at="end", number=len(lags))
            failed_over_s = time.monotonic() - began - lags[-1]
            await asyncio.to_thread(wait_until, servers.is_whole, description="the old primary is a replica", timeout_s=60)
            await asyncio.sleep(max(0.0, began + options.every - time.monotonic()))
            num_answers = history.judge.tally.total("answered") - answered
            print(f"{lags[-1]:.2f} s lost, another primary after {failed_over_s:.1f} s; {num_answers} answers", flush=True)
        load.is_over = True
        _, hung = await asyncio.wait(clients, timeout=DRAIN_S)
        for client in hung:
            client.cancel()
        history.write("round", number=1, at="over", may_lose=False)
    finally:
        history.close()
    history.judge.close()
    tally = history.judge.tally
    print(f"\n{tally.table()}\n\n{history.judge.pauses.table(dict(tally.faults))}\n", flush=True)
    print(f"{len(lags)} failovers, {sum(lags):.1f} s of writes lost", flush=True)
    return [*(str(each) for each in tally.wrong), *([f"{len(hung)} clients got no end within {DRAIN_S:g} s"] if hung else [])]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.failover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="(default: %(default)g)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds from one death to the next, or more (default: %(default)g)")
    parser.add_argument("--lag", type=float, default=1.0, help="most seconds of writes that the new primary lacks (default: %(default)g)")
    parser.add_argument("--clients", type=int, default=12, help="requests at once (default: %(default)d)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--history", type=Path, metavar="FILE", help="where to write the history, for python -m tests.chaos.check")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, running_sentinels(Path(temporary) / "redis", None) as servers:
        print(price_of_waiting(servers), flush=True)
        deployment = Deployment(servers.url, Path(temporary), {"PENSTOCK_DTYPE": "bfloat16", "PENSTOCK_READER_TIMEOUT_S": "300"})
        try:
            deployment.start_all(tokenizers=2, samplers=2, computes=2, gateways=2)
            wrong = asyncio.run(run(servers, deployment, options, Path(temporary)))
        finally:
            deployment.stop()
    print("\n".join(wrong) or "ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
