"""The work on rows between layers, and searches through rows of logits, in native code; a mixture's in
torch."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.compute.backends.backend import SearchRequest
from services.compute.backends.cpu.library import Addition, DrawArguments, Largest, Masses, NativeContext, pointer
from services.compute.backends.torch.row_math import ExpertMath
from services.compute.backends.torch.row_search import HostSearch, ban
from shared.model.arrays import Array
from shared.model.decision import Draws


class NativeRowMath(ExpertMath):
    """TorchRowMath on rows in bfloat16; a sum is rounded once."""

    def __init__(self, context: NativeContext) -> None:
        self.context = context

    def norm(self, x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
        return self._add(None, x, weight, eps, 1.0, 1.0)

    def add(
        self, x: Tensor, h: Tensor, *, norm: Tensor | None, eps: float, multiplier: float = 1.0, scale: float = 1.0
    ) -> Tensor:
        return self._add(x, h, norm, eps, multiplier, scale)

    def _add(
        self, x: Tensor | None, h: Tensor, norm: Tensor | None, eps: float, multiplier: float, scale: float
    ) -> Tensor:
        out, factors = torch.empty_like(h), (eps, multiplier, scale)
        rows = pointer(x), h.data_ptr(), pointer(norm), *factors, *h.shape, out.data_ptr()
        self.context.add_rows(ctypes.byref(Addition(*rows)))
        return out

    def finish_logits(self, logits: Tensor, *, multiplier: float, cap: float) -> Tensor:
        self.context.finish_logits(logits.data_ptr(), logits.numel(), multiplier, cap)
        return logits


class NativeRowSearch:
    """TorchRowSearch in native code, on a CPU."""

    def __init__(self, context: NativeContext) -> None:
        self.context = context

    def start(self, logits: torch.Tensor, wanted: SearchRequest) -> HostSearch:
        return HostSearch(self, logits, wanted)

    def ban(self, logits: torch.Tensor, rows: Array, masks: Sequence[Array]) -> None:
        """numpy's additions are as fast as memory."""
        ban(logits, rows, masks)

    def find_largest(self, logits: torch.Tensor, k: int) -> tuple[Array, Array]:
        assert logits.is_contiguous()
        num_rows, vocab_size = logits.shape
        values, ids = np.empty((num_rows, k), np.float32), np.empty((num_rows, k), np.int64)
        self.context.find_largest(
            ctypes.byref(Largest(logits.data_ptr(), num_rows, vocab_size, k, values.ctypes.data, ids.ctypes.data))
        )
        return values, ids

    def total_masses(self, logits: torch.Tensor, rows: Array, largest: Array, temperatures: Array) -> Array:
        assert logits.is_contiguous()
        out = np.empty(len(rows))
        pointers = (rows.ctypes.data, largest.ctypes.data, temperatures.ctypes.data, out.ctypes.data)
        self.context.sum_masses(ctypes.byref(Masses(logits.data_ptr(), logits.shape[1], len(rows), *pointers)))
        return out

    def decide(self, draws: Draws) -> Array:
        """One thread is enough: a candidate takes some 20 ns."""
        columns = np.empty(len(draws.num_kept), np.int64)
        logits, token_ids = (
            np.ascontiguousarray(draws.logits, np.float32),
            np.ascontiguousarray(draws.token_ids, np.int32),
        )
        by_row = (draws.num_kept, draws.tail_mass, draws.temperatures, draws.seeds, draws.positions, columns)
        self.context.decide(
            ctypes.byref(
                DrawArguments(
                    logits.ctypes.data, token_ids.ctypes.data, *logits.shape, *(each.ctypes.data for each in by_row)
                )
            )
        )
        return columns
