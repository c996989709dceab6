"""Upkeep: the periodic tasks of workers, on Celery's beat. Every worker has a beat, so that any may die;
a key in Redis says that a task has just been done, by one of them.

The stages themselves expire logs and records, and remove dead replicas' names, streams and consumers
(docs/understand/protocol.md).
"""

import asyncio
from contextlib import suppress
from typing import Any

import redis

from services.jobs.input import FOLDERS, folder_of
from services.jobs.lease import LEASE_S, RENEW_LEASE
from services.jobs.run import BatchRun
from services.jobs.runtime import JobsRuntime, exit_on_failure
from services.requests.store.batches.figures import Backlog, queue_backlog
from services.requests.store.batches.store import Batch, read_batch
from services.requests.store.files.store import CONTENTS
from shared.process.telemetry import get_logger
from shared.wire.cells import without_cell
from shared.wire.job_queue import QUEUED_S
from shared.wire.line import DENIED, reason_of, without_command
from shared.wire.redis_memory import BATCHES_PAUSE, CROWDED, memory_of
from shared.wire.registry import look
from shared.wire.script import load_script
from shared.wire.streams import (
    BATCHES_RUNNING,
    JOB_QUEUE,
    LOG_TTL_S,
    SERVED,
    batch_key,
    batch_lease_key,
    batch_queued_key,
    log_key,
    prompts,
    requests,
    response_key,
    response_of,
    stored_key,
    upkeep_key,
)
from shared.wire.transport import is_temporary

log = get_logger("penstock.jobs")

SWEEP_EVERY_S, MEMORY_EVERY_S, TIDY_EVERY_S = 5, 10, 600
BEGUN_WITHIN_S = 10  # a worker begins a task so soon after it has taken it
SHORT_LOG_TTL_S = 60  # of an ended log, when memory runs out
SCAN_COUNT, MAX_SCANNED = 1000, 200_000
MAX_ENDING = 4  # batches that one worker ends at once; the next sweep begins others
UNFINISHED_S = 24 * 3600  # after this a partly written file is removed
UNUSED_MS = 24 * 3600 * 1000  # after this the empty streams of a model without replicas are removed
SHORTEN, REMOVE_UNUSED = load_script("shorten"), load_script("remove_unused")


async def claim(runtime: JobsRuntime, name: str, every_s: int) -> bool:
    """Whether this worker is to do this task now. A full Redis can't note which worker does: then every
    worker does it."""
    try:
        # from before Redis' clock went back: it would hold for as long as that was
        if await runtime.client.pttl(upkeep_key(name)) > 1000 * every_s:
            await runtime.client.delete(upkeep_key(name))
        return bool(
            await runtime.client.set(upkeep_key(name), runtime.stage.replica_id, nx=True, ex=max(1, every_s - 1))
        )
    except redis.OutOfMemoryError:
        return True


async def sweep(runtime: JobsRuntime) -> None:
    """Send tasks for the batches that no worker has: theirs has died, or their task was lost. Batches that
    are to end do not wait for their turn. Note how much waits in all."""
    if not await claim(runtime, "sweep", SWEEP_EVERY_S):
        return
    names = await running_batches(runtime)
    async with runtime.client.pipeline(transaction=False) as pipe:
        pipe.llen(JOB_QUEUE)
        for name in names:
            pipe.get(batch_lease_key(name))
            pipe.pttl(batch_lease_key(name))
            pipe.hgetall(batch_key(name))
            pipe.pttl(batch_queued_key(name))
        num_tasks, *replies = await pipe.execute()
    queued = {name: left_ms for name, left_ms in zip(names, replies[3::4], strict=True) if left_ms > 0}
    # no task is lost: batches that wait for long are not sent again
    if len(queued) <= num_tasks:
        await keep_queued(runtime, list(queued))
    elif not num_tasks and (
        lost := [name for name, left_ms in queued.items() if left_ms < 1000 * (QUEUED_S - BEGUN_WITHIN_S)]
    ):
        # a worker took them and died before it began
        await runtime.client.delete(*map(batch_queued_key, lost))
    alive, running = runtime.stage.registry.ids("jobs"), []
    for name, lease, left_ms, values in zip(names, replies[::4], replies[1::4], replies[2::4], strict=True):
        batch = read_batch(name, values)
        holder = (lease or b"").decode().partition("/")[0]
        if batch is None or not batch.is_running:
            await runtime.client.srem(BATCHES_RUNNING, name)
            continue
        running.append(batch)
        # so long: not renewed since Redis' clock went back, when its holder's lease became as long
        if holder not in alive or left_ms > 1000 * LEASE_S:
            await RENEW_LEASE.run(runtime.client, [batch_lease_key(name)], lease or b"", 0)
            if batch.closes(runtime.clock.wall()):
                end_soon(runtime, name)
            else:
                await runtime.send(name)
    async with runtime.client.pipeline(transaction=False) as pipe:
        queue_backlog(pipe, backlog_of(running))
        await pipe.execute()


def end_soon(runtime: JobsRuntime, batch_id: str) -> None:
    """Begin to end a batch that was cancelled or has expired while it waited for its turn, unless this
    worker is at it, or has enough of them.

    Ending computes nothing: in Celery's queue, behind the batches that do, it would take as long as
    they. The batch's task, if there is one, finds nothing to do.
    """
    if len(runtime.ending) < MAX_ENDING and batch_id not in runtime.ending and not runtime.stopping.is_set():
        runtime.ending[batch_id] = asyncio.create_task(exit_on_failure(end(runtime, batch_id)))


async def end(runtime: JobsRuntime, batch_id: str) -> None:
    """A run of the batch; if it fails, the next sweep begins another. Raises what ends the worker: a
    Redis that refuses it."""
    try:
        await BatchRun(runtime, batch_id).run()
    except DENIED:
        raise
    except Exception as error:
        if is_temporary(error):
            log.warning("batch postponed: Redis or storage is not available", batch_id=batch_id, error=reason_of(error))
        else:
            log.exception("unexpected error", batch_id=batch_id, error=repr(without_command(error)))
    finally:
        del runtime.ending[batch_id]


async def keep_queued(runtime: JobsRuntime, names: list[str]) -> None:
    """Note that the tasks of these batches are still in the queue."""
    async with runtime.client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.expire(batch_queued_key(name), QUEUED_S)
        await pipe.execute()


def backlog_of(batches: list[Batch]) -> Backlog | None:
    """The backlog of batches that have not ended; None if there are none."""
    if not batches:
        return None
    waiting = sum(batch.total - batch.totals.num_lines for batch in batches)
    return Backlog(
        waiting, min(batch.record.created_at for batch in batches), min(batch.progressed_at for batch in batches)
    )


async def running_batches(runtime: JobsRuntime) -> list[str]:
    members: Any = await runtime.client.smembers(BATCHES_RUNNING)
    return [name.decode(errors="replace") for name in members]


async def check_memory(runtime: JobsRuntime) -> None:
    """Near Redis' memory limit, drop the logs of ended requests early, with their stored data, and let
    batches add nothing until there is room."""
    if not await claim(runtime, "memory", MEMORY_EVERY_S):
        return
    info: dict[str, Any] = await runtime.client.info("memory")
    memory = memory_of(info)
    if memory.share < CROWDED:
        return
    num_logs = await shorten_logs(runtime)
    log.warning(
        "Redis is nearly full: token logs of ended requests are dropped early",
        used_share=memory.share,
        num_logs=num_logs,
        max_memory=memory.limit,
    )
    if memory.share >= BATCHES_PAUSE:
        with suppress(redis.OutOfMemoryError):  # then batches can add nothing anyway
            await runtime.client.set(upkeep_key("full"), "1", ex=3 * MEMORY_EVERY_S)


async def shorten_logs(runtime: JobsRuntime) -> int:
    """Let the logs of ended requests expire in a minute, among the first MAX_SCANNED keys. Returns their
    number."""
    cursor, num_scanned, num_shortened = 0, 0, 0
    while num_scanned < MAX_SCANNED:
        found: Any = await runtime.client.scan(cursor, match=log_key("*"), count=SCAN_COUNT)
        cursor, keys = found[0], [without_cell(key) for key in found[1]]
        num_scanned += SCAN_COUNT
        async with runtime.client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.ttl(key)
            ttls = await pipe.execute()
            # a running one has a day
            ended = [key for key, ttl in zip(keys, ttls, strict=True) if SHORT_LOG_TTL_S < ttl <= LOG_TTL_S]
            for key in ended:
                pipe.expire(key, SHORT_LOG_TTL_S)
                response_id = response_of(key.decode().removeprefix(log_key("")))
                # of no use without the log; where others of the response run, a day long
                for other in (stored_key(response_id), response_key(response_id)):
                    SHORTEN.call(pipe, [other], SHORT_LOG_TTL_S, LOG_TTL_S)
            await pipe.execute()
        num_shortened += len(ended)
        if cursor == 0:
            break
    return num_shortened


async def tidy(runtime: JobsRuntime) -> None:
    """Remove files that have expired or were never finished, folders of ended batches, and streams of
    models that are not served."""
    if not await claim(runtime, "tidy", TIDY_EVERY_S):
        return
    num_files = await remove_files(runtime)
    num_folders = await remove_folders(runtime)
    num_streams = await remove_streams(runtime)
    if num_files + num_folders + num_streams:
        log.info("tidied up", num_files=num_files, num_folders=num_folders, num_streams=num_streams)


async def remove_files(runtime: JobsRuntime) -> int:
    """Remove the bytes of files that have expired, as their names say, or were not written to their ends.
    Returns their number."""
    names = await asyncio.to_thread(runtime.storage.names, CONTENTS)
    old = [name for name in names if (ends := name.rpartition(".")[2]).isdecimal() and int(ends) < runtime.clock.wall()]
    old += await asyncio.to_thread(runtime.storage.abandoned, CONTENTS, UNFINISHED_S)
    for name in old:
        await asyncio.to_thread(runtime.storage.remove, f"{CONTENTS}/{name}")
    return len(old)


async def remove_folders(runtime: JobsRuntime) -> int:
    """Remove the folders of batches that have ended. The folder of a batch that Redis does not know stays:
    Redis may be about to be restored."""
    names = await asyncio.to_thread(runtime.storage.names, FOLDERS)
    running = await running_batches(runtime)
    ended = [name for name in names if name not in running and (await runtime.client.exists(batch_key(name)))]
    for name in ended:
        await asyncio.to_thread(runtime.storage.remove, folder_of(name))
    return len(ended)


async def remove_streams(runtime: JobsRuntime) -> int:
    """Remove the empty streams of models that no stage has served for a day. Returns their number."""
    sleeping: Any = await runtime.client.smembers(SERVED)
    served = {each.decode(errors="replace").partition(":")[2] for each in sleeping}
    served |= {replica.model or "" for replica in look(runtime.stage.transport.client).replicas}
    num_removed = 0
    for make in (requests, prompts):
        prefix = make("").key
        for key in [
            without_cell(key).decode() async for key in runtime.client.scan_iter(match=f"{prefix}*", count=SCAN_COUNT)
        ]:
            if key.removeprefix(prefix) not in served:
                num_removed += await REMOVE_UNUSED.run(runtime.client, [key], UNUSED_MS)
    return num_removed
