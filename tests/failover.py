"""`make verify SUITE=failover`: Redis' primary dies again and again under load, and Sentinels name
a replica that lacks what was written last.

Each stage has two replicas. Every so many seconds the replicas of Redis stand still for a moment,
the primary is killed, and one of them takes its place: what was written meanwhile is gone. The old
primary comes back as a replica. Every answer must be the one that it was before, and end. A request
whose own entry was lost may end with an error, which is counted as excused.

With --cells N, a Redis Cluster of three primaries and three replicas takes the place of Sentinels:
N cells with one replica of each stage, two gateways for all of them. Each time the primary of a
cell dies, at random; and now and then its slot moves to another primary instead, in one go or key
by key.
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
from typing import Protocol, cast

import httpx

from shared.wire.transport import connect
from tests.chaos.cluster import Cluster
from tests.chaos.history import History
from tests.chaos.load import Load
from tests.chaos.specs import MODULES, make_specs
from tests.clusters import Clustered, running_cluster
from tests.deployment import MODEL, Deployment
from tests.sentinels import Guarded, running_sentinels
from tests.waiting import wait_until

SETTINGS = {"PENSTOCK_DTYPE": "bfloat16", "PENSTOCK_READER_TIMEOUT_S": "300"}
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


class Faults(Protocol):
    """Servers that fail over."""

    def is_whole(self) -> bool: ...

    async def strike(self, rng: random.Random, lag_s: float) -> str:
        """Do it; returns what was done."""
        ...


@dataclass(frozen=True)
class SentinelFaults:
    servers: Guarded

    def is_whole(self) -> bool:
        return self.servers.is_whole()

    async def strike(self, _: random.Random, lag_s: float) -> str:
        await self.servers.fail_over(lag_s)
        return "failover"


@dataclass(frozen=True)
class ClusterFaults:
    cluster: Clustered
    cells: list[str]

    def is_whole(self) -> bool:
        return self.cluster.is_whole()

    async def strike(self, rng: random.Random, lag_s: float) -> str:
        cell, kind = rng.choice(self.cells), rng.choice(["failover"] * 3 + ["move", "move-by-key"])
        if kind == "failover":
            await self.cluster.fail_over(cell, lag_s)
        else:
            await asyncio.to_thread(self.cluster.move if kind == "move" else self.cluster.move_by_key, cell)
        return kind


def price_of_waiting(servers: Guarded) -> str:
    """How long a write takes, and one that waits for the append-only file's or a replica's word: an
    entry of 200 bytes, as a step of few answers is.
    """
    waits = {
        "as it is": None,
        "and WAIT 1 (a replica has it)": ("WAIT", 1, 1000),
        "and WAITAOF 1 0 (it is on the disk)": ("WAITAOF", 1, 0, 5000),
    }
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
            lines.append(
                f"a write {name}: {statistics.median(times):.2f} ms, p99 {statistics.quantiles(times, n=100)[98]:.2f} "
                "ms"
            )
        client.delete("price")
    return "\n".join(lines)


async def run(faults: Faults, deployment: Deployment, options: argparse.Namespace, folder: Path) -> list[str]:
    """Returns what was wrong."""
    history = History(options.history or folder / "history.jsonl")
    history.write("run", seed=options.seed, arguments="", most_pause_s=None, most_growth_mib={})
    rng, done = random.Random(options.seed), list[str]()
    try:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            made = await http.post(deployment.url() + "/v1/prompt_modules", json={"modules": MODULES})
        load = Load(
            cast(Cluster, Gateways(deployment)),
            make_specs(MODEL, options.seed, made.json()["id"], sees=False),
            history,
            options.seed,
        )
        await load.learn()
        history.write("round", number=1, at="begin", may_lose=True)
        clients = load.begin(options.clients, 1)
        until = time.monotonic() + 60 * options.minutes
        while time.monotonic() < until:
            began, answered = time.monotonic(), history.judge.tally.total("answered")
            lag_s = rng.uniform(0, options.lag)
            history.write("fault", at="begin", number=len(done) + 1, name="failover")
            kind = await faults.strike(rng, lag_s)
            done.append(kind)
            history.write("fault", at="end", number=len(done))
            took_s = time.monotonic() - began
            await asyncio.to_thread(
                wait_until, faults.is_whole, description="the old primary is a replica", timeout_s=60
            )
            await asyncio.sleep(max(0.0, began + options.every - time.monotonic()))
            num_answers = history.judge.tally.total("answered") - answered
            lost = f"up to {lag_s:.2f} s of writes lost, " if kind == "failover" else ""
            print(f"{kind}: {lost}another primary after {took_s:.1f} s; {num_answers} answers", flush=True)
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
    print(", ".join(f"{done.count(kind)} × {kind}" for kind in sorted(set(done))), flush=True)
    return [
        *(str(each) for each in tally.wrong),
        *([f"{len(hung)} clients got no end within {DRAIN_S:g} s"] if hung else []),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.failover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="(default: %(default)g)")
    parser.add_argument(
        "--every", type=float, default=10.0, help="seconds from one death to the next, or more (default: %(default)g)"
    )
    parser.add_argument(
        "--lag",
        type=float,
        default=1.0,
        help="most seconds of writes that the new primary lacks (default: %(default)g)",
    )
    parser.add_argument(
        "--cells", type=int, default=0, help="of a Redis Cluster; 0: a primary with Sentinels (default: %(default)d)"
    )
    parser.add_argument("--clients", type=int, default=12, help="requests at once (default: %(default)d)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--history", type=Path, metavar="FILE", help="where to write the history, for python -m tests.chaos.check"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        wrong = (in_cluster if options.cells else beside_sentinels)(Path(temporary), options)
    print("\n".join(wrong) or "ok")
    return 1 if wrong else 0


def beside_sentinels(folder: Path, options: argparse.Namespace) -> list[str]:
    with running_sentinels(folder / "redis", None) as servers:
        print(price_of_waiting(servers), flush=True)
        deployment = Deployment(servers.url, folder, dict(SETTINGS), programs={})
        try:
            deployment.start_all(tokenizers=2, samplers=2, computes=2, gateways=2)
            return asyncio.run(run(SentinelFaults(servers), deployment, options, folder))
        finally:
            deployment.stop()


def in_cluster(folder: Path, options: argparse.Namespace) -> list[str]:
    names = ["home", *(f"cell-{number}" for number in range(2, options.cells + 1))]
    with running_cluster(folder / "redis", None) as cluster:
        further = " ".join(f"{name}={cluster.url(name)}" for name in names[1:])
        deployments = [
            Deployment(cluster.url(name), folder / name, SETTINGS | {"PENSTOCK_CELL": further}, programs={})
            for name in names
        ]
        try:
            for deployment in deployments:
                deployment.folder.mkdir()
                deployment.wait_live(*(deployment.start(stage) for stage in ("sampler", "tokenizer", "compute")))
            home = deployments[0]
            home.wait_live(home.start("gateway"), home.start("gateway"))
            wait_until(
                lambda: set(home.get("/ready").json()["replicas"].values()) == {options.cells},
                description="the gateway sees every cell",
            )
            return asyncio.run(run(ClusterFaults(cluster, names), home, options, folder))
        finally:
            for deployment in deployments:
                deployment.stop()


if __name__ == "__main__":
    sys.exit(main())
