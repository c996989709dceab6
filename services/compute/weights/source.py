"""WeightSource: the tensors of a checkpoint by their Hugging Face names, whatever file they come
from."""

from pathlib import Path
from typing import Protocol

import torch

from services.compute.backends.matrix import Matrix
from services.compute.models.decoder import Rows

EMBEDDING = "model.embed_tokens.weight"


class WeightSource(Protocol):
    """Reads on demand; a shape that is not the tensor's, or a tensor that is missing, raises
    StartupError with its name."""

    folder: Path

    @property
    def quantized_as(self) -> str:
        """The checkpoint's quantization, if its layers are to keep that form; else empty."""
        ...

    def report(self) -> None:
        """Say in the log in which form the matrices were, and how they are kept."""
        ...

    def dense(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor in the model's dtype on its device: a norm, a bias."""
        ...

    def embedding(self, shape: tuple[int, int]) -> Rows:
        """The embedding [vocab, hidden]: dense, or as the file has it."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """The weight [n, k] of the linear layer `name`, which ends in a dot, in the form in which
        the file has it."""
        ...

    def tied_head(self, embedding: Rows, shape: tuple[int, int]) -> Matrix:
        """The embedding [vocab, hidden], which was read before, as the matrix of a tied LM head."""
        ...

    def close(self) -> None: ...
