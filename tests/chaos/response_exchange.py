"""An Exchange of the Responses API: a stream that was cut goes on after its last event's number,
and a background response is asked for until it has ended.
"""

import asyncio
import json
from typing import Any

from tests.chaos.cluster import Slot
from tests.chaos.exchange import Again, Exchange, Failed, Place
from tests.chaos.http_client import Event
from tests.chaos.judge import ENDS

POLL_S = 0.3


class ResponseExchange(Exchange):
    @property
    def is_background(self) -> bool:
        return bool(self.spec.body.get("background"))

    async def attempt(self) -> None:
        """One connection. Raises Again, Broken or Failed."""
        gateway = self.rng.choice(self.gateways)
        if self.place.response_id is not None and (self.is_stream or self.is_background):
            await (self.resume(gateway) if self.is_stream else self.poll(gateway))
            return
        self.place = Place()
        reply = await self.send(
            gateway, self.spec.path, json.dumps(self.spec.body | {"stream": self.is_stream}).encode()
        )
        try:
            if self.is_stream:
                await self.read(reply, gateway)
            else:
                self.take_whole(await reply.json())
        finally:
            reply.close()

    async def resume(self, gateway: Slot) -> None:
        """Go on after the last event, at any gateway."""
        await self.be_late()
        after = "" if self.place.last_id is None else f"&starting_after={self.place.last_id}"
        reply = await self.send(gateway, f"{self.spec.path}/{self.place.response_id}?stream=true{after}", resumes=True)
        try:
            await self.read(reply, gateway)
        finally:
            reply.close()

    async def poll(self, gateway: Slot) -> None:
        """Look whether it has ended."""
        await asyncio.sleep(POLL_S)
        reply = await self.send(gateway, f"{self.spec.path}/{self.place.response_id}")
        try:
            self.take_whole(await reply.json())
        finally:
            reply.close()

    def take_whole(self, response: dict[str, Any]) -> None:
        """A response as an object. Raises Again while it runs."""
        self.place.response_id = response.get("id")
        if self.place.response_id is not None and self.place.response_id not in self.asked.journal.response_ids:
            self.asked.journal.response_ids.append(self.place.response_id)
        if response.get("status") not in ENDS:
            raise Again(f"it is {response.get('status')}")
        self.asked.note("body", data=response)
        self.end(response)

    def take(self, data: str, event: Event) -> None:
        """One event. Raises Failed or Again."""
        value = json.loads(data)
        self.asked.note("event", event_id=event.event_id, data=value)
        if value["type"] == "error":
            if value["code"] == "gateway_draining":
                raise Again(f"told to go on elsewhere: {value['message']}")
            self.take_error(value)
        self.place.last_id = str(value["sequence_number"])
        response = value.get("response") or {}
        self.place.response_id = response.get("id") or self.place.response_id
        if response.get("status") in ENDS:
            self.end(response)

    def end(self, response: dict[str, Any]) -> None:
        """Raises Failed for an end that is none of the known ones."""
        if response["status"] == "cancelled" and self.may_be_cancelled:
            self.start_over()
        if response["status"] in ("cancelled", "failed"):
            raise Failed(f"{response['status']}: {(response.get('error') or {}).get('message')}")
        self.is_done = True
