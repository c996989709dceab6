"""A rank's part of a model's layers: what it computes is gathered with the other ranks' parts, so that
each layer's result is whole on all of them (services/compute/ranks/parallel/)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from services.compute.backends.backend import Linear, LogitsProduct, Product, RowMath
from services.compute.ranks.parallel.ranks import Ranks

Parts = tuple[range, ...]  # of a layer's columns, each rank's


@dataclass(frozen=True, slots=True)
class GatheredLinear:
    """A Product. Where `inputs` are given, what it gets is a rank's part, too."""

    ranks: Ranks
    linear: Linear | None  # of this rank's columns; None: it has none
    parts: Parts
    inputs: Parts | None = None

    def __call__(
        self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None
    ) -> Tensor:
        if self.inputs is not None:
            x = self.ranks.all_gather(x, self.inputs)
        own = self.parts[self.ranks.share.rank]
        if self.linear is None:
            return self.ranks.all_gather(x[:, :0], self.parts)
        added = None if residual is None else residual[:, own.start : own.stop].contiguous()
        return self.ranks.all_gather(self.linear(x, norm=norm, eps=eps, residual=added), self.parts)


@dataclass(frozen=True, slots=True)
class ShardedLinear:
    """A Product whose columns several ranks keep: all are here while it is called."""

    linears: tuple[Linear, ...]  # this rank's first
    # of each, of one matrix or several: the columns of a matrix stand behind those of the ranks before
    widths: tuple[tuple[int, ...], ...]

    @property
    def linear(self) -> Linear:
        return self.linears[0]

    def __call__(
        self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None
    ) -> Tensor:
        outputs, start = [], 0
        for linear, widths in zip(self.linears, self.widths, strict=True):
            stop = start + sum(widths)
            added = None if residual is None else residual[:, start:stop].contiguous()
            outputs.append(torch.split(linear(x, norm=norm, eps=eps, residual=added), list(widths), 1))
            start = stop
        return torch.cat([part for parts in zip(*outputs, strict=True) for part in parts], 1)


@dataclass(frozen=True, slots=True)
class GatheredMlp:
    """An Mlp of two layers."""

    gate_up: GatheredLinear | ShardedLinear
    down: GatheredLinear | ShardedLinear

    @property
    def is_recordable(self) -> bool:
        return False

    @property
    def linears(self) -> dict[str, Linear]:
        named = {"gate_up.": self.gate_up.linear, "down.": self.down.linear}
        return {name: linear for name, linear in named.items() if linear is not None}

    def __call__(self, x: Tensor, *, norm: Tensor | None, eps: float, has_residual: bool = True) -> Tensor:
        return self.down(self.gate_up(x, norm=norm, eps=eps), residual=x if has_residual else None)


@dataclass(frozen=True, slots=True)
class GatheredHead:
    """The last layer, whose logits rank 0 alone reads. It asks the others for theirs whenever it is
    called: `announce` tells them, with how many rows, and they call `serve`."""

    ranks: Ranks
    linear: Linear | None
    parts: Parts
    norm: Tensor  # [hidden], the model's last one, which all ranks have
    row_math: RowMath
    announce: Callable[[int, bool], None]  # of so many rows, normalized first or not

    def logits(self, x: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, out: Tensor | None = None) -> Tensor:
        if norm is not None and norm is not self.norm:  # a drafting head's own
            x, norm = self.row_math.norm(x, weight=norm, eps=eps), None
        self.announce(len(x), norm is not None)
        logits = self.serve(len(x), x, norm=norm, eps=eps)
        return logits if out is None else out.copy_(logits)

    def serve(self, num_rows: int, x: Tensor | None = None, *, norm: Tensor | None, eps: float) -> Tensor:
        """This rank's logits of so many rows. x: rank 0's, [num_rows, hidden]. Returns all ranks', on
        rank 0 whole, [num_rows, vocab] float32."""
        rows = self.ranks.broadcast("rows", x, (num_rows, len(self.norm)), self.norm.dtype)
        whole = self.ranks.region("logits", (num_rows, self.parts[-1].stop), torch.float32)
        own = self.parts[self.ranks.share.rank]
        if self.linear is not None:
            self.linear.logits(rows, norm=norm, eps=eps, out=whole[:, own.start : own.stop])
        self.ranks.all_gather_in_place(whole, self.parts)
        return whole


class Elsewhere:
    """A head, an embedding, or a rank's part of a layer, that this rank does not have."""

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        raise AssertionError("this layer is on another rank")

    logits = __getitem__ = __call__


ELSEWHERE = Elsewhere()


def own_of(layer: Product | LogitsProduct) -> Linear | None:
    """The matrix that is here: the layer's, or this rank's part of it."""
    if isinstance(layer, GatheredLinear | GatheredHead | ShardedLinear):
        return layer.linear
    return None if layer is ELSEWHERE else cast(Linear, layer)
