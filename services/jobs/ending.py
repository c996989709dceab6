"""Ending: a batch that was cancelled or has expired while it waited for its turn is ended by the
sweep, beside Celery's queue.

It computes nothing: behind the batches that do, it would be `cancelling` for as long as these take.
Its task, should there be one, finds nothing to do.
"""

import asyncio

from services.jobs.run import BatchRun
from services.jobs.runtime import JobsRuntime, exit_on_failure
from shared.process.telemetry import get_logger
from shared.wire.line import DENIED, reason_of, without_command
from shared.wire.transport import is_temporary

log = get_logger("penstock.jobs")

MAX_AT_ONCE = 4  # of one worker; the next sweep begins others


def end_soon(runtime: JobsRuntime, batch_id: str) -> None:
    """Begin to end the batch, unless this worker is at it, or has enough of them."""
    if len(runtime.ending) < MAX_AT_ONCE and batch_id not in runtime.ending and not runtime.stopping.is_set():
        runtime.ending[batch_id] = asyncio.create_task(exit_on_failure(close(runtime, batch_id)))


async def close(runtime: JobsRuntime, batch_id: str) -> None:
    """A run of the batch. What can't be done now, or not in a minute, is done after the next sweep.
    Raises what ends the worker: a Redis that refuses it."""
    try:
        await BatchRun(runtime, batch_id).run()
    except DENIED:
        raise
    except Exception as error:
        if is_temporary(error):
            log.warning("a batch is left for later", batch_id=batch_id, error=reason_of(error))
        else:
            log.exception("unexpected error", batch_id=batch_id, error=repr(without_command(error)))
    finally:
        del runtime.ending[batch_id]
