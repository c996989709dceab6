"""The work on rows between layers, in native code; a mixture's in torch."""

import ctypes

import torch
from torch import Tensor

from services.compute.backends.cpu.library import Addition, NativeContext, pointer
from services.compute.backends.torch.experts import ExpertMath


class NativeRowMath(ExpertMath):
    """TorchRowMath on rows in bfloat16; a sum is rounded once."""

    def __init__(self, context: NativeContext) -> None:
        self.context = context

    def norm(self, x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
        return self._add(None, x, weight, eps, 1.0)

    def add(self, x: Tensor, h: Tensor, *, norm: Tensor | None, eps: float, multiplier: float = 1.0) -> Tensor:
        return self._add(x, h, norm, eps, multiplier)

    def _add(self, x: Tensor | None, h: Tensor, norm: Tensor | None, eps: float, multiplier: float) -> Tensor:
        rows, k = h.shape
        out = torch.empty_like(h)
        self.context.add_rows(ctypes.byref(Addition(pointer(x), h.data_ptr(), pointer(norm), eps, multiplier, rows, k, out.data_ptr())))
        return out

    def finish_logits(self, logits: Tensor, *, multiplier: float, cap: float) -> Tensor:
        self.context.finish_logits(logits.data_ptr(), logits.numel(), multiplier, cap)
        return logits
