"""Check: a kernel's results beside its definition's."""

from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-6
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Check:
    kernel: str
    types: str
    case: str
    error: float  # relative, in the root of the mean square
    bound: float
    is_same_alone: bool | None  # each row's bits, by itself and in company; None: not promised

    @property
    def holds(self) -> bool:
        return self.error <= self.bound and self.is_same_alone is not False


def randn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(
        (found.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm().clamp(min=1e-30)
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
