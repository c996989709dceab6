"""The load of a run: the known answers, learned without faults, and clients that ask for them over and over."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.chaos.answers import Answer
from tests.chaos.cluster import Cluster
from tests.chaos.exchange import Exchange, Manners
from tests.chaos.response_exchange import ResponseExchange
from tests.chaos.specs import RESPONSES, Spec
from tests.chaos.tally import Journal, Outcome, Tally

LEARNERS = 32  # requests at once while learning
TWICE = 3  # every third answer is learned twice


@dataclass(slots=True)
class Load:
    """Owns the clients. `open` is what has not ended yet, with the task that waits for it."""

    cluster: Cluster
    specs: list[Spec]
    tally: Tally
    seed: int
    manners: Manners = field(default_factory=Manners)
    known: dict[str, Answer] = field(default_factory=dict)
    open: dict["asyncio.Task[None]", tuple[str, Journal]] = field(default_factory=dict)
    num_sent: int = 0
    is_over: bool = True

    async def learn(self) -> None:
        """Every answer, streamed; some once more, whole, which must be the same. Raises RuntimeError if they are not."""
        waiting = asyncio.Semaphore(LEARNERS)

        async def learn_one(spec: Spec, known: Answer | None) -> None:
            async with waiting:
                exchange = self.exchange(spec, is_stream=known is None, known=known)
                outcome = await exchange.run()
            if outcome.kind != "answered":
                raise RuntimeError(f"without any fault, {spec.name} {spec.body}: {outcome}")
            self.known.setdefault(spec.name, exchange.answer)

        await asyncio.gather(*(learn_one(spec, None) for spec in self.specs))
        await asyncio.gather(*(learn_one(spec, self.known[spec.name]) for spec in self.specs[::TWICE]))

    def exchange(self, spec: Spec, *, is_stream: bool, known: Answer | None, rng: random.Random | None = None) -> Exchange:
        self.num_sent += 1
        journal = Journal(f"{spec.name} {'streamed' if is_stream else 'whole'} #{self.num_sent}")
        make = ResponseExchange if spec.path == RESPONSES else Exchange
        own = rng or random.Random(f"{self.seed}:{self.num_sent}")
        return make(spec, is_stream, known, self.cluster.of("gateway"), own, self.manners, journal, answer=Answer.empty(spec.n))

    def draw(self, rng: random.Random, *, is_stream: bool | None = None) -> Exchange:
        """An exchange for one of the requests, streamed more often than not."""
        spec = rng.choice(self.specs)
        stream = rng.random() < 0.7 if is_stream is None else is_stream
        return self.exchange(spec, is_stream=stream, known=self.known[spec.name])

    def begin(self, num_clients: int, round_number: int) -> "list[asyncio.Task[None]]":
        """Clients that ask until `is_over`."""
        self.is_over = False
        return [asyncio.create_task(self.client(random.Random(f"{self.seed}:{round_number}:{number}"))) for number in range(num_clients)]

    async def client(self, rng: random.Random) -> None:
        while not self.is_over:
            exchange = self.draw(rng)
            await self.follow(exchange.spec.kind, exchange.journal, lambda exchange=exchange: self.finish(exchange))  # type: ignore[misc]

    async def finish(self, exchange: Exchange) -> Outcome:
        try:
            return await exchange.run()
        finally:
            self.tally.num_retries += exchange.figures.num_retries
            self.tally.num_resumes += exchange.figures.num_resumes
            self.tally.longest_pause_s = max(self.tally.longest_pause_s, exchange.figures.longest_pause_s)

    def start(self, kind: str, journal: Journal, run: Callable[[], Awaitable[Outcome]]) -> None:
        """Something beside the clients that must end as well."""
        asyncio.create_task(self.follow(kind, journal, run))

    async def follow(self, kind: str, journal: Journal, run: Callable[[], Awaitable[Outcome]]) -> None:
        """Run it, and enter how it ended."""
        task = asyncio.current_task()
        assert task is not None
        self.open[task] = (kind, journal)
        try:
            outcome = await run()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a client that can't read what it got: that is an answer, too
            outcome = Outcome("error", f"the client failed: {error!r}")
        finally:
            del self.open[task]
        self.tally.end(kind, outcome, journal)
