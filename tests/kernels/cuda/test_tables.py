"""Block tables on the device: after each step they are those of its sequences, and only what is new
was written. The slots that are found from them.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.backends.cuda.buffers import CudaBuffers
from services.compute.backends.cuda.kernels import blocks as kernels
from services.compute.backends.cuda.tables import BlockTables
from tests.examples import examples
from tests.kernels.backends import CPU

ROWS, WIDTH, BLOCK_SIZE = 4, 8, 16


class Writes:
    """In place of the kernel's launch: the same, and how much it wrote."""

    def __init__(self) -> None:
        self.num_written = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def write(held: torch.Tensor, edits: torch.Tensor, count: int, *, BLOCK: int) -> None:
            places = edits[:count].long()
            assert grid == (-(-count // BLOCK),) and len(set(places.tolist())) == count
            self.num_written += count
            held.view(-1)[places] = edits[count:]

        return write


@examples(80)
@given(data=st.data())
def test_a_steps_rows_hold_its_tables(data: Any) -> None:
    """Tables grow, lose their ends, get other blocks; sequences come, go, and come again; more of
    them live than there are rows.
    """
    with pytest.MonkeyPatch.context() as patch:
        writes = Writes()
        patch.setattr(kernels, "write_tables", writes)
        tables = BlockTables(CudaBuffers(CPU))
        tables.reserve(ROWS, WIDTH)
        known: dict[int, tuple[int, ...]] = {}
        blocks = st.lists(st.integers(0, 9), max_size=3)
        for _ in range(data.draw(st.integers(1, 12))):
            handles = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=ROWS, unique=True))
            for handle in handles:
                kept = known.get(handle, ())[: data.draw(st.sampled_from([WIDTH, WIDTH, WIDTH, 2, 0]))]
                known[handle] = (*kept, *data.draw(blocks))[:WIDTH]
            given = [known[handle] for handle in handles]
            has_lens = data.draw(st.booleans())
            rows = tables.update(
                handles, given, [tuple(16 - each for each in table) for table in given] if has_lens else None
            )
            assert len(set(rows)) == len(rows)
            for row, table in zip(rows, given, strict=True):
                assert tuple(tables.held[0, row, : len(table)].tolist()) == table
                assert not has_lens or tables.held[1, row, : len(table)].tolist() == [16 - each for each in table]
            before = writes.num_written
            tables.update(handles, given, None)
            assert writes.num_written == before, "nothing is new"
            known.update(
                {handle: (*table, 1) for handle, table in zip(handles, given, strict=True) if len(table) < WIDTH}
            )
            tables.update(handles, [known[handle] for handle in handles], None)
            assert writes.num_written - before == sum(len(table) < WIDTH for table in given), "one block each"


def test_slots_are_found_in_chunks_and_for_single_tokens() -> None:
    buffers = CudaBuffers(CPU)
    tables = BlockTables(buffers)
    tables.reserve(3, 40)
    given = [(7, 3, 9), tuple(range(100, 140)), (5,)]
    spans = [(40, 41), (37, 620), (0, 1)]  # of tokens in each
    generation, origin, contexts, expected = buffers.generation, 0, [], []
    for row, table, (first, last) in zip(tables.update([4, 8, 2], given, None), given, spans, strict=True):
        contexts.append([last, origin - first, row, first])
        expected += [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in range(first, last)]
        origin += last - first
    slots = torch.zeros(origin, dtype=torch.int64)
    kernels.find_slots[(3,)](
        torch.tensor(contexts, dtype=torch.int32), tables.held, slots, tables.width, BLOCK_SIZE=BLOCK_SIZE, BLOCK=256
    )
    assert slots.tolist() == expected and buffers.generation == generation
    tables.reserve(3, 41)
    assert buffers.generation == generation + 1, "recordings read where it was"
    assert (
        tables.held.sum() == 0
        and tables.update([4], given[:1], None) == [0]
        and tables.held[0, 0, :3].tolist() == [7, 3, 9]
    )
