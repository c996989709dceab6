"""Celery's worker: its task, its beat, and their way into the runtime."""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from typing import Any

import redis
from celery import Celery, signals
from celery.beat import EmbeddedService, ScheduleEntry, Scheduler
from celery.exceptions import CPendingDeprecationWarning
from celery.platforms import EX_OK, SecurityWarning
from celery.schedules import schedule
from celery.worker import state
from kombu.exceptions import OperationalError

from services.jobs.run import BatchRun
from services.jobs.runtime import JobsRuntime
from services.jobs.upkeep import MEMORY_EVERY_S, SWEEP_EVERY_S, TIDY_EVERY_S, check_memory, sweep, tidy
from shared.process.clock import Clock
from shared.process.telemetry import get_logger
from shared.wire.ids import is_batch_id
from shared.wire.job_queue import RUN_BATCH
from shared.wire.line import DENIED, reason_of, without_command
from shared.wire.streams import batch_queued_key
from shared.wire.transport import is_temporary

log = get_logger("penstock.jobs")

CONCURRENCY = 4  # batches that one worker has under way
STOP_TIMEOUT_S = 15.0  # for them to be left in good order: half a second, where Redis replies
UPKEEP: dict[str, tuple[Callable[[JobsRuntime], Awaitable[None]], int]] = {
    "sweep": (sweep, SWEEP_EVERY_S),
    "memory": (check_memory, MEMORY_EVERY_S),
    "tidy": (tidy, TIDY_EVERY_S),
}


def add_tasks(queue: Celery, runtime: JobsRuntime) -> None:
    """Add a worker's tasks, and beat's schedule."""

    def run_batch(batch_id: str) -> None:
        """Run one slice of a batch. Whatever this task leaves undone, another does: by its own
        message, or by the sweep's."""
        try:
            runtime.call(run_slice(runtime, batch_id))
        except (redis.RedisError, OSError, OperationalError) as error:
            if isinstance(error, redis.RedisError) and not is_temporary(error):
                raise without_command(error) from None
            log.warning("a batch is left for later", batch_id=batch_id, error=reason_of(error))

    queue.task(name=RUN_BATCH)(run_batch)
    queue.conf.beat_schedule = {
        name: {"task": name, "schedule": schedule(every_s, nowfun=partial(uptime, runtime.clock), app=queue)}
        for name, (_, every_s) in UPKEEP.items()
    }


def uptime(clock: Clock) -> datetime:
    """Beat's time of day: by that of the wall, the upkeep would rest for an hour when the clock
    goes back an hour."""
    return datetime.fromtimestamp(clock.monotonic(), UTC)


async def run_slice(runtime: JobsRuntime, batch_id: str) -> None:
    if not is_batch_id(batch_id):
        log.error("a task names no batch", batch_id=repr(batch_id)[:128])
        return
    if not await runtime.client.delete(batch_queued_key(batch_id)):
        # one of two for the same batch; or its mark has run out, and the sweep sends another
        return
    if await BatchRun(runtime, batch_id).run():
        await runtime.send(batch_id)


class Beat(Scheduler):  # type: ignore[misc]
    """Celery's, but that the upkeep is done here when it is due. As a message it would wait behind
    all batches that wait for their turn."""

    def __init__(self, runtime: JobsRuntime, **others: Any) -> None:
        self.runtime = runtime
        self._under_way: dict[str, Future[None]] = {}
        super().__init__(**others)

    def apply_async(self, entry: ScheduleEntry, *_: Any, **__: Any) -> None:
        last = self._under_way.get(entry.task)
        if last is None or last.done():
            self._under_way[entry.task] = self.runtime.begin(keep_up(self.runtime, entry.task))


async def keep_up(runtime: JobsRuntime, name: str) -> None:
    """A part of the upkeep. What can't be done now is done the next time. Raises what ends the
    worker: a Redis that refuses it."""
    work, _ = UPKEEP[name]
    try:
        await work(runtime)
    except DENIED:
        raise
    except Exception as error:
        if isinstance(error, OperationalError | OSError) or is_temporary(error):
            log.warning("the upkeep is left for later", part=name, error=reason_of(error))
        else:
            log.exception("unexpected error", part=name, error=repr(without_command(error)))


def work(runtime: JobsRuntime) -> None:
    """Take tasks until SIGTERM; then leave every batch where it is, and return."""
    queue = runtime.queue
    add_tasks(queue, runtime)
    beat = EmbeddedService(queue, thread=True, scheduler_cls=partial(Beat, runtime))

    def stop(*_: Any, **__: Any) -> None:
        runtime.ask_to_stop()
        timer = threading.Timer(STOP_TIMEOUT_S, give_up)
        timer.daemon = True
        timer.start()

    def terminate(*_: Any) -> None:
        """In the place of Celery's own handler, which prints a line on standard output."""
        stop()
        state.should_stop = EX_OK

    # about root, for tasks may be pickles: ours are JSON
    warnings.simplefilter("ignore", SecurityWarning)
    # a traceback each time that Redis is away, which the transport has logged
    logging.getLogger("celery.beat").setLevel(logging.CRITICAL)
    logging.getLogger("celery.worker").addFilter(be_brief)
    logging.getLogger("celery.worker.consumer.consumer").addFilter(is_news)
    signals.setup_logging.connect(ignore, weak=False)  # Celery would set up its own otherwise
    signals.worker_shutting_down.connect(stop, weak=False)
    signals.worker_ready.connect(lambda **_: signal.signal(signal.SIGTERM, terminate), weak=False)
    signals.worker_ready.connect(lambda **_: runtime.stage.join(), weak=False)
    # about tasks that run on while Redis is away, as ours are to; Celery turns it on as it starts
    signals.worker_ready.connect(lambda **_: warnings.simplefilter("ignore", CPendingDeprecationWarning), weak=False)
    worker = queue.Worker(
        pool="threads",
        concurrency=CONCURRENCY,
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    runtime.deaths.enter()
    beat.start()
    try:
        worker.start()
    finally:
        beat.stop()
    if not worker.exitcode:
        runtime.deaths.leave()
    else:
        # Celery gives up where Redis refuses what it reads by: the supervisor starts
        # another
        raise SystemExit(1)


def be_brief(record: logging.LogRecord) -> bool:
    """Drops Celery's tracebacks of a Redis that can't serve: they help no reader."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and is_temporary(error):
        record.msg, record.args, record.exc_info = (
            f"redis can't serve, ending the process: {reason_of(error)}",
            (),
            None,
        )
    return True


def is_news(record: logging.LogRecord) -> bool:
    """Drops what Celery logs about a Redis that is away: the transport has logged it in one line."""
    return not record.getMessage().startswith(("consumer: Connection to broker lost", "consumer: Cannot connect to"))


def give_up() -> None:
    """A Redis that does not reply would keep Celery, and a run that can't give its lease up, for
    ever."""
    log.warning("stopped in the middle of something; its work will be taken up by another")
    os._exit(0)


def ignore(**_: Any) -> None:
    """Do nothing."""
