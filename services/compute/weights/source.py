"""WeightSource: the tensors of a checkpoint by their Hugging Face names, whatever file they come from."""

from pathlib import Path
from typing import Protocol

import torch

from services.compute.backends.matrix import Matrix


class WeightSource(Protocol):
    """Reads on demand; a shape that is not the tensor's, or a tensor that is missing, raises StartupError with its name."""

    folder: Path

    def dense(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor in the model's dtype on its device: an embedding, a norm, a bias."""
        ...

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """The weight [n, k] of the linear layer `name`, which ends in a dot, in the form in which the file has it."""
        ...

    def tied_head(self, embedding: torch.Tensor) -> Matrix:
        """The embedding [vocab, hidden], which was read as `dense`, as the matrix of a tied LM head."""
        ...

    def close(self) -> None: ...
