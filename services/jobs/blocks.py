"""Blocks: lines of a batch that are answered together. Those that are open have answers, in memory
up to a bound and beyond it laid by in the storage."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from services.jobs import output
from services.jobs.asking import Asked
from services.jobs.output import AnsweredLine
from services.requests.store.batches.store import Totals
from services.requests.store.files.storage import Storage

MAX_OPEN = 8
HELD_BYTES = 16 << 20  # of answers of a run that are in memory


@dataclass(slots=True)
class Block:
    """Lines that are answered together."""

    number: int
    answers: list[AnsweredLine | None]
    asked: list[Asked] = field(default_factory=list)  # what went into the pipeline

    @property
    def found(self) -> list[AnsweredLine]:
        return [answer for answer in self.answers if answer is not None]

    @property
    def held(self) -> dict[int, AnsweredLine]:
        """Answers in memory, by place."""
        return {place: answer for place, answer in enumerate(self.answers) if answer is not None and answer.line}


class OpenBlocks:
    """The open blocks of a run."""

    def __init__(self, storage: Storage, batch_id: str, unique_id: Callable[[], str]) -> None:
        self.storage = storage
        self.batch_id = batch_id
        self.unique_id = unique_id
        self.room = asyncio.Semaphore(MAX_OPEN)
        self._blocks: dict[int, Block] = {}
        self._num_bytes: dict[int, int] = {}  # by block, in memory
        self._laying_by = asyncio.Lock()

    @property
    def totals(self) -> Totals:
        return sum((answer.totals for block in self._blocks.values() for answer in block.found), Totals())

    def open(self, number: int, num_lines: int) -> Block:
        """Once there is room."""
        block = self._blocks[number] = Block(number, [None] * num_lines)
        self._num_bytes[number] = 0
        return block

    async def settle(self, block: Block, place: int, answer: AnsweredLine) -> Totals | None:
        """Note an answer. With the block's last one they are kept: returns what they count then.
        Raises OSError."""
        block.answers[place] = answer
        self._num_bytes[block.number] += len(answer.line)
        if len(answers := block.found) < len(block.answers):
            if sum(self._num_bytes.values()) > HELD_BYTES:
                await self._lay_by()
            return None
        totals = await asyncio.to_thread(output.write_part, self.storage, self.batch_id, block.number, answers)
        del self._blocks[block.number], self._num_bytes[block.number]
        self.room.release()
        return totals

    async def _lay_by(self) -> None:
        """Have what is in memory in the storage instead."""
        async with self._laying_by:
            if sum(self._num_bytes.values()) <= HELD_BYTES:
                return  # another has just done it
            for block in list(self._blocks.values()):
                if not (held := block.held) or len(block.found) == len(block.answers):
                    continue
                path = f"{output.spool_folder(self.batch_id)}/{self.unique_id()}"
                spooled = await asyncio.to_thread(output.spool, self.storage, path, list(held.values()))
                for place, answer in zip(held, spooled, strict=True):
                    block.answers[place] = answer
                if block.number in self._num_bytes:
                    self._num_bytes[block.number] -= sum(len(answer.line) for answer in held.values())
