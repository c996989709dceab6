"""The work on rows between layers, and that of a mixture of experts (which experts a row gets, and the
sum of their results), in plain torch."""

import torch
from torch import Tensor

from services.compute.backends.backend import RouterConfig
from services.compute.backends.torch.reference import add_scaled, cap_scores, rms_norm

SMALLEST_TOTAL = 1e-20  # added to a total of weights, none of which it changes but 0: all sigmoids may be 0


class ExpertMath:
    """RowMath's part for mixtures."""

    def choose_experts(
        self, logits: Tensor, router: RouterConfig, correction: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scores = sigmoid(logits) if router.has_sigmoid_scores else logits.softmax(-1)
        ranked = scores if correction is None else scores + correction
        if router.num_groups > 1:
            grouped = ranked.view(len(ranked), router.num_groups, -1)
            best = grouped.topk(2).values.sum(-1).topk(router.num_active_groups).indices
            is_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, False)
            ranked = grouped.masked_fill(is_out[..., None], float("-inf")).flatten(1)
        chosen = ranked.topk(router.num_active).indices
        weights = scores.gather(1, chosen)
        if router.has_normalized_weights:
            total = weights[:, 0]
            for rank in range(1, router.num_active):
                total = total + weights[:, rank]
            weights = weights / (total + SMALLEST_TOTAL)[:, None]
        return chosen, weights * router.scaling

    def add_experts(
        self,
        x: Tensor,
        results: Tensor,
        weights: Tensor,
        *,
        shared: tuple[Tensor, Tensor | None] | None,
        has_residual: bool,
    ) -> Tensor:
        total = x.float() if has_residual else torch.zeros_like(x, dtype=torch.float32)
        for rank in range(weights.shape[1]):
            total = total + weights[:, rank, None] * results[:, rank].float()
        if shared is not None:
            result, score = shared
            total = total + (result.float() if score is None else sigmoid(score) * result.float())
        return total.to(x.dtype)


def sigmoid(scores: Tensor) -> Tensor:
    """The sigmoid of [T, n], as the softmax of each score and 0: torch's own takes other
    instructions for the last few of many than for the others."""
    return torch.stack([scores, torch.zeros_like(scores)], dim=-1).softmax(-1)[..., 0]


class TorchRowMath(ExpertMath):
    def norm(self, x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add(
        self, x: Tensor, h: Tensor, *, norm: Tensor | None, eps: float, multiplier: float = 1.0, scale: float = 1.0
    ) -> Tensor:
        total = add_scaled(x, h, norm, eps, multiplier)
        return total if scale == 1.0 else total * scale

    def finish_logits(self, logits: Tensor, *, multiplier: float, cap: float) -> Tensor:
        return cap_scores(logits * multiplier, cap)
