"""Searches through rows of logits: the k largest, the mass of all, and which token stands at a place of the sorted row.

On a CPU the first two are native code; without it numpy's, whose maxima and sorts use the vector units; on a GPU torch's. What has to be sorted
is sorted without its token ids, many times faster, and a token is then found by its value. Equal logits stand in the order of their ids.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from services.compute.backends.cpu import reduction
from services.compute.backends.cpu.library import load_library
from shared.decision import cumulative_mass

Array = np.ndarray[Any, Any]

CHUNK = 64  # logits that share a maximum in the search for the largest
REACHES = (8.0, 20.0, float("inf"))  # temperatures below the largest: beyond the first lies a token's weight of e^-8


def find_largest(logits: torch.Tensor, k: int) -> tuple[Array, Array]:
    """The k largest of each row, by falling value, ties by rising token id. logits: [R, vocab] float32. Returns values and ids, [R, k].

    One pass takes each chunk's maximum. The k-th largest maximum bounds the k-th largest logit from below, so only the few logits that
    reach it are sorted.
    """
    if logits.device.type == "cpu" and load_library() is not None:
        return reduction.find_largest(logits, k)
    return find_largest_by_library(logits, k)


def find_largest_by_library(logits: torch.Tensor, k: int) -> tuple[Array, Array]:
    """The same by numpy or torch."""
    num_rows, vocab_size = logits.shape
    num_chunks = vocab_size // CHUNK
    is_host = logits.device.type == "cpu"
    if k == 1:
        best = torch.from_numpy(logits.numpy().argmax(axis=1)) if is_host else logits.argmax(dim=-1)  # the first of equal ones
        return logits.gather(1, best[:, None]).cpu().numpy(), best[:, None].cpu().numpy()
    if num_chunks <= k:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        return ordered[:, :k].cpu().numpy(), order[:, :k].cpu().numpy()
    if is_host:
        values, ids = np.empty((num_rows, k), np.float32), np.empty((num_rows, k), np.int64)
        for row in range(num_rows):
            values[row], ids[row] = _largest_of_row(logits[row].numpy(), k, num_chunks)
        return values, ids
    return _largest_on_device(logits, k, num_chunks)


def _largest_of_row(row: Array, k: int, num_chunks: int) -> tuple[Array, Array]:
    """A chunk is every num_chunks-th logit: so all maxima come from elementwise comparisons of long runs."""
    chunked = row[: CHUNK * num_chunks].reshape(CHUNK, num_chunks)
    maxima = chunked.max(axis=0)
    bound = np.partition(maxima, num_chunks - k)[num_chunks - k]
    chunks = np.flatnonzero(maxima >= bound)
    at = np.flatnonzero(chunked[:, chunks] >= bound)
    rest = np.flatnonzero(row[CHUNK * num_chunks :] >= bound) + CHUNK * num_chunks
    ids = np.concatenate((at // len(chunks) * num_chunks + chunks[at % len(chunks)], rest))
    values = row[ids]
    order = np.argsort(-values, kind="stable")[:k]
    return values[order], ids[order]


def _largest_on_device(logits: torch.Tensor, k: int, num_chunks: int) -> tuple[Array, Array]:
    """The same for all rows at once, with the k best chunks of each; ties at the border, which might lie beyond them, are looked for."""
    num_rows, vocab_size = logits.shape
    maxima, chunks = logits[:, : num_chunks * CHUNK].view(num_rows, CHUNK, num_chunks).amax(dim=1).topk(min(k + 1, num_chunks), dim=-1)
    offsets = torch.arange(CHUNK, device=logits.device)[:, None] * num_chunks
    ids = (offsets + chunks[:, None, :k].sort(dim=-1).values).flatten(1)
    if num_chunks * CHUNK < vocab_size:
        rest = torch.arange(num_chunks * CHUNK, vocab_size, device=logits.device)
        ids = torch.cat((ids, rest.expand(num_rows, -1)), dim=1)
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    values, ids = values[:, :k].clone(), ids.gather(1, order[:, :k])
    for row in (maxima[:, -1] >= values[:, k - 1]).nonzero().flatten().tolist():
        tied = (logits[row] >= values[row, -1]).nonzero().flatten()
        best, order = logits[row, tied].sort(descending=True, stable=True)
        values[row], ids[row] = best[:k], tied[order[:k]]
    return values.cpu().numpy(), ids.cpu().numpy()


def total_masses(logits: torch.Tensor, rows: Array, largest: Array, temperatures: Array) -> Array:
    """Of each of some rows [n] of the logits [R, vocab] the sum of exp((logit - largest) / temperature), in float32. Returns [n] float64."""
    if logits.device.type == "cpu" and load_library() is not None:
        return reduction.total_masses(logits, rows, largest, temperatures)
    return total_masses_by_library(logits, rows, largest, temperatures)


def total_masses_by_library(logits: torch.Tensor, rows: Array, largest: Array, temperatures: Array) -> Array:
    """The same by numpy, whose order of summation does not depend on the number of threads, or torch."""
    masses = np.empty(len(rows))
    for at, row in enumerate(rows.tolist()):
        weights = (logits[row] - float(largest[at])).div_(float(temperatures[at])).exp_()
        masses[at] = weights.numpy().sum() if logits.device.type == "cpu" else weights.sum().item()
    return masses


class SortedHead:
    """A row's largest logits in order, those within `reach` temperatures of the largest: `values` falling, and `mass`, what they sum up to."""

    def __init__(self, row: Array, temperature: float, reach: float) -> None:
        self._row = row
        self._rising = np.sort(row[row >= row.max() - np.float32(reach * temperature)])
        self.values = self._rising[::-1]
        self.mass = cumulative_mass(self.values[None, :], np.array([temperature]))[0]

    @property
    def is_whole(self) -> bool:
        return len(self._rising) == len(self._row)

    def token_at(self, place: int) -> int:
        """The id of the token at a place of the order."""
        value = self.values[place]
        num_larger = len(self._rising) - int(np.searchsorted(self._rising, value, side="right"))
        return int(np.flatnonzero(self._row == value)[place - num_larger])


def sort_until(row: torch.Tensor, temperature: float, is_enough: Callable[[SortedHead], bool]) -> SortedHead:
    """As long a head of the row as it takes, or the whole row."""
    numbers = row.cpu().numpy()
    for reach in REACHES:
        head = SortedHead(numbers, temperature, reach)
        if head.is_whole or is_enough(head):
            break
    return head
