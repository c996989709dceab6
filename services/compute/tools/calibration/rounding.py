"""Four-bit rounding that knows what a layer's inputs look like.

A layer's objective is the squared error of its outputs over the calibration's inputs X, |X (W' -
W)^T|^2 = sum of (D G) * D, with D = W' - W and the Gram matrix G = X^T X: nothing else of the
inputs is needed. Each output column has an objective of its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.backends.matrix import Grouped
from services.compute.backends.torch.reference import FOUR_BIT_TABLES, quantize_four_bit
from shared.process.errors import StartupError

# of the mean diagonal, added to it (Frantar et al. 2022, section 3.3): the first that works
DAMPINGS = (0.01, 0.1, 1.0)
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of a group's range


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that a group's weights can have: (table - zero) * scale. For each output column:
    [n]."""

    scales: Tensor  # float32, of float16's values
    zeros: Tensor  # float32
    table: Tensor  # [16] float32, rising

    def codes(self, weights: Tensor) -> Tensor:
        """The nearest value's number. weights: [..., n]. Returns the same shape, int64."""
        steps = weights / self.scales + self.zeros
        middles = (self.table[1:] + self.table[:-1]) / 2
        return torch.bucketize(steps, middles)

    def values(self, codes: Tensor) -> Tensor:
        return (self.table[codes] - self.zeros) * self.scales


def objectives(found: Tensor, exact: Tensor, gram: Tensor) -> Tensor:
    """The error of each output column's results. found, exact: [n, k]; gram: [k, k]. Returns
    [n]."""
    difference = (found - exact).to(gram.dtype)
    return ((difference @ gram) * difference).sum(-1)


def round_four_bit(weight: Tensor, gram: Tensor, kind: str, group: int) -> Grouped:
    """The better of second-order rounding and rounding to nearest, for each output column.

    weight: [n, k] float32; gram: [k, k] float32; kind: w4 or nf4. No column's objective is above
    that of quantize_four_bit.
    """
    candidates = [quantize_four_bit(weight, kind, group), _round_in_order(weight, gram, kind, group)]
    errors = torch.stack([objectives(each.dequantize(torch.float32), weight, gram) for each in candidates])
    is_nearest = (errors[0] <= errors[1])[:, None]
    nearest, ordered = candidates

    def choose(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        return None if one is None or other is None else torch.where(is_nearest, one, other)

    return Grouped(
        torch.where(is_nearest, nearest.codes, ordered.codes),
        torch.where(is_nearest, nearest.scales, ordered.scales),
        group,
        nearest.table,
        choose(nearest.zeros, ordered.zeros),
    )


def _round_in_order(weight: Tensor, gram: Tensor, kind: str, group: int) -> Grouped:
    """GPTQ (Frantar et al. 2022, algorithm 1): input by input, what rounding loses is made good by
    the inputs that are not rounded yet. A group's grid is fitted to what its weights have become by
    then."""
    n, k = weight.shape
    factor = _inverse_factor(gram)
    importance = gram.diagonal()
    # [k, n]: an input's weights lie in one piece
    rest = weight.T.clone(memory_format=torch.contiguous_format)
    codes = torch.empty((k, n), dtype=torch.uint8)
    grids = []
    for start in range(0, k, group):
        end = min(start + group, k)
        block, losses = rest[start:end], torch.empty((end - start, n))
        grid = fit_grid(block, importance[start:end], kind)
        for row in range(end - start):
            chosen = grid.codes(block[row])
            codes[start + row] = chosen.to(torch.uint8)
            losses[row] = (block[row] - grid.values(chosen)) / factor[start + row, start + row]
            block[row + 1 :] -= factor[start + row, start + row + 1 : end, None] * losses[row]
        rest[end:] -= factor[start:end, end:].T @ losses
        grids.append(grid)
    scales = torch.stack([grid.scales for grid in grids], dim=1).half()
    zeros = torch.stack([grid.zeros for grid in grids], dim=1).to(torch.int8) if kind == "w4" else None
    return Grouped(codes.T.contiguous(), scales, group, torch.tensor(FOUR_BIT_TABLES[kind], dtype=torch.int8), zeros)


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


def fit_grid(weights: Tensor, importance: Tensor, kind: str) -> Grid:
    """The grid with the least mean square error: a group's range is shrunk step by step, which
    clips its ends and makes its steps finer.

    weights: [group, n]; importance: [group], the mean square of each input, by which its weights'
    errors count.
    """
    table = torch.tensor(FOUR_BIT_TABLES[kind], dtype=torch.float32)
    low, high = weights.amin(0).clamp(max=0.0), weights.amax(0).clamp(min=0.0)
    best = least = None
    for shrink in SHRINKS:
        if kind == "nf4":
            scales = (torch.maximum(-low, high) * shrink / 127.0).clamp(min=1e-7).half().float()
            grid = Grid(scales, torch.zeros_like(scales), table)
        else:
            scales = ((high - low) * shrink / 15.0).clamp(min=1e-7).half().float()
            grid = Grid(scales, (-low * shrink / scales).round().clamp(0, 15) - 8, table)
        errors = ((grid.values(grid.codes(weights)) - weights).square() * importance[:, None]).sum(0)
        if best is None or least is None:
            best, least = grid, errors
            continue
        is_better = errors < least
        least = torch.where(is_better, errors, least)
        best = Grid(torch.where(is_better, grid.scales, best.scales), torch.where(is_better, grid.zeros, best.zeros), table)
    assert best is not None
    return best
