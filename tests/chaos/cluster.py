"""The processes of a run: every stage's replicas on one Redis, and a supervisor that starts again whatever has died.

What comes back has its predecessor's replica id or a new one, by turns of a coin; a gateway keeps its port.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import psutil
import redis

from services.compute.ranks.group.local import HANDLE
from services.requests.store.tenants.api_keys import add_key
from shared.process.priority import run_behind
from shared.wire.messages import decode
from shared.wire.replica import Replica
from tests.chaos.clocks import Clocks
from tests.chaos.options import Options
from tests.chaos.proxy import Proxy
from tests.chaos.speculators import draw_speculators
from tests.chaos.store import Store
from tests.deployment import free_port

ROOT = Path(__file__).parents[2]
STAGE_SETTINGS: dict[str, dict[str, str]] = {"gateway": {"ping_interval_s": "2"}, "compute": {"reader_timeout_s": "30"}}
COMPUTE_NICENESS = 5  # as the launcher has it
LEAVE_TIMEOUT_S = 90.0  # from SIGTERM to the exit: it may be stopped meanwhile, and so may Redis, for 12 s each
READY_TIMEOUT_S = 300.0
END_CODES = (1, 2)  # of a group that has lost a rank: while it serves, and while it starts


@dataclass(slots=True)
class Slot:
    """A place for one replica, and the process that fills it now."""

    stage: str
    number: int
    replica_id: str
    port: int = 0
    tree: Path = ROOT  # whose code it runs
    process: "subprocess.Popen[bytes] | None" = None
    born_at: float = 0.0
    restart_at: float = 0.0
    num_lives: int = 0
    is_death_ours: bool = False  # the end of this process was asked for
    is_rank_hit: bool = False  # a rank of its group was killed, or stopped for so long that the group may end by itself
    proxy: Proxy | None = None  # its way to Redis, where that can be disturbed
    overrides: dict[str, str] = field(default_factory=dict)  # settings that a fault has given it
    leaving_since: float | None = None
    stopped_since: float | None = None  # SIGSTOP

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.number}"

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass(slots=True)
class Cluster:
    """Owns the stages' processes; Redis is `store`'s."""

    options: Options
    folder: Path
    store: Store
    rng: random.Random
    has_proxies: bool = False
    clocks: Clocks | None = None
    tree: Path = ROOT  # whose code the first processes run
    slots: list[Slot] = field(default_factory=list)
    crashes: dict[str, list[str]] = field(
        default_factory=dict
    )  # deaths that nobody asked for, by their last words: the ends of the logs
    sessions: set[int] = field(default_factory=set)  # pids of all processes that slots ever had: each leads a session
    num_restarts: int = 0
    speculators: Counter[str] = field(default_factory=Counter)  # by --speculate: lives of compute replicas
    is_closed: bool = False

    async def start(self) -> None:
        """Redis, then every replica; returns when all are live and every gateway is ready."""
        await self.store.start()
        for stage, count in self.options.counts.items():
            for number in range(1, count + 1):
                port = free_port() if stage == "gateway" else 0
                self.slots.append(Slot(stage, number, f"{stage}-{number}", port, self.tree))
        for slot in self.slots:
            if self.has_proxies:
                slot.proxy = Proxy(
                    self.folder / f"{slot.name}.sock",
                    self.store.socket,
                    random.Random(f"{self.options.seed}:{slot.name}"),
                )
                await slot.proxy.open()
            self.spawn(slot)
        await self.wait_ready()

    @property
    def keys_file(self) -> Path:
        """It is there once a key has been made, and gateways ask for keys then."""
        return self.folder / "keys.json"

    def make_key(self, name: str) -> str:
        return add_key(self.keys_file, name)

    def of(self, stage: str) -> list[Slot]:
        return [slot for slot in self.slots if slot.stage == stage]

    def spawn(self, slot: Slot) -> None:
        settings = dict(STAGE_SETTINGS.get(slot.stage, {}))
        redis_url = self.store.url if slot.proxy is None else slot.proxy.url
        settings |= {
            "redis_url": redis_url,
            "replica_id": slot.replica_id,
            "model": self.options.model,
            "files_url": str(self.folder / "files"),
        }
        if slot.stage == "gateway":
            settings |= {"port": str(slot.port), "keys_file": str(self.keys_file)}
        if slot.stage == "compute":
            drawn = draw_speculators(
                self.options,
                slot.overrides,
                self.folder,
                random.Random(f"{self.options.seed}:{slot.name}:{slot.num_lives}"),
            )
            settings |= self.options.compute | drawn
            self.speculators[settings.get("speculate", "auto")] += 1
        settings |= slot.overrides
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        own = {f"PENSTOCK_{name.upper()}": value for name, value in settings.items()}
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        clock = {} if self.clocks is None else self.clocks.environment(slot.name)
        niceness = COMPUTE_NICENESS if slot.stage == "compute" else 0
        with self.log_path(slot).open("ab") as log:
            slot.process = subprocess.Popen(
                [sys.executable, "-m", f"services.{slot.stage}"],
                cwd=slot.tree,
                env=inherited | threads | own | clock,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(run_behind, niceness),
            )
        self.sessions.add(slot.process.pid)
        slot.born_at, slot.restart_at, slot.is_death_ours, slot.is_rank_hit = time.monotonic(), 0.0, False, False
        slot.leaving_since = slot.stopped_since = None
        slot.num_lives += 1

    def log_path(self, slot: Slot) -> Path:
        return self.folder / f"{slot.name}.log"

    async def supervise(self) -> None:
        """Until cancelled: note what has died, and start it again after a moment."""
        while not self.is_closed:
            for slot in self.slots:
                self.look_after(slot)
            await asyncio.sleep(0.05)

    def look_after(self, slot: Slot) -> None:
        now = time.monotonic()
        if slot.leaving_since is not None and now - slot.leaving_since > LEAVE_TIMEOUT_S and slot.is_alive:
            self.note_crash(slot, f"had not left {LEAVE_TIMEOUT_S:g} s after SIGTERM")
            self.kill(slot)
        if slot.process is not None and (code := slot.process.poll()) is not None:
            if not is_expected(slot, code):
                self.note_crash(slot, f"ended by itself with exit code {code}")
            slot.process, slot.restart_at = None, now + self.rng.uniform(0.05, 0.8)
        if slot.process is None and now >= slot.restart_at:
            if self.rng.random() < 0.5:
                slot.replica_id = f"{slot.name}.{slot.num_lives + 1}"
            self.num_restarts += 1
            self.spawn(slot)

    def note_crash(self, slot: Slot, words: str) -> None:
        tail = self.log_tail(slot, 12)
        last = tail.rsplit("\n", 1)[-1].strip()
        self.crashes.setdefault(f"{slot.stage} {words}: {last[:100]}", []).append(tail)

    def take_crashes(self) -> list[str]:
        """Crashes since the last call: each kind once, with how often, and the end of one log."""
        taken, self.crashes = self.crashes, {}
        return [f"{len(tails)} x {words}\n{tails[0]}" for words, tails in taken.items()]

    def kill(self, slot: Slot) -> None:
        """SIGKILL: no chance to hand anything over."""
        if slot.process is not None:
            slot.is_death_ours = True
            slot.process.kill()

    def leave(self, slot: Slot) -> None:
        """SIGTERM: it is to hand its work on, and exit with 0."""
        if slot.process is not None and slot.leaving_since is None:
            slot.is_death_ours, slot.leaving_since = True, time.monotonic()
            slot.process.terminate()

    def stop(self, slot: Slot) -> None:
        """SIGSTOP."""
        if slot.is_alive and slot.process is not None:
            slot.process.send_signal(signal.SIGSTOP)
            slot.stopped_since = time.monotonic()

    def go_on(self, slot: Slot, pid: int | None = None) -> None:
        """SIGCONT, if the process is still that with this pid. After a long stop, its other ranks
        may have given it up.
        """
        if slot.process is not None and (pid is None or slot.process.pid == pid):
            if slot.stopped_since is not None and self.options.num_ranks > 1:
                slot.is_rank_hit |= time.monotonic() - slot.stopped_since > self.options.group_timeout_s / 2
            slot.process.send_signal(signal.SIGCONT)
            slot.stopped_since = None

    def ranks_of(self, slot: Slot) -> list[psutil.Process]:
        """The ranks that its process, as rank 0, has started; none while there is no group."""
        try:
            return (
                []
                if slot.process is None
                else [each for each in psutil.Process(slot.process.pid).children() if HANDLE in each.environ()]
            )
        except psutil.Error:  # one has just died
            return []

    def orphans(self) -> list[str]:
        """Processes of replicas that are dead."""
        dead = self.sessions - {slot.process.pid for slot in self.slots if slot.process is not None}
        found = []
        for each in psutil.process_iter(["pid", "status", "cmdline"]):
            with suppress(ProcessLookupError):
                if os.getsid(each.pid) in dead and each.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(
                        f"process {each.pid} has outlived its replica: {' '.join(each.info['cmdline'] or ())[:100]}"
                    )
        return found

    async def is_live(self, slot: Slot) -> bool:
        """Whether its present process has announced itself."""
        async with self.store.client() as client:
            value = await client.get(f"replica:{slot.stage}:{slot.replica_id}")
        return value is not None and slot.process is not None and decode(Replica, value).pid == slot.process.pid

    async def heal(self) -> None:
        """Everything runs, nothing is stopped; returns when all are live."""
        async with self.store.lock:
            await self.store.heal()
        for slot in self.slots:
            if slot.stopped_since is not None:
                self.go_on(slot)
            if slot.proxy is not None:
                slot.proxy.heal()
        await self.wait_ready()

    async def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        async with httpx.AsyncClient(timeout=5, trust_env=False) as http:
            while True:
                late = await self.late(http)
                if not late:
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{READY_TIMEOUT_S:g} s after healing not ready: {', '.join(late)}")
                await asyncio.sleep(0.1)

    async def late(self, http: httpx.AsyncClient) -> list[str]:
        """Names of what is not ready."""
        try:
            late = [slot.name for slot in self.slots if not await self.is_live(slot)]
        except (redis.RedisError, OSError) as error:
            return [f"Redis ({error})"]
        return late or [slot.name for slot in self.of("gateway") if not await is_ready(http, slot.port)]

    def log_tail(self, slot: Slot, num_lines: int) -> str:
        path = self.log_path(slot)
        lines = path.read_text(errors="replace")[-20_000:].splitlines() if path.exists() else []
        return "\n".join(f"    {line[:400]}" for line in lines[-num_lines:])

    def close(self) -> None:
        """Kill everything, stopped or not, and reap it."""
        self.is_closed = True
        processes = [slot.process for slot in self.slots if slot.process is not None]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for slot in self.slots:
            if slot.proxy is not None:
                slot.proxy.close()
        self.store.kill()


def is_expected(slot: Slot, code: int) -> bool:
    """Whether this end of its process is what a fault asked for."""
    if slot.is_rank_hit and code in END_CODES:
        return True
    return slot.is_death_ours and (slot.leaving_since is None or code in (0, -signal.SIGKILL))


async def is_ready(http: httpx.AsyncClient, port: int) -> bool:
    try:
        return (await http.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
    except httpx.HTTPError:
        return False
