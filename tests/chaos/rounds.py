"""A round: load and faults for some seconds, then everything is healed, every request must end, and
Redis must be as if nothing had been.
"""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass

from tests.chaos.arena import Arena
from tests.chaos.checks import Checks
from tests.chaos.diagnosis import explain
from tests.chaos.faults import MOST_A_ROUND, Fault
from tests.chaos.options import Options
from tests.chaos.redis_faults import REDIS_ERRORS

LOSING_ROUNDS = 0.25  # the share in which faults may lose data: in these, errors are no proof of anything
SHORTEST_GAP_S, LONGEST_GAP_S = 0.2, 2.5  # between the beginnings of two faults
PAIRS = 0.3  # the share of faults with which another begins at once, in other processes
LIVE_GAP_S = 1.5  # from the first request to the first fault
MOST_DEADLINES = 5  # that a slow machine, on which tokens go on being decided, may take
DRAIN_S = 10.0  # at least, for the streams once all has ended


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault to come."""

    fault: Fault
    pause_s: float  # before it
    seed: str


def plan(faults: list[Fault], rng: random.Random, round_s: float, max_faults: int) -> list[Planned]:
    """The faults of one round, drawn before it begins: so a seed gives the same ones, however fast the machine is."""
    harmless = [fault for fault in faults if not fault.may_lose]
    chosen = faults if not harmless or rng.random() < LOSING_ROUNDS else harmless
    planned: list[Planned] = []
    at = 0.0
    while len(planned) < max_faults:
        pause_s = LIVE_GAP_S if not planned else rng.uniform(SHORTEST_GAP_S, LONGEST_GAP_S)
        at += pause_s
        if at > round_s:
            break
        fault = draw(chosen, planned, rng, max_faults)
        if fault is None:
            break
        planned.append(Planned(fault, pause_s, f"{fault.name}:{rng.random()}"))
        if len(planned) < max_faults and rng.random() < PAIRS:
            others = [each for each in chosen if not each.hits & fault.hits]
            if (other := draw(others, planned, rng, max_faults)) is not None:
                planned.append(Planned(other, 0.0, f"{other.name}:{rng.random()}"))
    return planned


def draw(chosen: list[Fault], planned: list[Planned], rng: random.Random, max_faults: int) -> Fault | None:
    """The next fault of a round, of those whose family may have one more; None: there is none."""
    taken = Counter(each.fault.family for each in planned)
    free = [each for each in chosen if taken[each.family] < MOST_A_ROUND.get(each.family, max_faults)]
    return rng.choices(free, [each.weight for each in free])[0] if free else None


def told(planned: list[Planned]) -> str:
    """The names of the faults in their order; a plus is between those that began at once."""
    return "".join(f"{', ' if each.pause_s else ' + '}{each.fault.name}" for each in planned).removeprefix(", ")


@dataclass(slots=True)
class Rounds:
    """The rounds of a run, one after another."""

    arena: Arena
    options: Options
    faults: list[Fault]
    checks: Checks
    number: int = 0
    num_pairs: int = 0  # of faults that began at once

    async def run(self, max_faults: int, left_s: float) -> bool:
        """One round, whose faults begin within left_s. False where something did not end: what
        follows would only show that again.
        """
        self.number += 1
        started = time.monotonic()
        arena, load, history = self.arena, self.arena.load, self.arena.history
        tally = history.judge.tally
        before, num_wrong = tally.total("answered"), len(tally.wrong)
        planned = plan(
            self.faults,
            random.Random(f"{self.options.seed}:{self.number}"),
            min(self.options.round_s, left_s),
            max_faults,
        )
        may_lose = any(each.fault.may_lose for each in planned)
        history.write("round", number=self.number, at="begin", may_lose=may_lose)
        clients = load.begin(self.options.num_clients, self.number)
        self.num_pairs += sum(each.pause_s == 0 for each in planned)
        await self.inflict(planned) if planned else await asyncio.sleep(min(self.options.round_s, left_s))
        try:
            await arena.cluster.heal()
        except TimeoutError as error:
            history.find(f"not ready: {error}")
        history.write("round", number=self.number, at="healed", may_lose=False)
        healed = time.monotonic()
        load.is_over = True
        is_over = await self.finish(clients, healed, may_lose=may_lose)
        await self.checks.note_drafts()
        for crash in arena.cluster.take_crashes():
            history.find(f"crash: {crash}")
        history.write("round", number=self.number, at="over", may_lose=False)
        print(
            f"round {self.number}: {tally.total('answered') - before} answered, {len(tally.wrong) - num_wrong} wrong; "
            f"faults {healed - started:.1f} s, "
            f"then over after {time.monotonic() - healed:.1f} s; {told(planned)}",
            flush=True,
        )
        return is_over

    async def inflict(self, planned: list[Planned]) -> None:
        """Begin each fault at its time, and return when all have healed themselves."""
        running = []
        for each in planned:
            await asyncio.sleep(each.pause_s)
            running.append(asyncio.create_task(self.inflict_one(each)))
        await asyncio.gather(*running)

    async def inflict_one(self, planned: Planned) -> None:
        history, name = self.arena.history, planned.fault.name
        history.num_faults += 1
        number = history.num_faults
        history.write("fault", number=number, name=name, at="begin", says=planned.fault.says)
        try:
            await planned.fault.run(self.arena, random.Random(planned.seed))
        except REDIS_ERRORS as error:
            print(f"{name} came to nothing: {error!r}", flush=True)
        finally:
            history.write("fault", number=number, name=name, at="end", says=planned.fault.says)

    async def finish(self, clients: "list[asyncio.Task[None]]", healed: float, *, may_lose: bool) -> bool:
        """Wait for every end, while anything moves; then look at what is left. False where requests
        hung or Redis did not drain.
        """
        arena, patience_s = self.arena, self.options.deadline_s
        num_decided, moved_at = -1, healed
        while arena.load.open and time.monotonic() < min(moved_at + patience_s, healed + MOST_DEADLINES * patience_s):
            await asyncio.wait(list(arena.load.open), timeout=0.5)
            if (found := await self.checks.num_decided()) != num_decided:
                num_decided, moved_at = found, time.monotonic()
        hung = dict(arena.load.open)
        asked = [each for each in hung.values() if each is not None]
        for each in asked:
            each.end("hung", f"no end {time.monotonic() - healed:.0f} s after all was healed")
        left = await self.checks.drain(max(DRAIN_S, moved_at + patience_s - time.monotonic()))
        if hung or left:
            print(f"where they are:\n{await explain(arena.cluster, [each.journal for each in asked])}", flush=True)
        for task in hung:
            task.cancel()
        await asyncio.gather(*clients, *hung, return_exceptions=True)
        for finding in [*left, *([] if hung else await self.checks.after_round(may_lose=may_lose))]:
            arena.history.find(f"left over: {finding}")
        return not hung and not left
