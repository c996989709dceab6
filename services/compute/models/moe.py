"""Mixtures of experts: many MLPs; a router gives each token a few (Shazeer et al.,
"Outrageously Large Neural Networks", 2017).

Tokens are grouped by expert, so that an expert's weights are read once a step: here, or by the
backend (GroupedExperts), on a GPU without the host. Each expert is a layer of the backend, whose
rows do not depend on each other, and a token's results are added in the order in which the router
ranks its own experts: what a token gets does not depend on whose expert else it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.backends.backend import GroupedExperts, Linear, RowMath
from services.compute.models.sizes import LARGEST, LARGEST_MIXTURE, check_size


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The configuration of a decoder whose MLPs are mixtures."""

    num_experts: int
    num_active: int  # experts of a token
    intermediate_size: int  # of an expert
    has_normalized_weights: bool  # the weights of a token's experts are made to sum to 1
    shared_intermediate_size: int  # of the expert that all tokens have; 0: there is none
    sparse_layers: frozenset[int]  # the other layers have a plain MLP
    has_bias: bool = False  # of the router and of the experts

    def __post_init__(self) -> None:
        """Raises ValueError for what no mixture can be."""
        check_size("the number of experts", self.num_experts, LARGEST_MIXTURE)
        check_size("num_experts_per_tok", self.num_active, self.num_experts)
        check_size("the experts' intermediate size", self.intermediate_size, LARGEST["intermediate_size"])
        if self.shared_intermediate_size != 0:
            check_size("shared_expert_intermediate_size", self.shared_intermediate_size, LARGEST["intermediate_size"])


@dataclass(frozen=True, slots=True)
class Expert:
    gate_up: Linear  # gated: hidden to intermediate
    down: Linear


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Weighted by the sigmoid of a score of its own (Qwen 2)."""

    expert: Expert
    gate: Linear  # hidden to 1


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """An Mlp of backends/backend.py. Scores, weights and the sum of the experts' results are in
    float32."""

    row_math: RowMath
    router: Linear  # hidden to num_experts
    experts: tuple[Expert, ...]
    num_active: int
    has_normalized_weights: bool
    shared: SharedExpert | None = None
    grouped: GroupedExperts | None = None  # the same experts as one, where the backend can

    @property
    def is_recordable(self) -> bool:
        return self.grouped is not None

    @property
    def linears(self) -> dict[str, Linear]:
        linears = {"router.": self.router}
        experts = {f"experts.{number}.": expert for number, expert in enumerate(self.experts)}
        if self.shared is not None:
            linears["shared.gate."] = self.shared.gate
            experts["shared."] = self.shared.expert
        for name, expert in experts.items():
            linears |= {name + "gate_up.": expert.gate_up, name + "down.": expert.down}
        return linears

    def __call__(self, x: Tensor, *, norm: Tensor | None, eps: float, has_residual: bool = True) -> Tensor:
        """The weighted sum of its experts' results for each row of x, [T, hidden], normalized; with
        has_residual, x is added. Returns [T, hidden]."""
        # once, for all that read it
        normed = x if norm is None else self.row_math.norm(x, weight=norm, eps=eps)
        chosen, weights = self.row_math.choose_experts(
            self.router.logits(normed), self.num_active, has_normalized_weights=self.has_normalized_weights
        )
        results = (
            run_experts(self.experts, normed, chosen) if self.grouped is None else self.grouped.run(normed, chosen)
        )
        shared = None
        if self.shared is not None:
            shared = self.shared.expert.down(self.shared.expert.gate_up(normed)), self.shared.gate.logits(normed)
        return self.row_math.add_experts(x, results, weights, shared=shared, has_residual=has_residual)


def run_experts(experts: Sequence[Expert], x: Tensor, chosen: Tensor) -> Tensor:
    """Each row's results of its experts, [T, num_active, hidden]. chosen: [T, num_active] int64."""
    num_active, flat = chosen.shape[1], chosen.flatten()
    order = flat.argsort(stable=True)
    rows = x[order // num_active]
    outputs, first = [], 0
    for expert, count in zip(experts, flat.bincount(minlength=len(experts)).tolist(), strict=True):
        if count:
            outputs.append(expert.down(expert.gate_up(rows[first : first + count])))
            first += count
    results = torch.empty_like(rows)
    results[order] = torch.cat(outputs)
    return results.view(*chosen.shape, -1)
