"""A mixture's experts in launches that take all of them: what launches kernels/experts.py."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from services.compute.backends.cuda.kernels import experts as kernels
from services.compute.backends.cuda.linear import CudaLinear, Tile, WeightForm
from services.compute.backends.cuda.row_math import QuantizedRows

AT_ONCE = 1024  # pairs that a program reads at a time


@dataclass(frozen=True, slots=True)
class PairGroups:
    """See kernels.group_pairs."""

    order: Tensor  # [pairs] int32
    tiles: Tensor  # [tiles, 3] int32
    is_whole: bool  # there are tiles for all pairs


class Stacked:
    """Layers of one form and shape, whose weights lie one after the other. The layers keep views of
    them."""

    def __init__(self, layers: Sequence[CudaLinear]) -> None:
        """layers: for which `are_alike` holds."""
        self.layer = layers[0]
        self.parts = {name: self._stack(layers, name) for name in ("weight", "scales", "zeros", "minima", "bias")}
        # numbers of a layer's parts; 0: it has none
        self.sizes = tuple(
            part[0].numel() if (part := self.parts[name]) is not None else 0 for name in ("weight", "scales", "bias")
        )

    @staticmethod
    def _stack(layers: Sequence[CudaLinear], name: str) -> Tensor | None:
        if getattr(layers[0], name) is None:
            return None
        stacked = torch.stack([getattr(layer, name) for layer in layers])
        for layer, part in zip(layers, stacked, strict=True):
            setattr(layer, name, part)
        return stacked

    def tile(self, num_rows: int) -> Tile:
        """num_rows: of an expert, in the mean. The bits are the same with any."""
        return self.layer.tile(num_rows)

    def multiply(self, rows: Tensor | QuantizedRows, groups: PairGroups, tile: Tile, pairs_per_row: int) -> Tensor:
        """rows: of the layers' `prepare`; groups: of tile.rows. Returns [pairs, num_outputs]; what is of no
        expert here is 0."""
        layer, tiles, order = self.layer, groups.tiles, groups.order
        inputs = (rows.codes, rows.scales, rows.sums) if isinstance(rows, QuantizedRows) else (rows, None, None)
        n = layer.num_outputs
        # the next product's rows are made of all that is there
        out = (torch.empty if groups.is_whole else torch.zeros)(
            (len(order), n), dtype=layer.dtype, device=layer.weight.device
        )
        kernels.multiply_experts[(len(tiles) * triton.cdiv(n, tile.columns),)](
            *inputs,
            *self.parts.values(),
            out,
            order,
            tiles,
            len(tiles),
            pairs_per_row,
            n,
            layer.k,
            layer.weight.stride(0),
            layer.height,
            *self.sizes,
            *layer.words,
            FORM=int(layer.form),
            FIRST=layer.first,
            GROUP=layer.group if layer.form in (WeightForm.GROUPS, WeightForm.FOUR_BIT) else 0,
            ACTIVATION=layer.activation,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=layer.weight.dtype == torch.float32,  # as in CudaLinear
        )
        return out


class CudaExperts:
    """See backend.py's GroupedExperts."""

    def __init__(self, experts: Sequence[tuple[CudaLinear, CudaLinear]], num_experts: int, first: int) -> None:
        """experts: gate_up and down of each, each alike among themselves."""
        gate_ups, downs = zip(*experts, strict=True)
        self.gate_up, self.down = Stacked(gate_ups), Stacked(downs)
        self.num_held = len(experts)
        self.num_experts = num_experts
        self.first = first

    def run(self, x: Tensor, chosen: Tensor) -> Tensor:
        num_active, num_pairs = chosen.shape[1], chosen.numel()
        if num_pairs == 0:
            return x.new_empty((*chosen.shape, self.down.layer.num_outputs))
        rows_each = triton.cdiv(num_pairs, self.num_experts)
        first, second = self.gate_up.tile(rows_each), self.down.tile(rows_each)
        groups = {rows: self._group(chosen, rows) for rows in {first.rows, second.rows}}
        h = self.gate_up.multiply(self.gate_up.layer.prepare(x, None, 0.0), groups[first.rows], first, num_active)
        out = self.down.multiply(self.down.layer.prepare(h, None, 0.0), groups[second.rows], second, 1)
        return out.view(*chosen.shape, -1)

    def _group(self, chosen: Tensor, rows: int) -> PairGroups:
        num_pairs = chosen.numel()
        order = torch.empty(num_pairs, dtype=torch.int32, device=chosen.device)
        tiles = torch.empty((num_pairs // rows + self.num_held, 3), dtype=torch.int32, device=chosen.device)
        kernels.group_pairs[(self.num_held,)](
            chosen.contiguous(), order, tiles, num_pairs, self.first, ROWS=rows, BLOCK=AT_ONCE
        )
        return PairGroups(order, tiles, self.num_held == self.num_experts)


def are_alike(layers: Sequence[CudaLinear]) -> bool:
    """Whether one launch can multiply by any of them."""

    def kind(layer: CudaLinear) -> tuple[object, ...]:
        parts = (layer.weight, layer.scales, layer.zeros, layer.minima, layer.bias)
        shapes = [(part.shape, part.dtype) if part is not None else None for part in parts]
        return (
            layer.form,
            layer.group,
            layer.height,
            layer.first,
            layer.words,
            layer.activation,
            layer.k,
            layer.num_outputs,
            shapes,
        )

    return all(kind(each) == kind(layers[0]) for each in layers)
