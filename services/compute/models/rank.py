"""A rank's model: parts of the layers, wired to the other ranks' parts; and rank 0's where the ranks
keep the weights, and it alone computes (`sharded_layer`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.compute.backends.backend import Backend, GroupedExperts, LayerWeights, Linear, Mlp, RowMath
from services.compute.backends.gathered import ELSEWHERE, GatheredHead, GatheredLinear, GatheredMlp, ShardedLinear
from services.compute.models.config import ModelConfig
from services.compute.models.decoder import ModelWeights
from services.compute.models.moe import Expert, Router
from services.compute.models.parts import LayerParts, MixtureParts, MlpParts, ModelParts
from services.compute.ranks.parallel.heads import heads_of
from services.compute.ranks.parallel.ranks import Cut, Ranks
from services.compute.ranks.parallel.share import Share

Theirs = Sequence[Linear | None]  # another rank's qkv, output, gate_up and down
Widths = list[tuple[int, ...]]  # of each rank, ShardedLinear's


def config_of_rank(config: ModelConfig, share: Share, layers: range) -> ModelConfig:
    """The configuration of a rank's part of a model: of its layers, and of its heads in them."""
    heads, moe = heads_of(config, share.size)[share.rank], config.moe
    if moe is not None:
        moe = replace(
            moe, sparse_layers=frozenset(number - layers.start for number in moe.sparse_layers if number in layers)
        )
    ropes, windows = (
        config.rope_of_layer[layers.start : layers.stop],
        config.sliding_windows[layers.start : layers.stop],
    )
    return replace(
        config,
        num_layers=len(layers),
        num_heads=len(heads.queries),
        num_kv_heads=len(heads.kv),
        rope_of_layer=ropes,
        sliding_windows=windows,
        moe=moe,
    )


def cut_of(config: ModelConfig, ranks: Ranks) -> Cut:
    """How ranks divide a whole model."""
    share, heads = ranks.share, heads_of(config, ranks.share.size)
    attended = tuple(range(each.queries.start * config.head_dim, each.queries.stop * config.head_dim) for each in heads)
    return Cut(ranks, heads, attended, share.parts(config.hidden_size), share.parts(config.intermediate_size))


def weights_of_rank(
    parts: ModelParts, config: ModelConfig, backend: Backend, cut: Cut, announce: Callable[[int, bool], None] | None
) -> ModelWeights:
    """The parts as a model's weights. config: the whole model's; announce: GatheredHead's; None: the
    head is elsewhere."""
    layers = [layer_of_rank(each, config, backend, cut) for each in parts.layers]
    vocab = cut.ranks.share.parts(config.vocab_size)
    head = (
        ELSEWHERE
        if announce is None
        else GatheredHead(cut.ranks, parts.lm_head, vocab, parts.norm, backend.row_math, announce)
    )
    return ModelWeights(ELSEWHERE if parts.embedding is None else parts.embedding, layers, parts.norm, head)


def layer_of_rank(parts: LayerParts, config: ModelConfig, backend: Backend, cut: Cut) -> LayerWeights:
    inputs = None if config.is_qk_norm_joint else cut.attended
    output = GatheredLinear(cut.ranks, parts.output, cut.hidden, inputs)
    mlp: Mlp
    if isinstance(parts.mlp, MlpParts):
        mlp = mlp_of_rank(parts.mlp, cut, cut.intermediate)
    else:
        assert config.moe is not None
        mlp = mixture_of_rank(parts.mlp, config, backend, cut)
    return LayerWeights(parts.norms, parts.qkv or ELSEWHERE, output, mlp, parts.sinks)


def mlp_of_rank(parts: MlpParts, cut: Cut, intermediate: tuple[range, ...]) -> GatheredMlp:
    return GatheredMlp(
        GatheredLinear(cut.ranks, parts.gate_up, intermediate), GatheredLinear(cut.ranks, parts.down, cut.hidden)
    )


@dataclass(frozen=True, slots=True)
class GatheredMixture:
    """MoeMlp, of ranks that have some of its experts each."""

    ranks: Ranks
    row_math: RowMath
    router: Router  # whole
    experts: tuple[Expert, ...]  # this rank's
    grouped: GroupedExperts | None  # the same as one, where the backend can
    numbers: tuple[range, ...]  # of each rank's experts
    shared: GatheredMlp | None
    shared_gate: Linear | None  # whole

    @property
    def is_recordable(self) -> bool:
        return False

    @property
    def linears(self) -> dict[str, Linear]:
        linears = self.router.linears | ({} if self.shared_gate is None else {"shared.gate.": self.shared_gate})
        for number, expert in zip(self.numbers[self.ranks.share.rank], self.experts, strict=True):
            linears |= {f"experts.{number}.gate_up.": expert.gate_up, f"experts.{number}.down.": expert.down}
        return linears | (
            {} if self.shared is None else {f"shared.{name}": linear for name, linear in self.shared.linears.items()}
        )

    def __call__(self, x: Tensor, *, norm: Tensor | None, eps: float, has_residual: bool = True) -> Tensor:
        normed = x if norm is None else self.row_math.norm(x, weight=norm, eps=eps)
        chosen, weights = self.router.choose(x, normed, eps, self.row_math)
        results, shared = self.run_experts(normed, chosen), None
        if self.shared is not None:
            score = None if self.shared_gate is None else self.shared_gate.logits(normed)
            shared = self.shared(normed, norm=None, eps=eps, has_residual=False), score
        return self.row_math.add_experts(x, results, weights, shared=shared, has_residual=has_residual)

    def run_experts(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Each row's results of its experts, [T, num_active, hidden]. chosen: [T, num_active] int64. In
        the order of their experts rows are in the order of the ranks that have these."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        starts = [0, *flat.bincount(minlength=self.numbers[-1].stop).cumsum(0).tolist()]
        own = self.numbers[self.ranks.share.rank]
        if self.grouped is not None:
            part = self.grouped.run(x, chosen).flatten(0, 1)[order[starts[own.start] : starts[own.stop]]]
        else:
            rows = x[order[starts[own.start] : starts[own.stop]] // chosen.shape[1]]
            cuts = [count - starts[own.start] for count in starts[own.start : own.stop + 1]]
            outputs = [
                each.down(each.gate_up(rows[first:last]))
                for each, first, last in zip(self.experts, cuts[:-1], cuts[1:], strict=True)
                if first < last
            ]
            part = torch.cat([x[:0], *outputs])
        results = x.new_empty((len(flat), x.shape[1]))
        results[order] = self.ranks.all_gather(
            part, [range(starts[each.start], starts[each.stop]) for each in self.numbers], dim=0
        )
        return results.view(*chosen.shape, -1)


def mixture_of_rank(parts: MixtureParts, config: ModelConfig, backend: Backend, cut: Cut) -> GatheredMixture:
    moe, share = config.moe, cut.ranks.share
    assert moe is not None
    shared = None if parts.shared is None else mlp_of_rank(parts.shared, cut, share.parts(moe.shared_intermediate_size))
    grouped = backend.group_experts(
        [(each.gate_up, each.down) for each in parts.experts], moe.num_experts, parts.numbers.start
    )
    return GatheredMixture(
        cut.ranks,
        backend.row_math,
        parts.router,
        parts.experts,
        grouped,
        share.parts(moe.num_experts, unit=1),
        shared,
        parts.shared_gate,
    )


def linears_to_keep(parts: LayerParts, config: ModelConfig) -> list[Linear | None]:
    """A rank's qkv, output, gate_up and down, as far as rank 0 lacks them."""
    assert isinstance(parts.mlp, MlpParts)
    return [None if config.is_qk_norm_joint else parts.qkv, parts.output, parts.mlp.gate_up, parts.mlp.down]


def sharded_layer(parts: LayerParts, others: Sequence[Theirs], config: ModelConfig) -> LayerWeights:
    """A whole layer. parts: rank 0's; others: of the ranks after it; config: the whole model's."""
    share = Share(0, 1 + len(others))
    assert isinstance(parts.mlp, MlpParts)
    heads = [(each.queries, each.kv, each.kv) for each in heads_of(config, share.size, may_repeat=False)]
    of_heads: Widths = [tuple(len(some) * config.head_dim for some in each) for each in heads]
    of_hidden: Widths = [(len(each),) for each in share.parts(config.hidden_size)]
    of_intermediate: Widths = [(len(each),) for each in share.parts(config.intermediate_size)]
    own = (parts.qkv, parts.output, parts.mlp.gate_up, parts.mlp.down)
    qkv, output, gate_up, down = map(
        side_by_side, zip(own, *others, strict=True), (of_heads, of_hidden, of_intermediate, of_hidden)
    )
    return LayerWeights(parts.norms, qkv, output, GatheredMlp(gate_up, down), parts.sinks)


def side_by_side(linears: Sequence[Linear | None], widths: Widths) -> ShardedLinear:
    """A layer of each rank's columns, if it has any."""
    found = [(linear, of_linear) for linear, of_linear in zip(linears, widths, strict=True) if linear is not None]
    return ShardedLinear(tuple(linear for linear, _ in found), tuple(of_linear for _, of_linear in found))
