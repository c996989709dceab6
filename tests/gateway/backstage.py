"""The pipeline behind a gateway, played by the test: it is announced as every stage, takes
requests, and writes tokens with the log's own scripts.
"""

import contextlib
import threading
import time
from typing import Any

import redis

from shared.wire.line import Pipeline
from shared.wire.messages import Control, GenerateRequest, RequestError, StepEvents, TokenEvent, decode, encode
from shared.wire.registry import announce, withdraw
from shared.wire.replica import Replica
from shared.wire.streams import MESSAGE, events, inflight_key, replica_key, requests
from shared.wire.token_log import end_request, write_step
from tests.waiting import wait_until

NAME, ALIAS = "paper", "pulp"
STAGES = ("tokenizer", "compute", "sampler")
LEASE_S = 60  # a test that stands still for seconds is no pipeline that has died


class Backstage:
    """Owns a thread that keeps the announcements alive."""

    def __init__(
        self,
        url: str,
        model: str = NAME,
        aliases: tuple[str, ...] = (ALIAS,),
        stages: tuple[str, ...] = STAGES,
        **announced: Any,
    ) -> None:
        """announced: further fields of the replicas."""
        self.client = redis.Redis.from_url(url)
        self.model = model
        self.replicas = [
            Replica(
                stage,
                f"{stage}-of-{model}",
                "here",
                1,
                time.time(),
                model=model,
                max_model_len=100_000,
                aliases=aliases,
                **announced,
            )
            for stage in stages
        ]
        self._taken_id = "0-0"
        self._stopping = threading.Event()
        self._announce()
        self._thread = threading.Thread(target=self._keep_announcing, daemon=True)
        self._thread.start()

    def _announce(self) -> None:
        pipe = self.client.pipeline(transaction=False)
        for replica in self.replicas:
            announce(pipe, replica)
            pipe.expire(replica_key(replica.stage, replica.replica_id), LEASE_S)
        pipe.execute()

    def _keep_announcing(self) -> None:
        while not self._stopping.wait(0.5):
            try:
                self._announce()
            except redis.RedisError:
                continue

    def close(self) -> None:
        with contextlib.suppress(redis.RedisError):  # some tests take their Redis along
            self.leave()
        self.client.close()

    def leave(self) -> None:
        """Leave the registry; safe to call twice."""
        self._stopping.set()
        self._thread.join()
        pipe = self.client.pipeline(transaction=False)
        for replica in self.replicas:
            withdraw(pipe, replica)
        pipe.execute()

    def take(self, count: int = 1) -> list[GenerateRequest]:
        """The next requests, in order."""
        taken: list[GenerateRequest] = []

        def read() -> bool:
            reply: Any = self.client.xrange(requests(self.model).key, min=f"({self._taken_id}")
            for entry_id, values in reply:
                self._taken_id = entry_id.decode()
                taken.append(decode(GenerateRequest, values[MESSAGE]))
            return len(taken) >= count

        wait_until(read, description=f"{count} requests have come", timeout_s=200)
        assert len(taken) == count
        return taken

    def write(
        self,
        request: GenerateRequest,
        *positions: int,
        text: str = "{} ",
        finish: int = 0,
        gateway: str | None = "",
        is_logged: bool = True,
    ) -> None:
        """Tokens at these positions into the log, and as events to the gateway ("": the request's
        own; None: to nobody). finish: the one that is the last.
        """
        for position in positions:
            pipe = self.client.pipeline(transaction=False)
            to = request.gateway_id if gateway == "" else gateway
            self.queue(pipe, request, position, text=text, finish=finish, gateway=to, is_logged=is_logged)
            assert pipe.execute() == [[]]

    def queue(
        self,
        pipe: Pipeline,
        request: GenerateRequest,
        *positions: int,
        text: str = "{} ",
        finish: int = 0,
        gateway: str | None = None,
        is_logged: bool = True,
    ) -> None:
        """The same, a script for each, within a pipeline."""
        for position in positions:
            event = TokenEvent(
                request.request_id,
                position,
                7,
                text.format(position),
                num_prompt_tokens=3,
                finish_reason="length" if position == finish else None,
            )
            messages = [(events(gateway), StepEvents((encode(event),)))] if gateway else []
            write_step(pipe, self.model, [(event, encode(event))] if is_logged else [], messages)

    def write_texts(self, request: GenerateRequest, texts: list[str], *, gateway: str | None = "") -> None:
        """A whole answer, token by token."""
        for position, text in enumerate(texts, 1):
            self.write(request, position, text=text.replace("{", "{{").replace("}", "}}"), finish=0, gateway=gateway)
        event = TokenEvent(request.request_id, len(texts) + 1, 7, "", num_prompt_tokens=3, finish_reason="stop")
        to = request.gateway_id if gateway == "" else gateway
        pipe = self.client.pipeline(transaction=False)
        write_step(
            pipe, self.model, [(event, encode(event))], [(events(to), StepEvents((encode(event),)))] if to else []
        )
        assert pipe.execute() == [[]]

    def end(self, request: GenerateRequest, *, error: RequestError | None = None, gateway: str | None = "") -> None:
        """End it without a token."""
        pipe = self.client.pipeline(transaction=False)
        end_request(pipe, self.model, request.request_id, request.gateway_id if gateway == "" else gateway, error=error)
        pipe.execute()

    def controls(self, action: str) -> list[Control]:
        """The control messages of this kind so far."""
        found: Any = self.client.xrange("control")
        messages = [decode(Control, values[MESSAGE]) for _, values in found]
        return [message for message in messages if message.action == action]

    def held(self) -> int:
        """Places that are taken."""
        return max(0, int(self.client.hlen(inflight_key(self.model))) - 1)
