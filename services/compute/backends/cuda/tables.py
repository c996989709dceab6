"""Block tables that stay on the device: a row a sequence, in which only what is new is written."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
import triton

from services.compute.backends.cuda.buffers import CudaBuffers
from services.compute.backends.cuda.kernels import blocks as kernels

Table = tuple[int, ...]

WRITTEN_AT_ONCE = 1024  # entries of a program


class BlockTables:
    """The block tables of the sequences that ran last, and for steps with `block_lens` how many
    positions of each block are tokens."""

    def __init__(self, buffers: CudaBuffers) -> None:
        self.buffers = buffers
        self._edits = CudaBuffers(buffers.device)  # no recording reads them: they may move
        self._hold(0, 0)

    @property
    def num_rows(self) -> int:
        return self.held.shape[1]

    @property
    def width(self) -> int:
        """Blocks of a row."""
        return self.held.shape[2]

    def reserve(self, num_rows: int, width: int) -> None:
        """Make room for so many sequences of so many blocks."""
        if num_rows > self.num_rows or width > self.width:
            self.buffers.generation += self.num_rows > 0
            self._hold(max(num_rows, self.num_rows), max(width, self.width))

    def update(self, handles: Sequence[int], tables: Sequence[Table], lens: Sequence[Table] | None) -> list[int]:
        """Write what has changed since each sequence's last step. handles: of sequences, each once;
        lens: as AttentionInputs has them. Returns their rows."""
        rows = [self._row(handle) for handle in handles]
        places: list[int] = []
        values: list[int] = []
        for which, given in enumerate((tables, lens) if lens is not None else (tables,)):
            known = self._known[which]
            for row, table in zip(rows, given, strict=True):
                if (before := known[row]) is not table:
                    known[row] = table
                    common = min(len(before), len(table))
                    first, last = common if before[:common] == table[:common] else 0, min(len(table), self.width)
                    begin = (which * self.num_rows + row) * self.width
                    places.extend(range(begin + first, begin + last))
                    values.extend(table[first:last])
        if places:
            edits = self._edits.fill("edits", np.array([*places, *values], np.int32), torch.int32)
            self._edits.upload()
            kernels.write_tables[(triton.cdiv(len(places), WRITTEN_AT_ONCE),)](
                self.held, edits, len(places), BLOCK=WRITTEN_AT_ONCE
            )
        return rows

    def _row(self, handle: int) -> int:
        """The sequence's row, or that of the sequence which ran longest ago. There are as many rows
        as a step has sequences, at least."""
        row = self._rows.get(handle)
        if row is None:
            row = len(self._rows) if len(self._rows) < self.num_rows else self._rows.popitem(last=False)[1]
            self._rows[handle] = row
        self._rows.move_to_end(handle)
        return row

    def _hold(self, num_rows: int, width: int) -> None:
        """Begin again, in more memory."""
        with torch.inference_mode(False):
            self.held = torch.zeros((2, num_rows, width), dtype=torch.int32, device=self.buffers.device)
        self._rows: OrderedDict[int, int] = OrderedDict()  # by handle, the last used last
        self._known: list[list[Table]] = [[()] * num_rows, [()] * num_rows]
