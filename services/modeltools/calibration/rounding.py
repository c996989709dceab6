"""Four-bit rounding that knows what a layer's inputs look like.

A layer's objective is the squared error of its outputs over the calibration's inputs X, |X (W' -
W)^T|^2 = sum of (D G) * D, with D = W' - W and the Gram matrix G = X^T X: nothing else of the
inputs is needed. Each output column has an objective of its own.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from services.compute.backends.matrix import MAX_STEPS, Grouped, Int4Columns
from services.compute.backends.torch.reference import MIN_STEP, NF4_TABLE, choose_scales, quantize_weight
from shared.process.errors import StartupError

# of the mean diagonal, added to it (Frantar et al. 2022, section 3.3): the first that works
DAMPINGS = (0.01, 0.1, 1.0)
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of a group's range


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that a group's weights can have: (table - zero) * scale. For each output column:
    [n]."""

    scales: Tensor  # float32, of float16's values; of w4, the step times the column's
    zeros: Tensor  # float32; of w4
    table: Tensor  # [16] float32, rising
    steps: Tensor  # float32, whole: its products with what is in the brackets are int8

    def codes(self, weights: Tensor) -> Tensor:
        """The nearest value's number. weights: [..., n]. Returns the same shape, int64."""
        middles = (self.table[1:] + self.table[:-1]) / 2
        found = torch.bucketize(weights / self.scales + self.zeros, middles)
        most, zero = (127.0 / self.steps).floor().long(), self.zeros.long()
        return torch.minimum(torch.maximum(found, zero - most), zero + most)

    def values(self, codes: Tensor) -> Tensor:
        return (self.table[codes] - self.zeros) * self.scales


def objectives(found: Tensor, exact: Tensor, gram: Tensor) -> Tensor:
    """The error of each output column's results. found, exact: [n, k]; gram: [k, k]. Returns
    [n]."""
    difference = (found - exact).to(gram.dtype)
    return ((difference @ gram) * difference).sum(-1)


def round_four_bit(weight: Tensor, gram: Tensor, kind: str, group: int) -> Grouped | Int4Columns:
    """The better of second-order rounding and rounding to nearest, for each output column.

    weight: [n, k] float32; gram: [k, k] float32; kind: w4 or nf4. No column's objective is above
    that of quantize_weight. Raises StartupError for weights that are not finite.
    """
    if not bool(weight.isfinite().all()):
        raise StartupError("the checkpoint has weights that are not finite, so it can't be calibrated")
    nearest, ordered = quantize_weight(weight, kind, group), _round_in_order(weight, gram, kind, group)
    assert isinstance(nearest, type(ordered))
    errors = [objectives(each.dequantize(torch.float32), weight, gram) for each in (nearest, ordered)]
    is_nearest = errors[0] <= errors[1]
    parts = {each.name: (getattr(nearest, each.name), getattr(ordered, each.name)) for each in fields(nearest)}
    chosen: dict[str, Any] = {
        name: torch.where(is_nearest.view(-1, *[1] * (one.dim() - 1)), one, other)
        for name, (one, other) in parts.items()
        if isinstance(one, Tensor) and name != "table"
    }
    return replace(nearest, **chosen)


def _round_in_order(weight: Tensor, gram: Tensor, kind: str, group: int) -> Grouped | Int4Columns:
    """GPTQ (Frantar et al. 2022, algorithm 1): input by input, what rounding loses is made good by
    the inputs that are not rounded yet. A group's grid is fitted to what its weights have become by
    then."""
    n, k = weight.shape
    factor = _inverse_factor(gram)
    importance = gram.diagonal()
    # [k, n]: an input's weights lie in one piece
    rest = weight.T.clone(memory_format=torch.contiguous_format)
    codes = torch.empty((k, n), dtype=torch.uint8)
    units = fit_units(rest, importance, group) if kind == "w4" else None
    grids = []
    for start in range(0, k, group):
        end = min(start + group, k)
        block, losses = rest[start:end], torch.empty((end - start, n))
        grid = fit_grid(block, importance[start:end], units)
        for row in range(end - start):
            chosen = grid.codes(block[row])
            codes[start + row] = chosen.to(torch.uint8)
            losses[row] = (block[row] - grid.values(chosen)) / factor[start + row, start + row]
            block[row + 1 :] -= factor[start + row, start + row + 1 : end, None] * losses[row]
        rest[end:] -= factor[start:end, end:].T @ losses
        grids.append(grid)
    scales, zeros, steps = (
        torch.stack([getattr(grid, name) for grid in grids], dim=1) for name in ("scales", "zeros", "steps")
    )
    if units is not None:
        return Int4Columns(codes.T.contiguous(), units, zeros.to(torch.int8), steps.to(torch.int8), group)
    return Grouped(codes.T.contiguous(), scales.half(), group, torch.tensor(NF4_TABLE, dtype=torch.int8))


def _inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped Gram matrix's inverse, [k, k] float32, with more
    damping where that is needed. Raises StartupError."""
    mean = float(gram.diagonal().double().mean())
    for damping in DAMPINGS:
        damped = gram.double()
        damped.diagonal().add_(max(damping * mean, 1e-8))
        lower, problem = torch.linalg.cholesky_ex(damped)
        if int(problem) == 0:
            factor, problem = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if int(problem) == 0 and bool(factor.isfinite().all()):
            found: Tensor = factor.float()
            return found
    raise StartupError("the model computes numbers on this text that are not finite, so it can't be calibrated")


def fit_units(weights: Tensor, importance: Tensor, group: int) -> Tensor:
    """The scales [n] of columns over which their groups' own, each fitted alone, are most nearly
    whole steps. weights: [k, n]; importance: [k]."""
    fitted = [fit_even(weights[at : at + group], importance[at : at + group]) for at in range(0, len(weights), group)]
    even = torch.stack([grid.scales for grid in fitted], dim=1)
    reach = torch.stack([torch.maximum(grid.zeros, 15 - grid.zeros) * grid.scales for grid in fitted], dim=1)
    return choose_scales(even, reach)


def fit_grid(weights: Tensor, importance: Tensor, units: Tensor | None) -> Grid:
    """The grid with the least mean square error: a group's range is shrunk step by step, which
    clips its ends and makes its steps finer.

    weights: [group, n]; importance: [group], the mean square of each input, by which its weights'
    errors count; units: [n], the columns' scales, of w4; None: nf4.
    """
    return fit_even(weights, importance, units) if units is not None else fit_nf4(weights, importance)


def fit_even(weights: Tensor, importance: Tensor, units: Tensor | None = None) -> Grid:
    """The best of even steps; units None: with any scale."""
    table = torch.arange(16, dtype=torch.float32)
    low, high = weights.amin(0).clamp(max=0.0), weights.amax(0).clamp(min=0.0)
    grids = []
    for shrink in SHRINKS:
        scales = ((high - low) * shrink / 15.0).clamp(min=MIN_STEP)
        steps = torch.ones_like(scales) if units is None else (scales / units).round().clamp(1, MAX_STEPS)
        scales = scales if units is None else steps * units
        grids.append(Grid(scales, (-low * shrink / scales).round().clamp(0, 15), table, steps))
    return _best(grids, weights, importance)


def fit_nf4(weights: Tensor, importance: Tensor) -> Grid:
    table = torch.tensor(NF4_TABLE, dtype=torch.float32)
    largest = weights.abs().amax(0)
    grids = []
    for shrink in SHRINKS:
        scales = (largest * shrink / 127.0).clamp(min=1e-7).half().float()
        grids.append(Grid(scales, torch.zeros_like(scales), table, torch.ones_like(scales)))
    return _best(grids, weights, importance)


def _best(grids: list[Grid], weights: Tensor, importance: Tensor) -> Grid:
    """The grid with the least error, for each column."""
    errors = torch.stack(
        [((grid.values(grid.codes(weights)) - weights).square() * importance[:, None]).sum(0) for grid in grids]
    )
    chosen = errors.argmin(0, keepdim=True)
    scales, zeros, steps = (
        torch.stack([getattr(grid, name) for grid in grids]).gather(0, chosen)[0]
        for name in ("scales", "zeros", "steps")
    )
    return Grid(scales, zeros, grids[0].table, steps)
