"""Searches through rows of logits in native code."""

import ctypes
from typing import Any

import numpy as np
import torch

from services.compute.backends.cpu.library import Largest, Masses, load_library

Array = np.ndarray[Any, Any]


def find_largest(logits: torch.Tensor, k: int) -> tuple[Array, Array]:
    """The k largest of each row, by falling value, ties by rising token id. logits: [R, vocab] float32. Returns values and ids, [R, k]."""
    library = load_library()
    assert library is not None and logits.is_contiguous()
    num_rows, vocab_size = logits.shape
    values, ids = np.empty((num_rows, k), np.float32), np.empty((num_rows, k), np.int64)
    library.penstock_find_largest(ctypes.byref(Largest(logits.data_ptr(), num_rows, vocab_size, k, values.ctypes.data, ids.ctypes.data)))
    return values, ids


def total_masses(logits: torch.Tensor, rows: Array, largest: Array, temperatures: Array) -> Array:
    """Of each of some rows [n] int64 the sum of exp((logit - largest) / temperature), float32 [n] both. Returns [n] float64."""
    library = load_library()
    assert library is not None and logits.is_contiguous()
    out = np.empty(len(rows))
    pointers = (rows.ctypes.data, largest.ctypes.data, temperatures.ctypes.data, out.ctypes.data)
    library.penstock_sum_masses(ctypes.byref(Masses(logits.data_ptr(), logits.shape[1], len(rows), *pointers)))
    return out
