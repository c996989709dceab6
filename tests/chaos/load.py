"""The load of a run: learns the answers without faults, then asks for them again and again."""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from tests.chaos.cluster import Cluster
from tests.chaos.exchange import Exchange, Manners
from tests.chaos.history import Asked, History
from tests.chaos.response_exchange import ResponseExchange
from tests.chaos.specs import RESPONSES, Spec
from tests.chaos.tally import Outcome

LEARNERS = 32  # requests at once while learning
TWICE = 3  # every third answer is learned twice


@dataclass(slots=True)
class Load:
    """Owns the clients. `open` is what has not ended yet: tasks, each with its request, or with
    None if it waits for others'.
    """

    cluster: Cluster
    specs: list[Spec]
    history: History
    seed: int
    headers: dict[str, str] = field(default_factory=dict)  # of every request
    manners: Manners = field(default_factory=Manners)
    open: dict["asyncio.Task[Any]", Asked | None] = field(default_factory=dict)
    num_sent: int = 0
    is_over: bool = True

    async def learn(self) -> None:
        """Every answer, streamed; some once more, whole, which must be the same. Raises
        RuntimeError if they are not.
        """
        waiting = asyncio.Semaphore(LEARNERS)

        async def learn_one(spec: Spec, *, is_stream: bool) -> None:
            async with waiting:
                outcome = await self.exchange(spec, is_stream=is_stream).run()
            if outcome is None or outcome.kind != "answered":
                raise RuntimeError(f"without any fault, {spec.name} {spec.body}: {outcome}")

        await asyncio.gather(*(learn_one(spec, is_stream=True) for spec in self.specs))
        await asyncio.gather(*(learn_one(spec, is_stream=False) for spec in self.specs[::TWICE]))

    def exchange(self, spec: Spec, *, is_stream: bool, kind: str = "", before: Exchange | None = None) -> Exchange:
        """A request that begins; before: another connection, whose stream it takes over."""
        self.num_sent += 1
        asked = self.history.ask(
            spec.name,
            kind or spec.kind,
            spec.path,
            spec.body,
            is_stream=is_stream,
            continues=None if before is None else before.asked,
        )
        make = ResponseExchange if spec.path == RESPONSES else Exchange
        made = make(
            spec,
            is_stream,
            self.cluster.of("gateway"),
            random.Random(f"{self.seed}:{self.num_sent}"),
            self.manners,
            asked,
            self.headers,
        )
        if before is not None:
            made.place, made.is_contended, before.is_taken_over = replace(before.place), True, True
        return made

    def draw(self, rng: random.Random, *, is_stream: bool | None = None, kind: str = "") -> Exchange:
        """An exchange for one of the requests, streamed more often than not."""
        spec = rng.choice(self.specs)
        return self.exchange(spec, is_stream=rng.random() < 0.7 if is_stream is None else is_stream, kind=kind)

    def begin(self, num_clients: int, round_number: int) -> "list[asyncio.Task[None]]":
        """Clients that ask until `is_over`."""
        self.is_over = False
        return [
            asyncio.create_task(self.client(random.Random(f"{self.seed}:{round_number}:{number}")))
            for number in range(num_clients)
        ]

    async def client(self, rng: random.Random) -> None:
        while not self.is_over:
            exchange = self.draw(rng)
            await self.follow(exchange.asked, exchange.run())

    def start(self, asked: Asked | None, run: Coroutine[Any, Any, Outcome | None]) -> "asyncio.Task[Outcome | None]":
        """Something beside the clients that must end as well."""
        return asyncio.create_task(self.follow(asked, run))

    async def follow(self, asked: Asked | None, run: Coroutine[Any, Any, Outcome | None]) -> Outcome | None:
        """Run it; a client that can't read what it got has ended, too."""
        task = asyncio.current_task()
        assert task is not None
        self.open[task] = asked
        try:
            return await run
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if asked is None:
                raise
            return asked.end("error", f"the client failed: {error!r}")
        finally:
            del self.open[task]
