"""JobsRuntime: the objects that all batches of a worker share. An event loop in a thread of its own,
the way into the pipeline, the files, the slots; and Deaths, which counts workers that died.

Celery's tasks are calls from its threads into this loop: they wait there, the work is done here.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import redis
import redis.asyncio

from services.jobs.broker import careful
from services.jobs.slots import SequenceSlots
from services.requests.dialects.responses.conversation import ConversationContext
from services.requests.dialects.responses.stored import Store
from services.requests.store.admission.admission import Admission
from services.requests.store.admission.known import KnownReplicas
from services.requests.store.batches.store import BatchStore
from services.requests.store.cells import cells_of
from services.requests.store.client import connect
from services.requests.store.files.storage import Storage
from services.requests.store.files.store import FileStore
from services.requests.store.tenants.shared_limits import SharedLimits
from services.requests.workers.grammars.answers import AnswerChecker
from services.requests.workers.grammars.checker import GrammarChecker
from services.requests.workers.images.fetch import ImageFetcher
from services.requests.workers.images.reader import ImageReader
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.settings import JobsSettings
from shared.process.telemetry import get_logger
from shared.wire.ids import unique_id
from shared.wire.job_queue import make_queue, send_batch
from shared.wire.line import DENIED, reason_of, without_command
from shared.wire.load import Load
from shared.wire.registry import look
from shared.wire.stage import Stage
from shared.wire.streams import upkeep_key
from shared.wire.transport import Transport

log = get_logger("penstock.jobs")

T = TypeVar("T")
BEAT_S = 0.5
DEATHS_WINDOW_S = 600.0
MAX_COUNTED = 1000  # workers
WORKERS_KEY = upkeep_key("workers")  # a sorted set of workers by when they began
MAX_READING = 4  # answers at once: the tokens that one is made of take many times its memory


class Deaths:
    """Counts workers that began lately and neither live nor have left in good order: so a worker that
    dies again and again is seen from outside."""

    def __init__(self, transport: Transport, replica_id: str, clock: Clock, worker_id: str) -> None:
        """worker_id: of this process; a replica that is started again has another."""
        self.transport = transport
        self.replica_id = replica_id
        self.clock = clock
        self._member = f"{replica_id}/{worker_id}"
        self._num_dead = 0
        self._began_at = clock.monotonic()

    @property
    def num_recent(self) -> int:
        """The number of deaths in the time before this worker began."""
        return self._num_dead if self.clock.monotonic() - self._began_at < DEATHS_WINDOW_S else 0

    def enter(self) -> None:
        """Note that this worker begins."""
        with suppress(redis.RedisError, OSError):  # a figure for operators must not end a worker
            self._num_dead = self._enter()

    def leave(self) -> None:
        """Note that this worker ends in good order."""
        with suppress(redis.RedisError, OSError):
            self.transport.client.zrem(WORKERS_KEY, self._member)

    def _enter(self) -> int:
        """Returns how many have died."""
        live, now = look(self.transport.client).ids("jobs") - {self.replica_id}, self.clock.wall()
        with self.transport.client.pipeline(transaction=False) as pipe:
            pipe.zadd(WORKERS_KEY, {self._member: now})
            pipe.zremrangebyscore(WORKERS_KEY, "-inf", now - DEATHS_WINDOW_S)
            pipe.expire(WORKERS_KEY, int(DEATHS_WINDOW_S))
            pipe.zrange(WORKERS_KEY, -MAX_COUNTED, -1)
            *_, members = pipe.execute()
        holders = [
            member.decode(errors="replace").rpartition("/")[0] for member in members if member != self._member.encode()
        ]
        return sum(holder not in live for holder in holders)


class JobsRuntime:
    """Made and used in its own loop, apart from `call` and `stop`."""

    def __init__(
        self,
        settings: JobsSettings,
        stage: Stage,
        client: "redis.asyncio.Redis",
        clock: Clock = SYSTEM_CLOCK,
        unique_id: Callable[[], str] = unique_id,
    ) -> None:
        """client: closed with the runtime."""
        self.settings = settings
        self.stage = stage
        self.client = client
        self.clock = clock
        self.unique_id = unique_id
        self.storage = Storage(settings.files_url)
        self.files = FileStore(self.client, self.storage)
        self.batches = BatchStore(self.client)
        self.grammars = GrammarChecker()
        self.images = ImageReader(self.files, ImageFetcher(settings.image_host), settings.max_held_size)
        self.answers = AnswerChecker()
        self.known = KnownReplicas(stage, self.client) if settings.wait_for_replicas_s else None
        others = {
            cell.mark: connect(settings.model_copy(update={"redis_url": cell.redis_url}))
            for cell in cells_of(settings)[1:]
        }
        self.limits = SharedLimits(self.client, others) if others else None
        admission = Admission(stage, self.client, settings, known=self.known, shared=self.limits)
        self.context = ConversationContext(
            settings=settings,
            stage=stage,
            client=self.client,
            home=self.client,
            grammars=self.grammars,
            images=self.images,
            admission=admission,
            store=Store(self.client, self.client, 1.0),
        )
        self.slots = SequenceSlots(
            self.client, settings.batch_requests, settings.busy_batch_requests, self._num_of_other_workers, clock
        )
        self.queue = make_queue(settings.redis_url, careful(stage.transport))
        self.deaths = Deaths(stage.transport, stage.replica_id, clock, unique_id())
        self.stopping = asyncio.Event()
        self.checking = asyncio.Lock()  # of inputs: one at a time, each takes memory
        self.reading = asyncio.Semaphore(MAX_READING)
        # batches that are ended outside Celery's queue
        self.ending: dict[str, asyncio.Task[None]] = {}
        self.num_running = 0  # batches
        self._loop = asyncio.new_event_loop()
        self._running: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly
        self._thread = threading.Thread(target=self._serve, name="runtime", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the work done in the loop; from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def begin(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        """Have work done in the loop that ends when it is cancelled; from another thread."""
        return asyncio.run_coroutine_threadsafe(exit_on_failure(work), self._loop)

    def ask_to_stop(self) -> None:
        """Have every batch left as it is, soon."""
        self._loop.call_soon_threadsafe(self.stopping.set)

    def close(self) -> None:
        """Once no task runs any more."""
        self.call(self.grammars.helpers.stop())
        self.call(self.images.helpers.stop())
        self.call(self.answers.helpers.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.queue.close()

    async def send(self, batch_id: str) -> None:
        """A task for the batch, unless there is one. Raises what `send_batch` does."""
        await asyncio.to_thread(send_batch, self.queue, self.stage.transport.client, batch_id)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        for each in (self.slots.look(), self._beat(), *([self.known.run()] if self.known is not None else [])):
            self._running.add(self._loop.create_task(exit_on_failure(each)))
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        for client in (self.client, *(self.limits.clients.values() if self.limits is not None else ())):
            self._loop.run_until_complete(client.aclose())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _beat(self) -> None:
        while True:
            self.stage.mark_alive()
            self.stage.load = Load(
                batches=self.num_running,
                sequences=self.slots.num_taken,
                max_sequences=self.slots.limit,
                deaths=self.deaths.num_recent,
            )
            await asyncio.sleep(BEAT_S)

    def _num_of_other_workers(self) -> int:
        others = (each for each in self.stage.registry.of("jobs") if each.replica_id != self.stage.replica_id)
        return int(sum(each.load.sequences or 0 for each in others))


async def exit_on_failure(work: Coroutine[Any, Any, None]) -> None:
    """Run the work; if it fails, end the process, so that its supervisor starts another. The worker would
    wait for ever without it."""
    try:
        await work
    except DENIED as error:
        log.error("Redis refuses, ending the process", error=reason_of(error))
        os._exit(1)
    except Exception as error:
        log.exception("a worker can't go on, ending the process", error=repr(without_command(error)))
        os._exit(1)
