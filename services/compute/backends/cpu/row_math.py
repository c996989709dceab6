"""What is done to rows between layers, in native code."""

import ctypes

import torch

from services.compute.backends.cpu.library import Addition, load_library, pointer

Tensor = torch.Tensor


class NativeRowMath:
    """As TorchRowMath, on rows in bfloat16; a sum is rounded once."""

    def __init__(self) -> None:
        library = load_library()
        assert library is not None
        self.library = library

    def add(self, x: Tensor, h: Tensor, *, norm: Tensor | None, eps: float, multiplier: float = 1.0) -> Tensor:
        rows, k = x.shape
        out = torch.empty_like(x)
        self.library.penstock_add_rows(ctypes.byref(Addition(x.data_ptr(), h.data_ptr(), pointer(norm), eps, multiplier, rows, k, out.data_ptr())))
        return out

    def finish_logits(self, logits: Tensor, *, multiplier: float, cap: float) -> Tensor:
        self.library.penstock_finish_logits(logits.data_ptr(), logits.numel(), multiplier, cap)
        return logits
