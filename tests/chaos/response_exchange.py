"""An Exchange of the Responses API: a stream that was cut goes on after its last event's number, and a background response is asked for until it has ended."""

import asyncio
import json
import time
from typing import Any

from tests.chaos.answers import Answer, Wrong
from tests.chaos.cluster import Slot
from tests.chaos.exchange import Again, Exchange, Failed
from tests.chaos.http_client import Event, Reply, ask

POLL_S = 0.3
ENDS = ("completed", "incomplete", "failed", "cancelled")  # statuses


class ResponseExchange(Exchange):
    @property
    def is_background(self) -> bool:
        return bool(self.spec.body.get("background"))

    async def attempt(self) -> None:
        """One connection. Raises Again, Broken, Failed or Wrong."""
        gateway = self.rng.choice(self.gateways)
        if self.answer.response_id is not None and (self.is_stream or self.is_background):
            await (self.resume(gateway) if self.is_stream else self.poll(gateway))
            return
        self.answer = Answer.empty(1)
        self.journal.note(f"POST {self.spec.path} to {gateway.name}")
        reply = await ask(gateway.port, "POST", self.spec.path, json.dumps(self.spec.body | {"stream": self.is_stream}).encode())
        try:
            if reply.status != 200:
                await self.refused(reply)
            if self.is_stream:
                await self.read(reply, gateway)
            else:
                self.take_whole(await reply.json())
        finally:
            reply.close()

    async def resume(self, gateway: Slot) -> None:
        """Go on after the last event, at any gateway."""
        if time.monotonic() < self.manners.late_until:
            await asyncio.sleep(self.rng.uniform(1, 8))
        after = "" if self.answer.last_id is None else f"&starting_after={self.answer.last_id}"
        reply = await self.get(gateway, f"?stream=true{after}")
        try:
            self.was_resumed = True
            self.figures.num_resumes += 1
            await self.read(reply, gateway)
        finally:
            reply.close()

    async def poll(self, gateway: Slot) -> None:
        """Look whether it has ended."""
        await asyncio.sleep(POLL_S)
        reply = await self.get(gateway, "")
        try:
            self.take_whole(await reply.json())
        finally:
            reply.close()

    async def get(self, gateway: Slot, query: str) -> Reply:
        self.journal.note(f"GET {self.answer.response_id}{query} at {gateway.name}")
        reply = await ask(gateway.port, "GET", f"{self.spec.path}/{self.answer.response_id}{query}")
        if reply.status != 200:
            try:
                await self.refused(reply)
            finally:
                reply.close()
        return reply

    def take_whole(self, response: dict[str, Any]) -> None:
        """A response as an object. Raises Again while it runs."""
        if response.get("id") not in (None, *self.journal.response_ids):
            self.journal.response_ids.append(response["id"])
        self.answer.response_id = response.get("id")
        if response.get("status") not in ENDS:
            raise Again(f"it is {response.get('status')}")
        self.end(response)

    def take(self, event: Event) -> None:
        """One event, or comment. Raises Wrong, Failed, or Again."""
        if event.data is None:
            return
        now = time.monotonic()
        self.figures.longest_pause_s = max(self.figures.longest_pause_s, now - self.heard_at)
        self.heard_at = now
        value = json.loads(event.data)
        if value["type"] == "error":
            if value["code"] == "gateway_draining":
                raise Again(f"told to go on elsewhere: {value['message']}")
            self.take_error(value)
        self.answer.add_event(value, self.known)
        if value["type"] == "response.created":
            self.answer.response_id = value["response"]["id"]
            self.journal.response_ids.append(value["response"]["id"])
            self.journal.note("first event")
        if value.get("response", {}).get("status") in ENDS:
            self.end(value["response"])

    def end(self, response: dict[str, Any]) -> None:
        """Raises Failed for an end that is none of the known ones."""
        if response["status"] == "cancelled" and self.may_be_cancelled:
            self.start_over()
        if response["status"] in ("cancelled", "failed"):
            raise Failed(f"{response['status']}: {(response.get('error') or {}).get('message')}")
        if response["background"] != self.is_background:
            raise Wrong("different", f"background is {response['background']}")
        self.answer.add_response(response)
        self.is_done = True
