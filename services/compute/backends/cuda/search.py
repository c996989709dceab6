"""Searches through rows of logits: what launches kernels/search.py. Only the candidates come back to the host."""

from typing import Any

import numpy as np
import torch
import triton

from services.compute.backends.cuda.kernels import search as kernels

Array = np.ndarray[Any, Any]

CHUNK = 1024  # logits, or keys, of a program: no more than there are, no less than four times what it keeps
PART, BLOCK = 8192, 1024  # of the vocabulary, whose masses are summed apart; and at a time


class CudaRowSearch:
    """As TorchRowSearch, on the device. What a row gets does not depend on the others."""

    def find_largest(self, logits: torch.Tensor, k: int) -> tuple[Array, Array]:
        """Chunk by chunk, and then among those that were found, until one chunk is left."""
        num_rows, vocab_size = logits.shape
        kept = max(triton.next_power_of_2(k), 2)
        chunk = max(min(CHUNK, triton.next_power_of_2(vocab_size)), 4 * kept)
        num_chunks = triton.cdiv(vocab_size, chunk)
        keys = torch.empty((num_rows, num_chunks * kept), dtype=torch.int64, device=logits.device)
        if num_rows:
            kernels.largest_logits[(num_rows, num_chunks)](logits.contiguous(), keys, vocab_size, num_chunks, CHUNK=chunk, KEPT=kept)
        while num_chunks > 1 and num_rows:
            num_keys, num_chunks = keys.shape[1], triton.cdiv(keys.shape[1], chunk)
            out = torch.empty((num_rows, num_chunks * kept), dtype=torch.int64, device=logits.device)
            kernels.largest_keys[(num_rows, num_chunks)](keys, out, num_keys, num_chunks, CHUNK=chunk, KEPT=kept)
            keys = out
        return unpack_keys(keys[:, :k].cpu().numpy())

    def total_masses(self, logits: torch.Tensor, rows: Array, largest: Array, temperatures: Array) -> Array:
        """In float32 within a part, of which there are as many as the vocabulary is long; their sum in float64."""
        num_parts = triton.cdiv(logits.shape[1], PART)
        given = (torch.from_numpy(np.ascontiguousarray(each)).to(logits.device) for each in (rows, largest, temperatures))
        out = torch.empty((len(rows), num_parts), dtype=torch.float32, device=logits.device)
        if len(rows):
            kernels.sum_masses[(len(rows), num_parts)](logits.contiguous(), *given, out, logits.shape[1], num_parts, PART=PART, BLOCK=BLOCK)
        masses: Array = out.cpu().numpy().astype(np.float64).sum(axis=1)
        return masses


def unpack_keys(keys: Array) -> tuple[Array, Array]:
    """The logits, float32, and token ids, int64, of keys (kernels/search.py) of any shape."""
    order = (keys >> 32).astype(np.int32)
    bits = np.where(order < 0, order ^ np.int32(0x7FFFFFFF), order)
    return bits.view(np.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF)
