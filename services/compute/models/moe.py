"""Mixtures of experts: many MLPs; a router gives each token a few (Shazeer et al.,
"Outrageously Large Neural Networks", 2017).

Tokens are grouped by expert, so that an expert's weights are read once a step: here, or by the
backend (GroupedExperts), on a GPU without the host. Each expert is a layer of the backend, whose
rows do not depend on each other, and a token's results are added in the order in which the router
ranks its own experts: what a token gets does not depend on whose expert else it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.backends.backend import GroupedExperts, Linear, Mlp, Norms, RouterConfig, RowMath
from services.compute.models.sizes import LARGEST, LARGEST_MIXTURE, check_size


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The configuration of a decoder whose MLPs are mixtures."""

    num_experts: int
    router: RouterConfig
    intermediate_size: int  # of an expert
    sparse_layers: frozenset[int]  # the other layers have a plain MLP
    shared_intermediate_size: int = 0  # of the expert that all tokens have; 0: there is none
    has_shared_gate: bool = False
    has_bias: bool = False  # of the router and of the experts
    # of the checkpoint's tensors, in a layer's mixture
    router_name: str = "gate"
    shared_name: str = "shared_experts"
    # an MLP has the same rows; both normalize what they read and what they make, and so does the router, whose
    # weights of experts have a factor for each
    is_beside_mlp: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for what no mixture can be."""
        check_size("the number of experts", self.num_experts, LARGEST_MIXTURE)
        router = self.router
        check_size("num_experts_per_tok", router.num_active, self.num_experts)
        check_size("n_group", router.num_groups, self.num_experts)
        check_size("topk_group", router.num_active_groups, router.num_groups)
        in_group, rest = divmod(self.num_experts, router.num_groups)
        if router.num_groups > 1 and (rest or in_group < 2 or router.num_active > in_group * router.num_active_groups):
            raise ValueError(
                f"{self.num_experts} experts in {router.num_groups} groups (n_group), {router.num_active} chosen from "
                f"{router.num_active_groups} of these (topk_group): groups must be equal, have two experts at least, "
                "and hold as many as are chosen"
            )
        if type(router.scaling) not in (int, float) or not math.isfinite(router.scaling):
            raise ValueError(f"routed_scaling_factor is {router.scaling!r}, not a number")
        check_size("the experts' intermediate size", self.intermediate_size, LARGEST["intermediate_size"])
        if self.shared_intermediate_size != 0:
            check_size("shared_expert_intermediate_size", self.shared_intermediate_size, LARGEST["intermediate_size"])


@dataclass(frozen=True, slots=True)
class Expert:
    gate_up: Linear  # gated: hidden to intermediate
    down: Linear


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Added as it is, or weighted by the sigmoid of a score of its own (Qwen 2)."""

    expert: Expert
    gate: Linear | None  # hidden to 1


@dataclass(frozen=True, slots=True)
class Router:
    linear: Linear  # hidden to num_experts
    config: RouterConfig
    correction: Tensor | None = None  # [num_experts] float32
    # hidden to twice num_experts: what rounding float32 weights to the linear's dtype leaves, rounded, and
    # what that leaves; None: nothing
    rest: Linear | None = None
    norm: Tensor | None = None  # [hidden]: its own; None: it reads what the experts read
    factors: Tensor | None = None  # [num_experts] float32: of the weights

    @property
    def linears(self) -> dict[str, Linear]:
        return {"router.": self.linear} | ({} if self.rest is None else {"router_rest.": self.rest})

    def choose(self, x: Tensor, normed: Tensor, eps: float, row_math: RowMath) -> tuple[Tensor, Tensor]:
        """The experts of each row, and their weights: [T, num_active] int64 and float32. x: [T, hidden]; normed:
        what the experts read."""
        if self.norm is None:
            logits = self.logits(normed)
        else:  # Gemma 4's
            logits = self.logits(x, norm=self.norm, eps=eps) * x.shape[1] ** -0.5
        chosen, weights = row_math.choose_experts(logits, self.config, self.correction)
        return chosen, weights if self.factors is None else weights * self.factors[chosen]

    def logits(self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """The scores of each row of x, [T, num_experts] float32, good until the next call."""
        logits = self.linear.logits(x, norm=norm, eps=eps)
        if self.rest is None:
            return logits
        more, least = self.rest.logits(x, norm=norm, eps=eps).chunk(2, dim=1)
        return logits + (more + least)


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """An Mlp of backends/backend.py. Scores, weights and the sum of the experts' results are in
    float32."""

    row_math: RowMath
    router: Router
    experts: tuple[Expert, ...]
    shared: SharedExpert | None = None
    grouped: GroupedExperts | None = None  # the same experts as one, where the backend can

    @property
    def is_recordable(self) -> bool:
        return self.grouped is not None

    @property
    def linears(self) -> dict[str, Linear]:
        linears = self.router.linears
        experts = {f"experts.{number}.": expert for number, expert in enumerate(self.experts)}
        if self.shared is not None:
            experts["shared."] = self.shared.expert
            if self.shared.gate is not None:
                linears["shared.gate."] = self.shared.gate
        for name, expert in experts.items():
            linears |= {name + "gate_up.": expert.gate_up, name + "down.": expert.down}
        return linears

    def __call__(self, x: Tensor, *, norm: Tensor | None, eps: float, has_residual: bool = True) -> Tensor:
        """The weighted sum of its experts' results for each row of x, [T, hidden], normalized; with
        has_residual, x is added. Returns [T, hidden]."""
        # once, for all that read it
        normed = x if norm is None else self.row_math.norm(x, weight=norm, eps=eps)
        chosen, weights = self.router.choose(x, normed, eps, self.row_math)
        results = (
            run_experts(self.experts, normed, chosen) if self.grouped is None else self.grouped.run(normed, chosen)
        )
        shared = None
        if self.shared is not None:
            score = None if self.shared.gate is None else self.shared.gate.logits(normed)
            shared = self.shared.expert.down(self.shared.expert.gate_up(normed)), score
        return self.row_math.add_experts(x, results, weights, shared=shared, has_residual=has_residual)


@dataclass(frozen=True, slots=True)
class MlpBesideMixture:
    """An Mlp of backends/backend.py: the sum of an MLP's result and a mixture's, each normalized."""

    row_math: RowMath
    dense: Mlp
    mixture: MoeMlp
    norms: Norms  # of the layer

    @property
    def is_recordable(self) -> bool:
        return self.dense.is_recordable and self.mixture.is_recordable

    @property
    def linears(self) -> dict[str, Linear]:
        """The router as its checkpoint has it, whose other tensors begin with the name that others' has."""
        of_mixture = self.mixture.linears
        return self.dense.linears | {"router.proj.": of_mixture.pop("router.")} | of_mixture

    def __call__(self, x: Tensor, *, norm: Tensor | None, eps: float, has_residual: bool = True) -> Tensor:
        """norm: before the MLP. Returns [T, hidden]."""
        norms = self.norms
        assert norms.after_dense is not None
        dense = self.dense(x, norm=norm, eps=eps, has_residual=False)
        mixed = self.mixture(x, norm=norms.before_experts, eps=eps, has_residual=False)
        total = self.row_math.norm(dense, weight=norms.after_dense, eps=eps)
        total = self.row_math.add(total, mixed, norm=norms.after_experts, eps=eps)
        return self.row_math.add(x, total, norm=None, eps=eps) if has_residual else total


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
