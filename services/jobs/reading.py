"""Reading: the token logs of requests that nobody but the log tells of, once they have ended; and
what becomes of them afterwards."""

import asyncio
from functools import partial
from typing import Any

import redis.asyncio

from services.jobs.asking import Asked, Logs
from services.requests.dialects.responses.stored import DELETED_LOG_TTL_S
from services.requests.errors import GONE
from services.requests.store.client import persist
from services.requests.store.ending import end_response
from services.requests.store.record import ResponseRecord, read_response
from services.requests.text.answers.schema_errors import schema_errors
from services.requests.workers.grammars.answers import AnswerChecker
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.errors import Lost
from shared.wire.messages import TokenEvent
from shared.wire.streams import inflight_key, log_key, response_key
from shared.wire.token_log import parse_log, queue_read

LOOK_AGAIN_S = 1.0
SILENT_S = 30.0  # of a log that has no end, though nothing is in the pipeline; a run counts anew, and takes 60 s


async def read_answer(
    client: "redis.asyncio.Redis",
    asked: Asked,
    turn: asyncio.Semaphore,
    answers: AnswerChecker,
    clock: Clock = SYSTEM_CLOCK,
) -> tuple[Any, Any]:
    """The answer's body, and what it counts, once all logs of the response have their ends. Raises
    RequestFailed; Lost where Redis has lost a log, or a part of one.

    answers: what holds them against what of their schemas could not be enforced.
    """
    length, since = 0, clock.monotonic()
    while True:
        async with turn:
            record, logs = await read_logs(client, asked)
            if all(events[-1].finish_reason is not None for events in logs):
                for events in logs:
                    if (error := events[-1].error) is not None and error.code == GONE.code:
                        raise Lost(error.message)
                return asked.fold(record, logs, [await problems_of(answers, record, events) for events in logs])
            found = sum(map(len, logs))
            del logs
        if found > length:
            length, since = found, clock.monotonic()
        elif clock.monotonic() - since > SILENT_S:
            await persist(lambda: end_response(client, asked.record, GONE))
        await asyncio.sleep(LOOK_AGAIN_S)


async def problems_of(answers: AnswerChecker, record: ResponseRecord, events: list[TokenEvent]) -> list[dict[str, Any]]:
    """Where the answer of a sequence breaks its schema; only one that has come to its own end is looked at."""
    is_whole = bool(record.checks) and events[-1].finish_reason == "stop"
    return await schema_errors(answers, record, "".join(event.text for event in events)) if is_whole else []


async def read_logs(client: "redis.asyncio.Redis", asked: Asked) -> tuple[ResponseRecord, Logs]:
    """Read all logs of the response as they are, and its record as it was submitted. Raises
    Lost."""

    async def ask() -> Any:
        async with client.pipeline(transaction=False) as pipe:
            pipe.get(response_key(asked.record.response_id))
            for each in asked.requests:
                queue_read(pipe, each.request_id)
            return await pipe.execute()

    packed, *entries = await persist(ask)
    logs: Logs = [parse_log(each) for each in entries]
    if not all(logs):
        raise Lost("the token log is gone")
    return read_response(asked.record.response_id, packed) or asked.record, logs


async def is_known(client: "redis.asyncio.Redis", asked: Asked) -> bool:
    """Whether the requests have been handed over: they are in the pipeline, or have logs."""
    request_id = asked.requests[0].request_id

    async def ask() -> Any:
        async with client.pipeline(transaction=False) as pipe:
            pipe.hexists(inflight_key(asked.record.served_model), request_id)
            pipe.exists(log_key(request_id))
            return await pipe.execute()

    return any(await persist(ask))


async def end_all(client: "redis.asyncio.Redis", asked: list[Asked]) -> None:
    """Cancel the requests, wherever they are; what has ended stays as it is."""
    for each in asked:
        await persist(partial(end_response, client, each.record))


async def forget(client: "redis.asyncio.Redis", answered: list[Asked]) -> None:
    """Give the memory of Redis back that answers take which are in the files now."""

    async def ask() -> None:
        async with client.pipeline(transaction=False) as pipe:
            for asked in answered:
                pipe.delete(response_key(asked.record.response_id))
                for each in asked.requests:
                    pipe.expire(log_key(each.request_id), DELETED_LOG_TTL_S)
            await pipe.execute()

    await persist(ask)
