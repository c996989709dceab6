"""One request from a client that does not give up.

It sends again where no event had come, and resumes where a stream was cut. It writes down what it
does and what comes; the judge says whether that is right. An impatient client drops the connection
to a gateway that has been stopped, and resumes elsewhere; the old gateway may then cancel.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.cluster import Slot
from tests.chaos.history import Asked
from tests.chaos.http_client import Broken, Event, Reply, ask
from tests.chaos.specs import MODULES, Spec
from tests.chaos.tally import Outcome

# connections for one request: many more than there are while a slow machine starts a gateway; what
# hangs, the run's deadline ends
MAX_ATTEMPTS = 3000
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


@dataclass(slots=True)
class Place:
    """How far a client has come: where to resume."""

    response_id: str | None = None
    last_id: str | None = None


@dataclass(slots=True)
class Exchange:
    """One request on its way."""

    spec: Spec
    is_stream: bool
    gateways: list[Slot]
    rng: random.Random
    manners: Manners
    asked: Asked
    headers: dict[str, str]  # with every connection
    place: Place = field(default_factory=Place)  # set before it runs, where it goes on with another's
    is_done: bool = False  # the stream's [DONE] or the whole body is in
    may_be_cancelled: bool = False  # the client itself went away from a gateway that ran
    is_impatient: bool = False
    is_taken_over: bool = False  # someone else resumes it: this connection may end, and that is all
    is_contended: bool = (
        False  # it has taken over from another connection, whose own request may reach the gateways after this one's
    )

    async def run(self) -> Outcome | None:
        """Until the request has ended. Returns the judge's outcome."""
        self.is_impatient = self.rng.random() < 0.4
        for _ in range(MAX_ATTEMPTS):
            if self.is_taken_over:
                return self.asked.end("taken over", "between two connections")
            try:
                await self.attempt()
                return self.asked.end("done")
            except Failed as failed:
                return self.asked.end("error", str(failed))
            except (Again, Broken) as over:
                self.asked.note("break", why=str(over))
                if self.is_taken_over:
                    return self.asked.end("taken over", "and the connection ended")
                if isinstance(over, Broken):
                    await self.pause(0.2)
        return self.asked.end("lost", f"no end in {MAX_ATTEMPTS} attempts")

    async def attempt(self) -> None:
        """One connection. Raises Again, Broken or Failed."""
        gateway = self.rng.choice(self.gateways)
        if self.is_stream and self.place.response_id is not None and self.place.last_id is not None:
            await self.resume(gateway)
            return
        self.place = Place()  # nothing of it has a position: from the start
        body = self.spec.body | (
            {"stream": True, "stream_options": {"include_usage": True, "include_position": True}}
            if self.is_stream
            else {}
        )
        reply = await self.send(gateway, self.spec.path, json.dumps(body).encode())
        try:
            if self.is_stream:
                await self.read(reply, gateway)
            else:
                self.asked.note("body", data=await reply.json())
        finally:
            reply.close()

    async def resume(self, gateway: Slot) -> None:
        """Go on with the stream, at any gateway."""
        await self.be_late()
        reply = await self.send(
            gateway,
            f"/v1/streams/{self.place.response_id}",
            headers={"Last-Event-ID": self.place.last_id or ""},
            resumes=True,
        )
        try:
            await self.read(reply, gateway)
        finally:
            reply.close()

    async def be_late(self) -> None:
        if time.monotonic() < self.manners.late_until:
            await asyncio.sleep(self.rng.uniform(1, 8))

    async def send(
        self,
        gateway: Slot,
        path: str,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        resumes: bool = False,
    ) -> Reply:
        """The reply, if its status is 200; its head is in. Raises Again, Broken or Failed."""
        self.asked.note("send", to=gateway.name, after=(self.place.last_id or "") if resumes else None)
        reply = await ask(gateway.port, "GET" if data is None else "POST", path, data, self.headers | (headers or {}))
        if reply.status == 200:
            self.asked.note("reply", status=200, why="")
            return reply
        try:
            await self.refused(reply)
        finally:
            reply.close()
        return reply

    async def refused(self, reply: Reply) -> None:
        """An error status: come again, or not. Raises one of the two."""
        error = (await reply.json()).get("error") or {}
        words = f"{reply.status} {error.get('code') or ''} {error.get('message')}"
        self.asked.note("reply", status=reply.status, why=words)
        if reply.status == 499 and self.may_be_cancelled:
            self.start_over()
        if error.get("code") == "prompt_modules_not_found":  # Redis has lost its data: the set is posted again
            (
                await ask(
                    self.rng.choice(self.gateways).port,
                    "POST",
                    "/v1/prompt_modules",
                    json.dumps({"modules": MODULES}).encode(),
                    self.headers,
                )
            ).close()
            raise Again(words)
        if reply.status not in (429, 503):
            raise Failed(words)
        if "retry-after" not in reply.headers:
            raise Failed(f"{words} (without Retry-After)")
        await self.pause(float(reply.headers["retry-after"]))
        raise Again(words)

    async def read(self, reply: Reply, gateway: Slot) -> None:
        """A stream to its end. Raises Again where it says that it can be resumed."""
        watching = asyncio.create_task(self.watch(reply, gateway))
        try:
            async for event in reply.events():
                if event.data is not None:
                    self.take(event.data, event)
            if not self.is_done:
                raise Broken("the stream ended without its end")
        except Broken:
            if not self.is_done:
                raise
        finally:
            watching.cancel()

    def take(self, data: str, event: Event) -> None:
        """One event. Raises Failed or Again."""
        chunk = data if data == "[DONE]" else json.loads(data)
        self.asked.note("event", event_id=event.event_id, data=chunk)
        if isinstance(chunk, str):
            self.is_done = True
            return
        if "error" in chunk:
            self.take_error(chunk["error"])
        self.place.response_id = chunk.get("id") or self.place.response_id
        self.place.last_id = event.event_id or self.place.last_id

    def take_error(self, error: dict[str, Any]) -> None:
        words = f"{error.get('code') or ''} {error.get('message')}"
        if "resum" in words.lower() and (
            "resumed elsewhere" not in words.lower() or (self.is_contended and not self.is_taken_over)
        ):
            raise Again(f"told to resume: {words}")
        if "cancelled" in words and self.may_be_cancelled:
            self.start_over()
        raise Failed(f"in the stream: {words}")

    def start_over(self) -> None:
        """The client's own going away cancelled it: send it again."""
        self.place = Place()
        self.may_be_cancelled = False
        raise Again("cancelled, because the client had dropped the connection")

    async def watch(self, reply: Reply, gateway: Slot) -> None:
        """Drop the connection to a gateway that has been stopped for a while, if the client is of
        that kind.
        """
        while self.is_impatient:
            await asyncio.sleep(0.2)
            stopped = gateway.stopped_since
            if stopped is not None and time.monotonic() - stopped > IMPATIENT_AFTER_S:
                self.asked.note("drop", why=f"{gateway.name} says nothing")
                self.may_be_cancelled = True  # if it is woken before the resumption arrives, its cancel is right
                reply.close()
                return

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, LONGEST_WAIT_S) * self.rng.uniform(0.8, 1.2))
