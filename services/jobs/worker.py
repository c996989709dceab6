"""Celery's worker: its tasks, its beat, and their way into the office."""

import logging
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import redis
from celery import Celery, signals
from celery.beat import EmbeddedService
from celery.platforms import SecurityWarning
from kombu.exceptions import OperationalError

from services.jobs.office import Office
from services.jobs.run import BatchRun
from services.jobs.upkeep import SWEEP_EVERY_S, TIDY_EVERY_S, look_after_memory, sweep, tidy
from shared.job_queue import RUN_BATCH
from shared.line import reason_of
from shared.streams import batch_queued_key
from shared.telemetry import get_logger
from shared.transport import is_temporary

log = get_logger("penstock.jobs")

CONCURRENCY = 4  # batches that one worker has under way; the upkeep has its turn among them
UPKEEP: dict[str, tuple[Callable[[Office], Awaitable[None]], int]] = {
    "penstock.sweep": (sweep, SWEEP_EVERY_S),
    "penstock.tidy": (tidy, TIDY_EVERY_S),
}


def add_tasks(queue: Celery, office: Office) -> None:
    """What a worker does, by the names under which it is asked; and when beat asks."""

    def run_batch(batch_id: str) -> None:
        """One slice of a batch. Whatever this task leaves undone, another does: by its own message, or by the sweep's."""
        try:
            office.call(run_slice(office, batch_id))
        except (redis.RedisError, OSError, OperationalError) as error:
            if isinstance(error, redis.RedisError) and not is_temporary(error):
                raise
            log.warning("a batch is left for later", batch_id=batch_id, error=reason_of(error))

    queue.task(name=RUN_BATCH)(run_batch)
    for name, (work, every_s) in UPKEEP.items():
        queue.task(name=name)(upkeep_task(office, name, work))
        queue.conf.beat_schedule[name] = {"task": name, "schedule": every_s, "options": {"expires": every_s}}


async def run_slice(office: Office, batch_id: str) -> None:
    await office.client.delete(batch_queued_key(batch_id))
    if await BatchRun(office, batch_id).run():
        await office.send(batch_id)


def upkeep_task(office: Office, name: str, work: Callable[[Office], Awaitable[None]]) -> Callable[[], None]:
    async def working() -> None:
        await work(office)

    def task() -> None:
        try:
            office.call(working())
        except (redis.RedisError, OSError, OperationalError) as error:
            if isinstance(error, redis.RedisError) and not is_temporary(error):
                raise
            log.warning("the upkeep is left for later", part=name, error=reason_of(error))

    return task


def work(office: Office) -> None:
    """Take tasks until SIGTERM; then leave every batch where it is, and return."""
    queue = office.queue
    add_tasks(queue, office)
    beat = EmbeddedService(queue, thread=True, scheduler_cls="celery.beat:Scheduler")

    def stop(**_: Any) -> None:
        office.ask_to_stop()

    warnings.simplefilter("ignore", SecurityWarning)  # about root, for tasks may be pickles: ours are JSON
    logging.getLogger("celery.beat").setLevel(logging.CRITICAL)  # a traceback each time that Redis is away, of which the transport has told
    signals.setup_logging.connect(ignore, weak=False)  # Celery would set up its own otherwise
    signals.worker_shutting_down.connect(stop, weak=False)
    signals.worker_ready.connect(lambda **_: office.stage.join(), weak=False)
    worker = queue.Worker(pool="threads", concurrency=CONCURRENCY, quiet=True, without_gossip=True, without_mingle=True, without_heartbeat=True)
    beat.start()
    memory = office.begin(look_after_memory(office))
    try:
        worker.start()
    finally:
        memory.cancel()
        beat.stop()


def ignore(**_: Any) -> None:
    """Nothing to do."""
