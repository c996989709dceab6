"""Generation: one response of the API on its way through the pipeline. It has one sequence for each
prompt and choice.

Submits the requests or takes a running response over, hands out their events, and cancels what is
unfinished when its last reader leaves.
"""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import redis
import redis.asyncio
from msgspec import structs

from services.gateway.generation.canceller import Canceller
from services.gateway.generation.subscription import Subscription
from services.gateway.generation.subscriptions import Subscriptions
from services.gateway.generation.takeover import Takeover
from services.gateway.telemetry.traces import admission_span, current_root
from services.requests.bodies.fields import shortened
from services.requests.store.admission.admission import Admission, admit
from services.requests.store.client import redis_errors_as_503
from services.requests.store.record import ResponseRecord, find_record
from services.requests.store.tenants.limits import Caller
from services.requests.store.tenants.tenant import Tenant
from services.requests.workers.grammars.answers import AnswerChecker
from shared.process.errors import Invalid, Lost, Recoverable, Rejected
from shared.wire.messages import GenerateRequest, TokenEvent
from shared.wire.streams import log_key
from shared.wire.token_log import parse_log


def joined_to_trace(
    record: ResponseRecord, requests: list[GenerateRequest]
) -> tuple[ResponseRecord, list[GenerateRequest]]:
    """Add the trace of the HTTP request that is being answered, if there is one."""
    root = current_root()
    if root is None or not root.traceparent:
        return record, requests
    return replace(record, traceparent=root.traceparent), [
        structs.replace(request, traceparent=root.traceparent) for request in requests
    ]


class Generation:
    """The events of a response's sequences, from submission or from a resumption to the end."""

    def __init__(
        self, pipeline: "Pipeline", record: ResponseRecord, positions: list[int], subscription: Subscription
    ) -> None:
        """positions: after which the stream begins, of each sequence; all zero unless it is
        resumed."""
        self.pipeline = pipeline
        self.record = record
        self.request_ids = record.request_ids
        self.positions = positions
        self.subscription = subscription
        self.is_resumed = subscription.generation > 0
        self._index_by_request = {request_id: index for index, request_id in enumerate(self.request_ids)}
        # that the client asked for, of each sequence; not known of a resumed response
        self.max_tokens: list[int | None] = [None] * len(positions)
        self._is_closed = False

    async def next(self, timeout_s: float) -> list[tuple[int, TokenEvent]]:
        """The events that have come, each with its sequence's index; none after timeout_s. Raises
        ResponseFailed."""
        return [(self._index_by_request[event.request_id], event) for event in await self.subscription.next(timeout_s)]

    @property
    def is_starting(self) -> bool:
        """Whether it waits for a replica that is being started."""
        return self.pipeline.admission.is_starting(self.record.served_model)

    async def text_before(self, index: int) -> str | None:
        """The text of a sequence up to where the stream was resumed; None: its log is not whole, or out of reach."""
        request_id = self.request_ids[index]
        try:
            with redis_errors_as_503():
                entries: Any = await self.pipeline.client.xrange(log_key(request_id), max=f"{self.positions[index]}-0")
            return "".join(event.text for event in parse_log(entries))
        except (Lost, Recoverable):
            return None

    def close(self) -> None:
        """Listen no more, and have what is unfinished cancelled, unless others read on. Safe to
        call twice.

        A response whose client may come back is cancelled when that time is over, unless a client
        has resumed it by then.
        """
        self.pipeline.subscriptions.unsubscribe(self.subscription)
        if self._is_closed or self.subscription.goes_on_elsewhere:
            return
        self._is_closed = True
        if not self.subscription.unfinished:
            return
        cancel = partial(
            self.pipeline.canceller.cancel,
            self.record.response_id,
            sorted(self.subscription.unfinished),
            self.subscription.generation,
        )
        if self.record.resume_within_s and self.subscription.is_submitted:
            asyncio.get_running_loop().call_later(self.record.resume_within_s, cancel)
        else:
            cancel()


class Pipeline:
    """The gateway's way into the pipeline."""

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        admission: Admission,
        subscriptions: Subscriptions,
        canceller: Canceller,
        takeover: Takeover,
        answer_checker: AnswerChecker,
    ) -> None:
        self.client = client
        self.admission = admission
        self.subscriptions = subscriptions
        self.canceller = canceller
        self.takeover = takeover
        self.answer_checker = answer_checker

    async def submit(
        self, caller: Caller, record: ResponseRecord, requests: list[GenerateRequest], stored: bytes = b""
    ) -> Generation:
        """Admit the requests as the caller's and hand them over, with the record, all or nothing.

        Raises Rejected (429), Invalid for what his limits never allow, Recoverable if Redis can't
        serve.
        """
        if record.checks:
            self.answer_checker.helpers.begin_to_start()
        record, requests = joined_to_trace(replace(record, tenant_id=caller.tenant.tenant_id), requests)
        # before Redis has them: the first events may come at once
        subscription = self._subscribe(record, [0] * len(requests), 0)
        try:
            await self._admit(caller, record, requests, stored)
        except BaseException:
            self.subscriptions.unsubscribe(subscription)
            raise
        subscription.is_submitted = True
        generation = Generation(self, record, [0] * len(requests), subscription)
        generation.max_tokens = [request.params.max_tokens for request in requests]
        return generation

    async def submit_unread(
        self, caller: Caller, record: ResponseRecord, requests: list[GenerateRequest], stored: bytes
    ) -> None:
        """Submit a response that runs whether or not a client reads it. Raises as `submit`."""
        await self._admit(caller, *joined_to_trace(record, requests), stored)

    async def _admit(
        self, caller: Caller, record: ResponseRecord, requests: list[GenerateRequest], stored: bytes
    ) -> None:
        """Raises as `submit`. Cancels the requests if it is not known whether Redis took them."""
        try:
            with admission_span(len(requests)):
                await admit(self.admission, caller, record, requests, stored)
        except (Rejected, Invalid):
            raise
        except BaseException:
            self.canceller.cancel(record.response_id, record.request_ids, 0)
            raise

    def _subscribe(self, record: ResponseRecord, positions: list[int], generation: int) -> Subscription:
        """Subscribe to the events after these positions. A parsed answer is read from its start:
        what a token means depends on those before it."""
        begin = [0] * len(positions) if record.parsing is not None else positions
        return self.subscriptions.subscribe(
            record.response_id, dict(zip(record.request_ids, begin, strict=True)), generation, record.served_model
        )

    async def resume(
        self, tenant: Tenant, response_id: str, last_event_id: str | None, kinds: tuple[str, ...]
    ) -> Generation:
        """Take a response of the tenant's, of one of these kinds, over: from now on its events come
        here.

        Raises Invalid (400, 404), without effect on other readers; Recoverable as above.
        """
        with redis_errors_as_503():
            record = await find_record(self.client, tenant, response_id)
            if record is None:
                raise Invalid(
                    f"no response {shortened(response_id)!r}, or it is too old",
                    param="response_id",
                    code="response_not_found",
                    status=404,
                )
            if record.kind not in kinds:
                raise Invalid(
                    f"the response {response_id!r} is of another API, and can't be resumed here",
                    param="response_id",
                    code="response_of_another_api",
                )
            positions, number = await self.takeover.take(
                response_id, record.served_model, record.request_ids, last_event_id
            )
        subscription = self._subscribe(record, positions, number)
        self.subscriptions.catch_up(subscription)
        return Generation(self, record, positions, subscription)
