"""Searches through rows of logits: what launches kernels/search.py. Only the candidates come back
to the host, which waits when it reads them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from services.compute.backends.backend import SearchRequest
from services.compute.backends.buffers import to_device, to_device_together
from services.compute.backends.cuda.kernels import search as kernels
from shared.model.arrays import Array
from shared.model.decision import Draws, decide
from shared.model.noise import TOKEN, row_bits

# logits, or keys, of a program: no more than there are, no less than four times what it keeps
CHUNK = 1024
KEPT = (2, 64, 256)  # of a chunk: few numbers, for each is compiled by itself
PART, BLOCK = 8192, 1024  # of the vocabulary, whose masses are summed apart; and at a time


@dataclass(frozen=True, slots=True)
class CudaSearch:
    """A search that the device runs."""

    drawn: Tensor  # [R] int64, on the device
    wanted: SearchRequest
    # on the host, valid after the event `copied`: keys, `drawn` and masses
    copies: list[Tensor]
    copied: torch.cuda.Event | None  # None: without a GPU

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()

    def read(self) -> tuple[Array, Array, Array]:
        self.wait()
        keys, _, masses = (each.numpy() for each in self.copies)
        return *unpack_keys(keys[:, : self.wanted.width]), sum_parts(masses)

    def read_drawn(self) -> Array:
        self.wait()
        drawn: Array = self.copies[1].numpy()
        return drawn


class CudaRowSearch:
    """TorchRowSearch on the device. A row's result does not depend on the others."""

    def ban(self, logits: Tensor, rows: Array, masks: Sequence[Array]) -> None:
        """One kernel launch, one host-to-device copy for the masks."""
        assert logits.is_contiguous()
        words = to_device(np.stack(masks).view(np.int32), logits.device)
        grid = (len(masks), triton.cdiv(logits.shape[1], BLOCK))
        kernels.ban_logits[grid](
            logits, to_device(rows, logits.device), words, logits.shape[1], words.shape[1], BLOCK=BLOCK
        )

    def start(self, logits: Tensor, wanted: SearchRequest) -> CudaSearch:
        """Launch the search, and the draws, which read its results on the device."""
        num_rows = len(wanted.params)
        noise = row_bits(wanted.seeds, wanted.positions, TOKEN).view(np.int64)
        arrays = [wanted.mass_rows, wanted.mass_temperatures, draws_of(wanted), noise]
        rows, temperatures, draws, states = to_device_together(arrays, logits.device)
        keys = largest_keys(logits, wanted.width)
        masses = partial_masses(logits, rows, first_logits(keys[rows]) if len(rows) else temperatures, temperatures)
        drawn = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        if num_rows:
            kernels.draw_tokens[(num_rows,)](
                keys,
                masses,
                draws,
                states,
                drawn,
                logits.shape[1],
                masses.shape[1],
                KEPT=keys.shape[1],
                num_warps=1,
                enable_fp_fusion=False,
            )
        copies = to_host(keys, drawn, masses)
        copied = None
        if logits.device.type == "cuda":
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return CudaSearch(drawn, wanted, copies, copied)

    def find_largest(self, logits: Tensor, k: int) -> tuple[Array, Array]:
        return unpack_keys(largest_keys(logits, k)[:, :k].cpu().numpy())

    def total_masses(self, logits: Tensor, rows: Array, largest: Array, temperatures: Array) -> Array:
        given = (to_device(np.ascontiguousarray(each), logits.device) for each in (rows, largest, temperatures))
        return sum_parts(partial_masses(logits, *given).cpu().numpy())

    def decide(self, draws: Draws) -> Array:
        return decide(draws)


def largest_keys(logits: Tensor, k: int) -> Tensor:
    """The keys of each row's largest logits, [R, one of KEPT, or a power of two beyond] int64,
    falling: chunk by chunk, and then among the keys kept of all chunks, until one chunk is left."""
    num_rows, vocab_size = logits.shape
    kept = next((size for size in KEPT if size >= k), triton.next_power_of_2(k))
    chunk = max(min(CHUNK, triton.next_power_of_2(vocab_size)), 4 * kept)
    num_chunks = triton.cdiv(vocab_size, chunk)
    keys = torch.empty((num_rows, num_chunks * kept), dtype=torch.int64, device=logits.device)
    if num_rows:
        kernels.largest_logits[(num_rows, num_chunks)](
            logits.contiguous(), keys, vocab_size, num_chunks, CHUNK=chunk, KEPT=kept, enable_fp_fusion=True
        )
    while num_chunks > 1:
        num_keys, num_chunks = keys.shape[1], triton.cdiv(keys.shape[1], chunk)
        out = torch.empty((num_rows, num_chunks * kept), dtype=torch.int64, device=logits.device)
        if num_rows:
            kernels.largest_keys[(num_rows, num_chunks)](
                keys, out, num_keys, num_chunks, CHUNK=chunk, KEPT=kept, enable_fp_fusion=True
            )
        keys = out
    return keys


def partial_masses(logits: Tensor, rows: Tensor, largest: Tensor, temperatures: Tensor) -> Tensor:
    """The masses of total_masses: a sum for each PART tokens of the vocabulary. Returns [n, parts] float32."""
    num_parts = triton.cdiv(logits.shape[1], PART)
    out = torch.empty((len(rows), num_parts), dtype=torch.float32, device=logits.device)
    if len(rows):
        kernels.sum_masses[(len(rows), num_parts)](
            logits.contiguous(),
            rows,
            largest,
            temperatures,
            out,
            logits.shape[1],
            num_parts,
            PART=PART,
            BLOCK=BLOCK,
            enable_fp_fusion=True,
        )
    return out


def sum_parts(masses: Array) -> Array:
    """[n, parts] float32 to [n] float64, from the first to the last, as draw_tokens does it."""
    total: Array = np.cumsum(masses, axis=1, dtype=np.float64)[:, -1]
    return total


def draws_of(wanted: SearchRequest) -> Array:
    """The argument of draw_tokens: [R, 6] float64."""
    masses_rows = np.full(len(wanted.params), -1.0)
    masses_rows[wanted.whole] = len(wanted.scored) + np.arange(len(wanted.whole))
    asked = [
        (0.0 if each.is_greedy else each.temperature, each.top_k, each.top_p, each.min_p) for each in wanted.params
    ]
    return np.column_stack([np.array(asked, np.float64), wanted.num_listed, masses_rows])


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Copies on the host, begun as one asynchronous transfer. tensors: those of wider numbers first."""
    there = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
    here = (
        there
        if there.device.type == "cpu"
        else torch.empty(there.shape, dtype=there.dtype, pin_memory=True).copy_(there, non_blocking=True)
    )
    pieces = torch.split(here, [tensor.nbytes for tensor in tensors])
    return [piece.view(each.dtype).view(each.shape) for piece, each in zip(pieces, tensors, strict=True)]


def first_logits(keys: Tensor) -> Tensor:
    """The largest logit of each row of keys [R, kept]: [R] float32."""
    order = (keys[:, 0] >> 32).int()
    return torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32)


def unpack_keys(keys: Array) -> tuple[Array, Array]:
    """The logits, float32, and token ids, int64, of keys (kernels/search.py) of any shape."""
    order = (keys >> 32).astype(np.int32)
    bits = np.where(order < 0, order ^ np.int32(0x7FFFFFFF), order)
    return bits.view(np.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF)
