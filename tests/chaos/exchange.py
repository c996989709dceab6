"""One request from a client that does not give up: sent again where nothing had begun, resumed where a stream was cut.

What ends it is its known answer, an error, or the run's patience. A client may be impatient: when its gateway has been stopped for a
while it drops the connection and resumes elsewhere, and what the old gateway then makes of the dead connection must not matter.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.answers import Answer, Wrong
from tests.chaos.cluster import Slot
from tests.chaos.http_client import Broken, Event, Reply, ask
from tests.chaos.specs import Spec
from tests.chaos.tally import Journal, Outcome

MAX_ATTEMPTS = 3000  # connections for one request: many more than there are while a slow machine starts a gateway; what hangs, the run's deadline ends
LONGEST_WAIT_S = 2.0  # between two attempts, whatever Retry-After says
IMPATIENT_AFTER_S = 1.5


class Again(Exception):
    """This attempt is over, the request is not."""


class Failed(Exception):
    """The request ended with an error."""


@dataclass(slots=True)
class Manners:
    """How clients behave at the moment; faults change it."""

    late_until: float = 0.0  # resume only after some seconds, until then (monotonic)
    may_lose: bool = False  # a fault of this round loses data: an error is explained by it


@dataclass(slots=True)
class Figures:
    """What an exchange adds to the tally."""

    num_retries: int = 0
    num_resumes: int = 0
    longest_pause_s: float = 0.0


@dataclass(slots=True)
class Exchange:
    """One request on its way. `known` is None while the answer is being learned."""

    spec: Spec
    is_stream: bool
    known: Answer | None
    gateways: list[Slot]
    rng: random.Random
    manners: Manners
    journal: Journal
    figures: Figures = field(default_factory=Figures)
    answer: Answer = field(default_factory=lambda: Answer.empty(1))  # set before it runs, where it goes on with another's
    is_done: bool = False  # the stream's [DONE] or the whole body is in
    was_resumed: bool = False
    may_be_cancelled: bool = False  # the client itself went away from a gateway that ran
    is_impatient: bool = False
    is_taken_over: bool = False  # someone else resumes it: this connection may end, and that is all
    is_contended: bool = False  # it has taken over from another connection, whose own request may reach the gateways after this one's
    heard_at: float = 0.0

    async def run(self) -> Outcome:
        """Until the request has ended."""
        self.is_impatient = self.rng.random() < 0.4
        try:
            for _ in range(MAX_ATTEMPTS):
                if self.is_taken_over:
                    return Outcome("ended", "taken over between two connections")
                try:
                    await self.attempt()
                    break
                except (Again, Broken) as over:
                    self.journal.note(f"{type(over).__name__}: {over}")
                    if self.is_taken_over:
                        return Outcome("ended", "taken over, and the connection ended")
                    if isinstance(over, Broken):
                        await self.pause(0.2)
            else:
                return Outcome("lost", f"no end in {MAX_ATTEMPTS} attempts")
            if self.known is not None:
                self.answer.compare(self.known, was_resumed=self.was_resumed)
            return Outcome("answered")
        except Failed as failed:
            self.journal.note(f"failed: {failed}")
            return Outcome("excused" if self.manners.may_lose and "internal error" not in str(failed) else "error", str(failed))
        except Wrong as wrong:
            return Outcome(wrong.kind, str(wrong))  # type: ignore[arg-type]

    async def attempt(self) -> None:
        """One connection. Raises Again, Broken, Failed or Wrong."""
        gateway = self.rng.choice(self.gateways)
        if self.is_stream and self.answer.response_id is not None and self.answer.last_id is not None:
            await self.resume(gateway)
            return
        self.answer = Answer.empty(self.spec.n)  # nothing of it has a position: from the start
        body = self.spec.body | ({"stream": True, "stream_options": {"include_usage": True, "include_position": True}} if self.is_stream else {})
        self.journal.note(f"POST {self.spec.path} to {gateway.name}")
        reply = await ask(gateway.port, "POST", self.spec.path, json.dumps(body).encode())
        try:
            if reply.status != 200:
                await self.refused(reply)
            if self.is_stream:
                await self.read(reply, gateway)
            else:
                self.answer.add_whole(await reply.json())
                self.is_done = True
        finally:
            reply.close()

    async def resume(self, gateway: Slot) -> None:
        """Go on with the stream, at any gateway."""
        if time.monotonic() < self.manners.late_until:
            await asyncio.sleep(self.rng.uniform(1, 8))
        self.journal.note(f"GET {self.answer.response_id} after {self.answer.last_id} at {gateway.name}")
        headers = {"Last-Event-ID": self.answer.last_id or ""}
        reply = await ask(gateway.port, "GET", f"/v1/streams/{self.answer.response_id}", headers=headers)
        try:
            if reply.status != 200:
                await self.refused(reply)
            self.was_resumed = True
            self.figures.num_resumes += 1
            await self.read(reply, gateway)
        finally:
            reply.close()

    async def refused(self, reply: Reply) -> None:
        """An error status: come again, or not. Raises one of the two."""
        error = (await reply.json()).get("error") or {}
        words = f"{reply.status} {error.get('code') or ''} {error.get('message')}"
        if reply.status == 499 and self.may_be_cancelled:
            self.start_over()
        if reply.status not in (429, 503):
            raise Failed(words)
        if "retry-after" not in reply.headers:
            raise Failed(f"{words} (without Retry-After)")
        await self.pause(float(reply.headers["retry-after"]))
        raise Again(words)

    async def read(self, reply: Reply, gateway: Slot) -> None:
        """A stream to its end. Raises Again where it says that it can be resumed."""
        self.heard_at = time.monotonic()
        watching = asyncio.create_task(self.watch(reply, gateway))
        try:
            async for event in reply.events():
                if self.is_done and event.data is not None:
                    raise Wrong("doubled", f"after [DONE] came {event.data[:100]}")
                self.take(event)
            if not self.is_done:
                raise Broken("the stream ended without [DONE]")
        except Broken:
            if not self.is_done:
                raise
        finally:
            watching.cancel()

    def take(self, event: Event) -> None:
        """One event, or comment. Raises Wrong, Failed, or Again."""
        if event.data is None:
            return
        now = time.monotonic()
        self.figures.longest_pause_s = max(self.figures.longest_pause_s, now - self.heard_at)
        self.heard_at = now
        if event.data == "[DONE]":
            self.is_done = True
            return
        chunk = json.loads(event.data)
        if "error" in chunk:
            self.take_error(chunk["error"])
        is_first = self.answer.response_id is None
        self.answer.add_chunk(chunk, event.event_id, self.known)
        if is_first and self.answer.response_id is not None:
            self.journal.response_ids.append(self.answer.response_id)
            self.journal.note("first event")

    def take_error(self, error: dict[str, Any]) -> None:
        words = f"{error.get('code') or ''} {error.get('message')}"
        if "resum" in words.lower() and ("resumed elsewhere" not in words.lower() or (self.is_contended and not self.is_taken_over)):
            raise Again(f"told to resume: {words}")
        if "cancelled" in words and self.may_be_cancelled:
            self.start_over()
        raise Failed(f"in the stream: {words}")

    def start_over(self) -> None:
        """The client's own going away cancelled it: send it again."""
        self.answer = Answer.empty(self.spec.n)
        self.may_be_cancelled = False
        raise Again("cancelled, because the client had dropped the connection")

    async def watch(self, reply: Reply, gateway: Slot) -> None:
        """Drop the connection to a gateway that has been stopped for a while, if the client is of that kind."""
        while self.is_impatient:
            await asyncio.sleep(0.2)
            stopped = gateway.stopped_since
            if stopped is not None and time.monotonic() - stopped > IMPATIENT_AFTER_S:
                self.journal.note(f"{gateway.name} says nothing: dropping the connection")
                self.may_be_cancelled = True  # if it is woken before the resumption arrives, its cancel is right
                reply.close()
                return

    async def pause(self, seconds: float) -> None:
        self.figures.num_retries += 1
        await asyncio.sleep(min(seconds, LONGEST_WAIT_S) * self.rng.uniform(0.8, 1.2))
