"""Celery's way to Redis, made distrustful: a message that is no task of ours becomes a dead letter
before Celery sees it.

Celery's own way ends the worker for some of them, and gives them back as it ends: so every worker
would die of them, one after the other, for ever.
"""

import base64
import binascii
import uuid
from functools import partial
from typing import Any

import orjson
import redis
from kombu.exceptions import OperationalError
from kombu.transport import redis as kombu_redis
from kombu.transport.virtual import Empty

from shared.process.errors import Invalid
from shared.process.telemetry import get_logger
from shared.wire.entries import write_dead_letter
from shared.wire.ids import is_batch_id
from shared.wire.job_queue import RUN_BATCH
from shared.wire.job_transport import JobChannel, JobTransport
from shared.wire.line import reason_of
from shared.wire.streams import JOB_QUEUE, MESSAGE
from shared.wire.transport import Transport

log = get_logger("penstock.jobs")

MAX_BODY = 4096  # ours have about 130 characters
MAX_KEPT = 16 << 10  # bytes of a dead letter
TEMPORARY = (redis.RedisError, OSError, OperationalError, Empty)


def batch_of(message: Any) -> str:
    """The batch that a task of ours names. Raises Invalid for whatever is no such task: others'
    tasks, other encodings, compressed bodies."""
    if (
        not isinstance(message, dict)
        or not isinstance(headers := message.get("headers"), dict)
        or not isinstance(properties := message.get("properties"), dict)
    ):
        raise Invalid("not a message of Celery's")
    if headers.get("task") != RUN_BATCH:
        raise Invalid(f"unknown task {str(headers.get('task'))[:64]!r}")
    if headers.get("compression") is not None:
        raise Invalid("its body is compressed")
    form = (message.get("content-type"), message.get("content-encoding"), properties.get("body_encoding"))
    if form != ("application/json", "utf-8", "base64"):
        raise Invalid("its body is not JSON in base64")
    body = message.get("body")
    if not isinstance(body, str) or len(body) > MAX_BODY:
        raise Invalid(f"its body is not a text of at most {MAX_BODY} characters")
    try:
        arguments = orjson.loads(base64.b64decode(body, validate=True))
    except (binascii.Error, orjson.JSONDecodeError) as error:
        raise Invalid(f"its body does not decode: {error}") from None
    match arguments:
        case [[str(batch_id)], {**named}, _] if not named and is_batch_id(batch_id):
            return batch_id
    raise Invalid(f"its arguments are not one batch: {str(arguments)[:64]!r}")


def task_of(batch_id: str) -> dict[str, Any]:
    """The message that Celery is given in place of the one that came: nothing in it but the batch
    is from outside, its tag is its own, and it asks for no reply, no later time and no
    further tasks."""
    task_id = str(uuid.uuid4())
    body = orjson.dumps([[batch_id], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])
    return {
        "body": base64.b64encode(body).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {
            "lang": "py",
            "task": RUN_BATCH,
            "id": task_id,
            "root_id": task_id,
            "retries": 0,
            "timelimit": [None, None],
        },
        "properties": {
            "correlation_id": task_id,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "jobs"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
        },
    }


def refuse(transport: Transport, raw: bytes, error: Exception) -> None:
    """A dead letter, and a line in the log; where Redis takes no more, the line alone."""
    try:
        with transport.client.pipeline(transaction=False) as pipe:
            write_dead_letter(JOB_QUEUE, {MESSAGE: raw[:MAX_KEPT]}, error, 1, pipe)
            pipe.execute()
    except (redis.RedisError, OSError) as failure:
        log.warning("a dead letter could not be kept", error=reason_of(failure))


class CarefulQoS(kombu_redis.QoS):  # type: ignore[misc]
    """Puts what a worker that died had taken back into the queue, but for what can't be read."""

    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:
        try:
            super().restore_by_tag(tag, client, leftmost)
        except TEMPORARY:
            raise
        except Exception as error:
            with self.channel.conn_or_acquire(client) as own:
                raw = own.hget(self.unacked_key, tag) or b""
            self._remove_from_indices(tag).execute()
            self.channel.connection.refuse(
                raw, Invalid(f"a task that was taken and not acknowledged can't be read: {error!r:.200}")
            )


class CarefulChannel(JobChannel):
    QoS = CarefulQoS

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except TEMPORARY:
            raise
        except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError) as error:
            # as kombu's JSON, with its own types, has it
            self.connection.refuse(
                str(getattr(error, "doc", "")).encode(errors="replace"), Invalid(f"not JSON: {error!r:.200}")
            )
            raise Empty from None

    def _do_restore_message(self, payload: Any, *others: Any, **named: Any) -> None:
        try:
            batch_of(payload)
        except Invalid as error:
            self.connection.refuse(orjson.dumps(payload, default=str), error)
        else:
            super()._do_restore_message(payload, *others, **named)


class CarefulTransport(JobTransport):
    """Delivers tasks of ours only."""

    Channel = CarefulChannel
    refuse: Any = None  # where dead letters go: set by `careful`

    def _deliver(self, message: Any, queue: str) -> None:
        try:
            task = task_of(batch_of(message))
        except Invalid as error:
            self.refuse(orjson.dumps(message, default=str), error)
            return
        super()._deliver(task, queue)


def careful(transport: Transport) -> type[CarefulTransport]:
    """Celery's transport for a worker: it refuses messages that are no task of ours. transport:
    writes the dead letters."""
    return type(CarefulTransport.__name__, (CarefulTransport,), {"refuse": staticmethod(partial(refuse, transport))})
