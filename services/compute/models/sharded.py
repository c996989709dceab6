"""Rank 0's model where the ranks keep the weights, and it alone computes."""

from collections.abc import Sequence

from services.compute.backends.backend import LayerWeights, Linear
from services.compute.backends.gathered import GatheredMlp, ShardedLinear
from services.compute.models.config import ModelConfig
from services.compute.models.parts import LayerParts, MlpParts
from services.compute.ranks.parallel.heads import heads_of
from services.compute.ranks.parallel.share import Share

Theirs = Sequence[Linear | None]  # another rank's qkv, output, gate_up and down
Widths = list[tuple[int, ...]]  # of each rank, ShardedLinear's


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
    qkv, output, gate_up, down = map(side_by_side, zip(own, *others, strict=True), (of_heads, of_hidden, of_intermediate, of_hidden))
    return LayerWeights(parts.norms, qkv, output, GatheredMlp(gate_up, down), parts.sinks)


def side_by_side(linears: Sequence[Linear | None], widths: Widths) -> ShardedLinear:
    """A layer of each rank's columns, if it has any."""
    found = [(linear, of_linear) for linear, of_linear in zip(linears, widths, strict=True) if linear is not None]
    return ShardedLinear(tuple(linear for linear, _ in found), tuple(of_linear for _, of_linear in found))
