"""The work on rows between layers, and that of a mixture of experts (which experts a row gets, and the
sum of their results), in plain torch."""

import torch
from torch import Tensor

from services.compute.backends.torch.reference import add_scaled, cap_scores, rms_norm


class ExpertMath:
    """RowMath's part for mixtures."""

    def choose_experts(self, logits: Tensor, num_active: int, *, has_normalized_weights: bool) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(num_active)
        if has_normalized_weights:
            total = weights[:, 0]
            for rank in range(1, num_active):
                total = total + weights[:, rank]
            weights = weights / total[:, None]
        return chosen, weights

    def add_experts(
        self, x: Tensor, results: Tensor, weights: Tensor, *, shared: tuple[Tensor, Tensor] | None, has_residual: bool
    ) -> Tensor:
        total = x.float() if has_residual else torch.zeros_like(x, dtype=torch.float32)
        for rank in range(weights.shape[1]):
            total = total + weights[:, rank, None] * results[:, rank].float()
        if shared is not None:
            total = total + sigmoid(shared[1]) * shared[0].float()
        return total.to(x.dtype)


def sigmoid(scores: Tensor) -> Tensor:
    """The sigmoid of [T, 1], as the softmax of each score and 0: torch's own takes other
    instructions for the last few of many than for the others."""
    return torch.cat([scores, torch.zeros_like(scores)], dim=1).softmax(-1)[:, :1]


class TorchRowMath(ExpertMath):
    def norm(self, x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add(self, x: Tensor, h: Tensor, *, norm: Tensor | None, eps: float, multiplier: float = 1.0) -> Tensor:
        return add_scaled(x, h, norm, eps, multiplier)

    def finish_logits(self, logits: Tensor, *, multiplier: float, cap: float) -> Tensor:
        return cap_scores(logits * multiplier, cap)
