"""Answers in the events of other APIs than OpenAI's. Their requests are chats inside, so there is
one way through the pipeline.

The events are a pure function of the token log: every reader of the same log makes the same events.
"""

from collections.abc import AsyncIterator

from fastapi import Request, Response

from services.gateway.answering.responder import EventStream, Responder
from services.gateway.generation.generation import Generation
from services.gateway.telemetry.measured import ResponseMeter
from services.requests.dialects.openai.translate import in_own_terms
from services.requests.errors import RequestFailed, check
from services.requests.text.answers.schema_errors import while_checked
from services.requests.text.answers.translate import Fold, Json, Translation
from shared.wire.messages import TokenEvent


class TranslatedResponder(Responder):
    """A generation's events as another API's."""

    def __init__(
        self, generation: Generation, measured: ResponseMeter, ping_interval_s: float, translation: Translation
    ) -> None:
        super().__init__(generation, measured, ping_interval_s)
        self.translation = translation
        self.media_type = translation.media_type
        self.fold = Fold(generation.record, translation)
        self.choices = [self.fold.choice]

    async def stream(self) -> Response:
        try:
            return await super().stream()
        except RequestFailed as failed:
            raise RequestFailed(in_own_terms(failed.error, self.translation.names)) from None

    async def whole(self, request: Request) -> Response:
        try:
            return await super().whole(request)
        except RequestFailed as failed:
            raise RequestFailed(in_own_terms(failed.error, self.translation.names)) from None

    async def stream_resumed(self) -> Response:
        """The stream from its beginning, also of what has failed."""
        return EventStream(self._chunks([]), self.close, self.media_type)

    def _body(self) -> Json:
        return self.translation.whole()

    async def _collect(self) -> None:
        while not self._is_over:
            batch = await self._next()
            await self._check_ends(batch)
            for _, event in batch:
                check(event)
                self.fold.add(event)

    async def _chunks(self, batch: list[tuple[int, TokenEvent]]) -> AsyncIterator[bytes]:
        yield self.fold.encode(self.translation.opening(batch[0][1] if batch else None))
        while True:
            if self.generation.record.checks:
                async for _ in while_checked(self._check_ends(batch), self.ping_interval_s):
                    yield self._ping(self.translation.ping)
            encoded = b"".join(self.fold.encode(self.fold.add(event)) for _, event in batch)
            yield encoded if batch else self._ping(self.translation.ping)
            if self._is_over:
                return
            try:
                batch = await self._next()
            except RequestFailed as failed:
                yield self.fold.encode(self.translation.interrupted(failed.error))
                return
