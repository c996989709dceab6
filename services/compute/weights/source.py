"""WeightSource: the tensors of a checkpoint by their Hugging Face names, whatever file they come
from.

Where `rows` are given, which rise and do not overlap, they alone are read, of what lies in the file
by rows: a rank's part of a layer's outputs. They have the form that the whole matrix would have, for
what decides on it is read whole.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from services.compute.backends.matrix import Matrix
from services.compute.models.decoder import EmbeddingRows

EMBEDDING = "model.embed_tokens.weight"


class WeightSource(Protocol):
    """Reads on demand; a shape that is not the tensor's, or a tensor that is missing, raises
    StartupError with its name."""

    folder: Path

    @property
    def quantized_as(self) -> str:
        """The checkpoint's quantization, if its layers are to keep that form; else empty."""
        ...

    def report(self, layers: range | None = None) -> None:
        """Say in the log in which form the matrices were, and how they are kept. layers: of which all
        tensors should have been read, in part at least; None: of all."""
        ...

    def dense(
        self, name: str, shape: tuple[int, ...], rows: Sequence[range] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A tensor of this shape, or some of its rows, in the model's dtype or another, on its device: a
        norm, a bias."""
        ...

    def embedding(self, shape: tuple[int, int], name: str = EMBEDDING) -> EmbeddingRows:
        """An embedding [vocab, hidden]: dense, or as the file has it."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def matrix(self, name: str, shape: tuple[int, int], rows: Sequence[range] | None = None) -> Matrix:
        """The weight [n, k] of the linear layer `name`, which ends in a dot, or some of its rows, in
        the form in which the file has it."""
        ...

    def tied_head(
        self, embedding: EmbeddingRows | None, shape: tuple[int, int], rows: Sequence[range] | None = None
    ) -> Matrix:
        """The embedding [vocab, hidden], or some of its rows, as the matrix of a tied LM head.
        embedding: what was read before; None: nothing was."""
        ...

    def close(self) -> None: ...


def take_rows(tensor: Tensor, rows: Sequence[range] | None, dim: int = 0) -> Tensor:
    """Some places of a dimension; None: all. A view of one range, a copy of several."""
    if rows is None:
        return tensor
    parts = [tensor.narrow(dim, each.start, len(each)) for each in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def in_halves(num_rows: int, head_dim: int) -> Tensor:
    """The places of each head's rows with even numbers, then of those with odd ones, [num_rows] int64: what
    turned with its neighbour turns with the one half a head away, and q . k stays."""
    return torch.arange(num_rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()
