"""Searches through rows of logits without native code: numpy's on a CPU, whose maxima and sorts use
the vector units; on a GPU torch's."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.compute.backends.backend import RowSearch, SearchRequest
from services.compute.backends.buffers import to_device
from shared.model.arrays import Array
from shared.model.decision import Draws, decide

CHUNK = 64  # logits that share a maximum in the search for the largest
_IS_SET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(bool)
# [256, 8]: what a byte of a mask adds to its eight logits. Adding -0 changes no bit
TERMS = np.where(_IS_SET, np.float32(-0.0), np.float32(-np.inf))


@dataclass(frozen=True, slots=True)
class HostSearch:
    """A search that the host computes: all is done when it is read. Rows of one candidate apart
    from those with lists, whose search takes longer."""

    search: RowSearch
    logits: torch.Tensor
    wanted: SearchRequest
    drawn: None = None

    def wait(self) -> None:
        pass

    def read_drawn(self) -> None:
        pass

    def read(self) -> tuple[Array, Array, Array]:
        logits, num_listed = self.logits, self.wanted.num_listed
        num_rows, width = len(num_listed), self.wanted.width
        values, token_ids = np.full((num_rows, width), -np.inf, np.float32), np.zeros((num_rows, width), np.int64)
        for is_single in (True, False):
            rows = np.flatnonzero((num_listed == 1) == is_single)
            if len(rows):
                k = int(num_listed[rows].max())
                some = logits if len(rows) == num_rows else logits[to_device(rows, logits.device)]
                values[rows, :k], token_ids[rows, :k] = self.search.find_largest(some, k)
        rows = self.wanted.mass_rows
        temperatures = self.wanted.mass_temperatures
        masses = self.search.total_masses(logits, rows, values[rows, 0], temperatures) if len(rows) else np.zeros(0)
        return values, token_ids, masses


class TorchRowSearch:
    def ban(self, logits: torch.Tensor, rows: Array, masks: Sequence[Array]) -> None:
        ban(logits, rows, masks)

    def start(self, logits: torch.Tensor, wanted: SearchRequest) -> HostSearch:
        return HostSearch(self, logits, wanted)

    def find_largest(self, logits: torch.Tensor, k: int) -> tuple[Array, Array]:
        """One pass takes each chunk's maximum. The k-th largest maximum bounds the k-th largest
        logit from below, so only the few logits that reach it are sorted. A maximum of NaN is NaN,
        and numpy and torch take it for the largest."""
        num_rows, vocab_size = logits.shape
        num_chunks = vocab_size // CHUNK
        is_host = logits.device.type == "cpu"
        if k == 1:
            # the first of equal ones
            best = torch.from_numpy(logits.numpy().argmax(axis=1)) if is_host else logits.argmax(dim=-1)
            return logits.gather(1, best[:, None]).cpu().numpy(), best[:, None].cpu().numpy()
        if num_chunks <= k:
            ordered, order = logits.sort(dim=-1, descending=True, stable=True)
            return ordered[:, :k].cpu().numpy(), order[:, :k].cpu().numpy()
        if is_host:
            values, ids = np.empty((num_rows, k), np.float32), np.empty((num_rows, k), np.int64)
            for row in range(num_rows):
                values[row], ids[row] = _largest_of_row(logits[row].numpy(), k, num_chunks)
            return values, ids
        return largest_on_device(logits, k, num_chunks)

    def decide(self, draws: Draws) -> Array:
        return decide(draws)

    def total_masses(self, logits: torch.Tensor, rows: Array, largest: Array, temperatures: Array) -> Array:
        """Sum in float32. The order of numpy's summation does not depend on the number of
        threads."""
        masses = np.empty(len(rows))
        for at, row in enumerate(rows.tolist()):
            weights = (logits[row] - float(largest[at])).div_(float(temperatures[at])).exp_()
            masses[at] = weights.numpy().sum() if logits.device.type == "cpu" else weights.sum().item()
        return masses


def ban(logits: torch.Tensor, rows: Array, masks: Sequence[Array]) -> None:
    """RowSearch.ban, row by row."""
    for row, mask in zip(rows.tolist(), masks, strict=True):
        if logits.device.type == "cpu":
            numbers = logits[row].numpy()
            numbers += TERMS.take(mask, axis=0).ravel()[: len(numbers)]
        else:
            ban_on_device(logits[row], mask)


def ban_on_device(row: torch.Tensor, mask: Array) -> None:
    """The same for a row that is not the host's: the mask's bits cross, not its terms."""
    terms = to_device(TERMS, row.device)
    row += terms[to_device(mask, row.device).long()].view(-1)[: len(row)]


def _largest_of_row(row: Array, k: int, num_chunks: int) -> tuple[Array, Array]:
    """A chunk is every num_chunks-th logit: so all maxima come from elementwise comparisons of long
    runs. A row with NaN has nothing else to say."""
    chunked, rest = row[: CHUNK * num_chunks].reshape(CHUNK, num_chunks), row[CHUNK * num_chunks :]
    maxima = chunked.max(axis=0)
    if np.isnan(maxima).any() or np.isnan(rest).any():
        return np.full(k, np.nan, np.float32), np.zeros(k, np.int64)
    bound = np.partition(maxima, num_chunks - k)[num_chunks - k]
    chunks = np.flatnonzero(maxima >= bound)
    at = np.flatnonzero(chunked[:, chunks] >= bound)
    ids = np.concatenate(
        (at // len(chunks) * num_chunks + chunks[at % len(chunks)], np.flatnonzero(rest >= bound) + CHUNK * num_chunks)
    )
    values = row[ids]
    order = np.argsort(-values, kind="stable")[:k]
    return values[order], ids[order]


def largest_on_device(logits: torch.Tensor, k: int, num_chunks: int) -> tuple[Array, Array]:
    """Find the largest of all rows at once, in the k best chunks of each; ties at the border, which
    might lie beyond them, are looked for."""
    num_rows, vocab_size = logits.shape
    maxima, chunks = (
        logits[:, : num_chunks * CHUNK]
        .view(num_rows, CHUNK, num_chunks)
        .amax(dim=1)
        .topk(min(k + 1, num_chunks), dim=-1)
    )
    offsets = torch.arange(CHUNK, device=logits.device)[:, None] * num_chunks
    ids = (offsets + chunks[:, None, :k].sort(dim=-1).values).flatten(1)
    if num_chunks * CHUNK < vocab_size:
        rest = torch.arange(num_chunks * CHUNK, vocab_size, device=logits.device)
        ids = torch.cat((ids, rest.expand(num_rows, -1)), dim=1)
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    values, ids = values[:, :k].clone(), ids.gather(1, order[:, :k])
    is_tied = (maxima[:, -1] >= values[:, k - 1]) & ~values[:, 0].isnan()
    for row in is_tied.nonzero().flatten().tolist():
        tied = (logits[row] >= values[row, -1]).nonzero().flatten()
        best, order = logits[row, tied].sort(descending=True, stable=True)
        values[row], ids[row] = best[:k], tied[order[:k]]
    return values.cpu().numpy(), ids.cpu().numpy()
