"""A run of a batch: by one worker, for a minute or until it is done, from where the last one was.

Answered blocks of lines are in files, one part each; submitted lines are in the token logs, under ids
that are a function of batch and line. So a run that is cut off anywhere loses nothing: the next
submits nothing twice, and reads what has been answered meanwhile.
"""

import asyncio
import hashlib
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import orjson
import redis

from services.jobs import input as inputs
from services.jobs import output
from services.jobs.asking import Asked, ask, key_of
from services.jobs.blocks import MAX_OPEN, Block, OpenBlocks
from services.jobs.lease import Lease, LeaseLost
from services.jobs.output import AnsweredLine, answered, not_answered, refused
from services.jobs.reading import end_all, forget, is_known, read_answer
from services.jobs.runtime import JobsRuntime
from services.jobs.spans import BatchSpans, spans_of
from services.requests.errors import NO_REPLICA, RequestFailed
from services.requests.store.admission.admission import admit
from services.requests.store.admission.held import CODE as STORAGE_LIMIT
from services.requests.store.batches.figures import queue_note
from services.requests.store.batches.lines import BatchLine
from services.requests.store.batches.store import RUNNING, Batch, Totals, read_batch
from services.requests.store.client import persist
from services.requests.store.files.store import FileRecord
from services.requests.store.tenants.limits import Caller
from shared.model.sampling_params import SEEDS
from shared.process.errors import Invalid, Lost, Recoverable, Rejected
from shared.process.telemetry import get_logger
from shared.wire.line import without_command
from shared.wire.messages import RequestError
from shared.wire.script import load_script
from shared.wire.streams import batch_key, upkeep_key

log = get_logger("penstock.jobs")

SLICE_S = 60.0  # then other batches have their turn
WATCH_EVERY_S = 1.0
MAX_ATTEMPTS = 5  # at a line whose log Redis loses
MAX_BEGUN = 10  # runs in a row that end with a dead worker or a bug, and have answered nothing
AGAIN_S = 1.0  # after the server was full, or a stage missing
CLOSED = {
    "batch_cancelled": ("cancelled", "This request was not executed: the batch was cancelled."),
    "batch_expired": ("expired", "This request could not be executed before the completion window expired."),
}
GONE = [{"code": "file_not_found", "line": None, "message": "the input file is gone", "param": "input_file_id"}]
LOST = RequestError("Redis has lost this request again and again", code="request_lost")

NOTE_BEGUN = load_script("note_begun")


class BatchRun:
    def __init__(self, runtime: JobsRuntime, batch_id: str) -> None:
        self.runtime = runtime
        self.batch_id = batch_id
        self.lease = Lease(runtime.client, batch_id, f"{runtime.stage.replica_id}/{runtime.unique_id()}")
        self.clock = runtime.clock
        self.began_at = self.clock.monotonic()
        self.ends_at = self.began_at + SLICE_S
        self.closing = ""  # why no more lines are executed: of CLOSED
        self.is_answering = False  # else it looks at files, and is best left to finish
        self.done = Totals()  # of the parts
        self.found = 0  # lines that were answered when this run began
        # answered lines in the batch's record, including those that this run has yet to read again
        self.num_reported = 0
        self.blocks = OpenBlocks(runtime.storage, batch_id, runtime.unique_id)
        self.in_flight: dict[str, Asked] = {}  # by response
        self.spans: BatchSpans | None = None

    async def run(self) -> bool:
        """Returns whether there is more to do, for another run."""
        if not await persist(self.lease.take):
            return False
        self.runtime.num_running += 1
        started_at, is_over = self.clock.wall(), False
        working, watching = asyncio.create_task(self._work()), asyncio.create_task(self._watch())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            has_more = working.result() if working.done() else watching.result()
            if not (is_over := not has_more):
                await self._begun(0)
            return has_more
        except (redis.RedisError, OSError, Recoverable):
            await self._begun(0)  # Redis or the disk: no fault of the batch
            raise
        except LeaseLost as lost:
            log.warning(str(lost), batch_id=self.batch_id)
            return False
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)
            self.runtime.num_running -= 1
            self._tell(started_at, is_over=is_over)
            await persist(self.lease.give_up)

    def _tell(self, started_at: float, *, is_over: bool) -> None:
        """Log what this run has done, and trace it."""
        totals = self._totals()
        if self.spans is not None:
            self.spans.run(started_at, totals.completed, totals.num_lines - totals.completed, is_over=is_over)
        if self.is_answering:
            answered = max(0, totals.num_lines - self.found)
            rate = round(answered / max(self.clock.monotonic() - self.began_at, 1e-3), 2)
            log.info(
                "batch goes on",
                batch_id=self.batch_id,
                num_completed=totals.completed,
                num_failed=totals.num_lines - totals.completed,
                lines_per_s=rate,
            )

    def _totals(self) -> Totals:
        """Totals of the parts, and of the blocks that are being answered."""
        return self.done + self.blocks.totals

    async def _watch(self) -> bool:
        """Renew the lease, note the batch's progress, and check whether it is to end. Returns True when
        this run is over. Raises LeaseLost."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if not await persist(self.lease.renew):
                if not await persist(self.lease.is_free):
                    raise LeaseLost("another worker has taken the batch")
                log.warning(
                    "the lease expired and no other worker has taken the batch: another run goes on",
                    batch_id=self.batch_id,
                )
                return True  # the state of this run may be old
            if (batch := await self._load()) is None:
                raise LeaseLost("the batch is gone from Redis")
            self._note(batch)
            if self.runtime.stopping.is_set() or (self.is_answering and self.clock.monotonic() > self.ends_at):
                return True
            if self.closing:
                await end_all(self.runtime.client, list(self.in_flight.values()))

    async def _begun(self, num_begun: int) -> None:
        """Note how many runs in a row have answered nothing."""
        await persist(lambda: NOTE_BEGUN.run(self.runtime.client, [batch_key(self.batch_id)], num_begun))

    async def _load(self) -> Batch | None:
        """Note the counts so far, and return the batch. Closes the slots while Redis is full."""

        async def ask_redis() -> Any:
            async with self.runtime.client.pipeline(transaction=False) as pipe:
                totals = self._totals()
                if self.is_answering and totals.num_lines > self.num_reported:
                    queue_note(pipe, self.batch_id, asdict(totals))
                    NOTE_BEGUN.call(pipe, [batch_key(self.batch_id)], 1)
                pipe.exists(upkeep_key("full"))
                pipe.hgetall(batch_key(self.batch_id))
                return await pipe.execute()

        *_, is_full, values = await persist(ask_redis)
        self.runtime.slots.pause(bool(is_full))
        batch = read_batch(self.batch_id, values)
        self.num_reported = batch.totals.num_lines if batch is not None else 0
        return batch

    async def _note_done(self) -> None:
        """Note the counts once more before the end, with the answers of the last second."""
        async with self.runtime.client.pipeline(transaction=False) as pipe:
            queue_note(pipe, self.batch_id, asdict(self.done))
            await pipe.execute()

    def _note(self, batch: Batch) -> None:
        self.closing = batch.closes(self.clock.wall()) or self.closing

    async def _work(self) -> bool:
        """Returns whether there is more to do."""
        batch = await self._load()
        if batch is None:
            return False  # a Redis that is being restored may need the batch's folder
        if not batch.is_running:
            # of one that ended while its worker died
            await asyncio.to_thread(self.runtime.storage.remove, inputs.folder_of(self.batch_id))
            return False
        if batch.num_begun >= MAX_BEGUN:
            await self._fail(
                "worker_died",
                f"{MAX_BEGUN} workers in a row have died or failed at this batch without answering a line of it",
            )
            return False
        await self._begun(batch.num_begun + 1)
        self._note(batch)
        self.found = self.num_reported
        self.spans = spans_of(self.runtime.stage.tracer, batch, self.clock)
        if not batch.total:  # also of one that was cancelled before it began: its lines are answered, too
            started_at = self.clock.wall()
            batch = await self._check(batch)
            self._note(batch)
            await self._begun(1)
            if self.spans is not None:
                self.spans.part("check input", started_at)
        if not batch.is_running:
            return False
        try:
            index = await asyncio.to_thread(inputs.read_index, self.runtime.storage, self.batch_id)
        except FileNotFoundError:
            if not self.closing:
                await self._fail("files_lost", "what the batch had to work with is gone from the storage")
                return False
            index = [0]  # it never began
        parts = await asyncio.to_thread(output.find_parts, self.runtime.storage, self.batch_id)
        # by a run that was cut off
        await asyncio.to_thread(self.runtime.storage.remove, output.spool_folder(self.batch_id))
        self.done = sum((output.totals_of(name) for name in parts.values()), Totals())
        missing = [number for number in range(len(index) - 1) if number not in parts]
        self.is_answering = bool(missing)
        await self._answer_all(batch, index, missing)
        self.is_answering = False
        started_at = self.clock.wall()
        has_more = await self._finish(batch, len(index) - 1)
        if self.spans is not None:
            self.spans.part("write output", started_at)
        return has_more

    async def _check(self, batch: Batch) -> Batch:
        """Check the input, and begin or fail the batch."""
        record, longest = batch.record, self.runtime.settings.max_body_bytes
        async with self.runtime.checking:
            try:
                file = await persist(lambda: self.runtime.files.load(record.input_file_id, record.owner))
                checked = await asyncio.to_thread(
                    inputs.check_input, self.runtime.storage, file.path, self.batch_id, record.endpoint, longest
                )
            except (Invalid, FileNotFoundError):
                checked = None
        if checked is None or checked.errors:
            if not self.closing:
                await self._fail_with(GONE if checked is None else checked.errors)
        else:
            await persist(partial(self.runtime.batches.begin, self.batch_id, checked.total, checked.model))
            log.info(
                "batch begins", batch_id=self.batch_id, num_requests=checked.total, model=checked.model or "several"
            )
        return await self._load() or batch

    async def _fail(self, code: str, message: str) -> None:
        await self._fail_with([{"code": code, "line": None, "message": message, "param": None}])

    async def _fail_with(self, errors: list[dict[str, Any]]) -> None:
        log.info("batch failed", batch_id=self.batch_id, error=errors[0]["message"])
        await persist(lambda: self.runtime.batches.move(self.batch_id, RUNNING, "failed", errors=orjson.dumps(errors)))
        await asyncio.to_thread(self.runtime.storage.remove, inputs.folder_of(self.batch_id))

    async def _answer_all(self, batch: Batch, index: list[int], missing: list[int]) -> None:
        """Answer the blocks that are missing, line by line, as the worker's slots in the pipeline allow. Raises
        what the first line does that can't go on."""
        try:
            await self._answer_each(batch, index, missing)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _answer_each(self, batch: Batch, index: list[int], missing: list[int]) -> None:
        async with asyncio.TaskGroup() as group:
            for turn, number in enumerate(missing):
                await self.blocks.room.acquire()
                lines = await asyncio.to_thread(
                    inputs.read_block,
                    self.runtime.storage,
                    self.batch_id,
                    batch.record.endpoint,
                    *index[number : number + 2],
                )
                block = self.blocks.open(number, len(lines))
                for place, line in enumerate(lines):
                    begun = await self._begin(batch, line, may_be_left=turn < MAX_OPEN)
                    if isinstance(begun, AnsweredLine):
                        await self._settle(block, place, begun)
                        continue
                    await self._enter(batch, begun)
                    task = group.create_task(self._answer(batch, block, place, line, begun))
                    # also of one that is cancelled before it begins
                    task.add_done_callback(partial(self._leave, len(begun.requests)))

    async def _enter(self, batch: Batch, asked: Asked) -> None:
        """Take the slots and submit: one line at a time, and again while the server is full, or the
        tenant's limits are reached. A batch that waits holds no slots that others could use."""
        started_at, is_admitted = 0.0, False
        while not is_admitted:
            await self.runtime.slots.acquire(len(asked.requests))
            started_at = started_at or self.clock.wall()
            try:
                is_admitted = await self._submit(batch, asked, started_at)
            finally:
                if not is_admitted:
                    self.runtime.slots.release(len(asked.requests))
            if not is_admitted:
                await asyncio.sleep(AGAIN_S)

    def _leave(self, count: int, _: "asyncio.Task[None]") -> None:
        self.runtime.slots.release(count)

    async def _begin(
        self, batch: Batch, line: BatchLine, attempt: int = 0, *, may_be_left: bool = False
    ) -> Asked | AnsweredLine:
        """The line, ready for the pipeline; or its answer, if it needs none. Waits for missing stages.

        may_be_left: an earlier run may have submitted it. Then it is looked for even in a batch that
        closes: an answer is kept, and a running request is cancelled.
        """
        key = key_of(self.batch_id, line.custom_id)
        own = key_of(self.batch_id, line.custom_id, attempt)
        while not self.closing or may_be_left:
            seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) % SEEDS
            try:
                context = replace(self.runtime.context, caller=Caller(batch.record.tenant))
                asked = await ask(context, batch.record, line, own, seed)
                if self.closing and not await is_known(self.runtime.client, asked):
                    break
                return self.spans.joined(asked, own) if self.spans is not None else asked
            except Invalid as error:
                return self._refused(line, RequestError(str(error), error.status, error.param, error.code))
            except Rejected:
                if self.closing:
                    break
                await asyncio.sleep(AGAIN_S)
            except Exception as error:
                return self._broken(line, error)
        return not_answered(key, line.custom_id, self.closing, CLOSED[self.closing][1])

    async def _answer(self, batch: Batch, block: Block, place: int, line: BatchLine, asked: Asked) -> None:
        """Wait for the line's answer, and settle the line; submit it again if it is lost, or no replica
        came."""
        attempt = num_lost = 0
        while True:
            block.asked.append(asked)
            outcome = await self._outcome(line, asked)
            answer, attempt, num_lost = (
                outcome if isinstance(outcome, AnsweredLine) else None,
                attempt + 1,
                num_lost + (outcome is LOST),
            )
            if self.spans is not None:
                self.spans.line(asked, line.custom_id, answer)
            self.in_flight.pop(asked.record.response_id, None)
            if answer is not None or num_lost == MAX_ATTEMPTS:
                break
            begun = await self._begin(batch, line, attempt)
            if isinstance(begun, AnsweredLine):
                return await self._settle(block, place, begun)
            asked, started_at = begun, self.clock.wall()
            while not await self._submit(batch, asked, started_at):
                await asyncio.sleep(AGAIN_S)
        await self._settle(block, place, answer or self._refused(line, LOST))

    async def _outcome(self, line: BatchLine, asked: Asked) -> AnsweredLine | RequestError:
        """The answer to a request, or why it has to be submitted again."""
        key = key_of(self.batch_id, line.custom_id)
        try:
            await self.runtime.slots.ended(asked.record.served_model, [each.request_id for each in asked.requests])
            body, totals = await read_answer(
                self.runtime.client, asked, self.runtime.reading, self.runtime.answers, self.clock
            )
        except Lost as error:
            log.warning(
                "a request of a batch was lost",
                batch_id=self.batch_id,
                response_id=asked.record.response_id,
                error=error,
            )
            return LOST
        except RequestFailed as failed:
            if failed.error.code == NO_REPLICA:
                return failed.error
            if self.closing and failed.error.code == "cancelled":
                return not_answered(key, line.custom_id, self.closing, CLOSED[self.closing][1])
            return self._refused(line, failed.error)
        except Exception as error:
            return self._broken(line, error)
        return answered(key, line.custom_id, 200, body, totals)

    async def _submit(self, batch: Batch, asked: Asked, started_at: float) -> bool:
        """Hand the requests over, unless that has been done. Returns False if they have to wait."""
        record = asked.record
        self.in_flight[record.response_id] = asked  # before Redis has it: a batch that closes cancels it either way
        try:
            await persist(
                lambda: admit(
                    self.runtime.context.admission, Caller(batch.record.tenant), record, asked.requests, asked.stored
                )
            )
        except Rejected as error:
            if error.code == STORAGE_LIMIT and asked.stored:  # the answer goes to the batch's file in any case
                return await self._submit(batch, replace(asked, stored=b""), started_at)
            return False
        if self.spans is not None:
            self.spans.admitted(asked, started_at)
        return True

    def _refused(self, line: BatchLine, error: RequestError) -> AnsweredLine:
        return refused(key_of(self.batch_id, line.custom_id), line.custom_id, error)

    def _broken(self, line: BatchLine, error: Exception) -> AnsweredLine:
        """The answer for a line at which a bug showed: the others go on."""
        log.exception(
            "unexpected error", batch_id=self.batch_id, custom_id=line.custom_id, error=repr(without_command(error))
        )
        return self._refused(line, RequestError("internal error"))

    async def _settle(self, block: Block, place: int, answer: AnsweredLine) -> None:
        """Note the answer; with the block's last one, keep them."""
        if (kept := await self.blocks.settle(block, place, answer)) is not None:
            self.done += kept
            await forget(self.runtime.client, [asked for asked in block.asked if not asked.stored])

    async def _finish(self, batch: Batch, num_blocks: int) -> bool:
        """Make the output files of the parts, and end the batch. Returns whether there is more to do,
        because parts have vanished."""
        record, batches, storage = batch.record, self.runtime.batches, self.runtime.storage
        if not self.closing:
            status = await persist(lambda: batches.move(self.batch_id, ("in_progress",), "finalizing"))
            self.closing = "batch_cancelled" if status == "cancelling" else ""
        parts = await asyncio.to_thread(output.find_parts, storage, self.batch_id)
        if len(parts) < num_blocks:
            return True
        # what is counted is what is written
        self.done = sum((output.totals_of(name) for name in parts.values()), Totals())
        made: dict[str, str] = {}
        for kind, mark in (("output", output.COMPLETED), ("error", output.FAILED)):
            file_id = f"file-{hashlib.blake2b(f'{self.batch_id}/{kind}'.encode(), digest_size=12).hexdigest()}"
            now, name = int(self.clock.wall()), f"{self.batch_id}_{kind}.jsonl"
            file = FileRecord(file_id, record.owner, name, "batch_output", 0, now, now + record.output_ttl_s)
            num_bytes = await asyncio.to_thread(
                output.assemble, storage, self.batch_id, [parts[number] for number in sorted(parts)], file.path, mark
            )
            if num_bytes:
                await persist(partial(self.runtime.files.enter, replace(file, num_bytes=num_bytes)))
                made[f"{kind}_file_id"] = file_id
        status = CLOSED[self.closing][0] if self.closing else "completed"
        await persist(self._note_done)
        await persist(
            lambda: batches.move(self.batch_id, RUNNING, status, total=self.done.num_lines, **made, **asdict(self.done))
        )
        await asyncio.to_thread(storage.remove, inputs.folder_of(self.batch_id))
        log.info(
            "batch ended",
            batch_id=self.batch_id,
            status=status,
            num_completed=self.done.completed,
            num_failed=self.done.num_lines - self.done.completed,
        )
        return False
