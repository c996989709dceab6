"""The layers of hybrid models in a checkpoint: which rows of which matrices make a layer of ours, and the
weights of a recurrence."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from services.compute.backends.torch.recurrent import RecurrenceConfig, RecurrentWeights
from services.compute.models.config import ModelConfig
from services.compute.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class MatrixRows:
    """Some rows of a matrix."""

    source: str  # its name, which ends in a dot
    height: int  # of the whole matrix
    rows: Sequence[range] | None = None  # None: all

    @property
    def count(self) -> int:
        return self.height if self.rows is None else sum(map(len, self.rows))


def with_gate(config: ModelConfig, block: str) -> list[MatrixRows]:
    """The pieces of q, k, v and attention's gate: a head's rows of the gate stand behind its rows of q."""
    dim, num_heads, num_kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    q, gate = (
        MatrixRows(block + "q_proj.", 2 * num_heads * dim, every(range(start, start + dim), 2 * dim, num_heads))
        for start in (0, dim)
    )
    return [q, *(MatrixRows(f"{block}{name}_proj.", num_kv_heads * dim) for name in "kv"), gate]


def delta_pieces(sizes: RecurrenceConfig, source: WeightSource, block: str) -> list[MatrixRows]:
    """The pieces of a projected row of gated delta-net: q, k and v in a matrix, z, b and a in one each; or
    (Qwen3-Next) all but b and a in one, by heads of keys, and those in another."""
    keys, sharing = sizes.num_key_heads, sizes.num_heads // sizes.num_key_heads

    def by_key(name: str, *widths: int) -> list[MatrixRows]:
        """Parts of these widths, which take turns in a matrix."""
        borders = [sum(widths[:count]) for count in range(len(widths) + 1)]
        period = borders[-1]
        return [
            MatrixRows(block + name, period * keys, every(range(start, end), period, keys))
            for start, end in pairwise(borders)
        ]

    if has_matrix(source, block + "in_proj_qkv."):
        inputs, gate = (
            [MatrixRows(block + "in_proj_qkv.", sizes.channels)],
            MatrixRows(block + "in_proj_z.", sizes.inner),
        )
    else:
        values = sharing * sizes.value_dim
        *inputs, gate = by_key("in_proj_qkvz.", sizes.key_dim, sizes.key_dim, values, values)
    if has_matrix(source, block + "in_proj_b."):
        scalars = [MatrixRows(f"{block}in_proj_{name}.", sizes.num_heads) for name in "ba"]
    else:
        scalars = by_key("in_proj_ba.", sharing, sharing)
    return [*inputs, *scalars, gate]


def projections(sizes: RecurrenceConfig, source: WeightSource, prefix: str) -> tuple[list[MatrixRows], str]:
    """The pieces of a layer's projected row, and the name of its output projection."""
    if sizes.kind == "convolution":
        return [MatrixRows(prefix + "conv.in_proj.", sizes.width)], prefix + "conv.out_proj."
    if sizes.kind == "mamba2":  # z, what goes through the convolution, and dt
        name, borders = prefix + "mamba.in_proj.", (0, sizes.inner, sizes.inner + sizes.channels, sizes.width)
        gate, *inputs = (MatrixRows(name, sizes.width, [range(*each)]) for each in pairwise(borders))
        return [*inputs, gate], prefix + "mamba.out_proj."
    block = prefix + "linear_attn."
    return delta_pieces(sizes, source, block), block + "out_proj."


def has_matrix(source: WeightSource, name: str) -> bool:
    """Whether there is a matrix of that name, in any format."""
    return any(source.has(name + part) for part in ("weight", "qweight", "weight_packed"))


def every(first: range, period: int, count: int) -> list[range]:
    """A range, and others like it, each `period` behind the one before."""
    return [range(first.start + number * period, first.stop + number * period) for number in range(count)]


MODULES = {"convolution": "conv", "delta": "linear_attn", "mamba2": "mamba"}  # in a layer, by the kind of recurrence


def read_recurrent(sizes: RecurrenceConfig, source: WeightSource, prefix: str, *, is_packed: bool) -> RecurrentWeights:
    """The weights of a layer, whose names begin so. A packed checkpoint has them as they are computed with."""
    heads, channels = (sizes.num_heads,), (sizes.channels,)
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "convolution": ("conv.weight" if sizes.kind == "convolution" else "conv1d.weight", (*channels, 1, sizes.kernel))
    }
    if sizes.has_state:
        norm = sizes.value_dim if sizes.norm_group is None else sizes.inner
        names |= {"decay": ("A_log", heads), "dt_bias": ("dt_bias", heads), "norm": ("norm.weight", (norm,))}
    if sizes.kind == "mamba2":
        names |= {"convolution_bias": ("conv1d.bias", channels), "skip": ("D", heads)}
    start = prefix + ("recurrent." if is_packed else MODULES[sizes.kind] + ".")
    found: dict[str, Tensor] = {}
    for field, (name, shape) in names.items():
        if is_packed:
            shape = (sizes.kernel, *channels) if field == "convolution" else shape
            found[field] = source.dense(start + field, shape, dtype=torch.float32)
        elif field != "convolution_bias" or source.has(start + name):
            found[field] = source.dense(start + name, shape, dtype=torch.float32)
    if not is_packed:
        found["convolution"] = found["convolution"].squeeze(1).T.contiguous()
        if sizes.has_state:
            found["decay"] = -torch.exp(found["decay"])
    return RecurrentWeights(**found)
