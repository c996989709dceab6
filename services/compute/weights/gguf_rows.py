"""An embedding that stays as the file has it. Dense, it would take two to four times the memory, in
a small model nearly as much as all layers: 525 MB in the shape llama-3.2-1b, whose file in Q4_K_M has
802."""

import mmap
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GgufRows:
    """A matrix in the file's blocks. Those rows that are asked for are dequantized: 0.12 ms for one of
    2,048 in Q6_K, 12 ms for 512."""

    data: mmap.mmap  # of the whole file; the matrix keeps it open
    offset: int  # bytes
    num_rows: int
    row_bytes: int
    kind: GGMLQuantizationType
    dtype: torch.dtype

    def __getitem__(self, ids: Tensor, /) -> Tensor:
        """ids: [T] int64, one at least. Returns [T, columns] in `dtype`."""
        rows = np.frombuffer(self.data, np.uint8, self.num_rows * self.row_bytes, self.offset).reshape(self.num_rows, self.row_bytes)
        return torch.from_numpy(gguf.dequantize(rows[ids.numpy()], self.kind)).to(self.dtype)
