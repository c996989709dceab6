"""Blocks of a batch that are being answered: whatever their answers weigh, little of it is in
memory, and all of it is written, in order.
"""

import asyncio
from pathlib import Path

import pytest

from services.jobs import blocks
from services.jobs.blocks import Block, OpenBlocks
from services.jobs.output import AnsweredLine, find_parts, spool_folder
from services.requests.store.batches.store import Totals
from services.requests.store.files.storage import Storage
from shared.wire.ids import unique_id

NUM_LINES, NUM_BYTES = 10, 1000


def answer(block: int, place: int) -> AnsweredLine:
    return AnsweredLine(f"{block}/{place}:".encode().ljust(NUM_BYTES, b"x"), Totals(completed=1, output_tokens=place))


def in_memory(*opened: Block) -> int:
    return sum(len(each.line) for block in opened for each in block.held.values())


@pytest.mark.parametrize("at_once", [False, True])
def test_long_answers_are_laid_by_and_written_in_order(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "HELD_BYTES", 3 * NUM_BYTES)
    storage = Storage(str(tmp_path))

    async def answering() -> None:
        opened = OpenBlocks(storage, "batch_a", unique_id)
        first, second = opened.open(0, NUM_LINES), opened.open(1, NUM_LINES)
        places = [(block, place) for place in reversed(range(NUM_LINES)) for block in (first, second)]
        settling = (opened.settle(block, place, answer(block.number, place)) for block, place in places)
        if at_once:
            kept = await asyncio.gather(*settling)
        else:
            kept = []
            for each in settling:
                kept.append(await each)
                assert in_memory(*(block for block in (first, second) if len(block.found) < NUM_LINES)) <= 3 * NUM_BYTES
                assert opened.totals.completed == sum(
                    len(block.found) for block in (first, second) if len(block.found) < NUM_LINES
                )
        assert [each for each in kept if each is not None] == [Totals(completed=NUM_LINES, output_tokens=45)] * 2
        assert opened.totals == Totals()

    asyncio.run(answering())
    for number, name in find_parts(storage, "batch_a").items():
        lines = storage.read(f"batches/batch_a/parts/{name}").splitlines()
        assert lines == [b"+" + answer(number, place).line for place in range(NUM_LINES)]
    if not at_once:
        assert storage.names(spool_folder("batch_a")) == [], "what was laid by goes with its block"
