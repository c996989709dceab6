"""The work on rows between layers, in plain torch."""

from torch import Tensor

from services.compute.backends.torch.experts import ExpertMath
from services.compute.backends.torch.reference import add_scaled, cap_scores, rms_norm


class TorchRowMath(ExpertMath):
    def norm(self, x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add(self, x: Tensor, h: Tensor, *, norm: Tensor | None, eps: float, multiplier: float = 1.0) -> Tensor:
        return add_scaled(x, h, norm, eps, multiplier)

    def finish_logits(self, logits: Tensor, *, multiplier: float, cap: float) -> Tensor:
        return cap_scores(logits * multiplier, cap)
