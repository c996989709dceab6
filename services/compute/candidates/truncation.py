"""Top-k, top-p and min-p: how many of a row's sorted tokens they keep, and the mass of those."""

import numpy as np

from shared.model.arrays import Array
from shared.model.sampling_params import SamplingParams


def cumulative_mass(logits: Array, temperatures: Array) -> Array:
    """w_0 + … + w_i of sorted tokens, with w_i = exp((l_i - l_0) / T). logits: [R, K] float32,
    falling, -inf beyond a row's list. Returns [R, K] float64."""
    scale = np.where(temperatures > 0, temperatures, 1.0)[:, None]
    weights = np.exp((logits.astype(np.float64) - logits[:, :1]) / scale)
    mass: Array = np.cumsum(weights, axis=1)
    return mass


def kept_of(
    params: SamplingParams, mass: Array, values: Array, total: float, *, is_whole: bool = False
) -> tuple[int, float] | None:
    """How many of a row's first tokens, [count] mass and values, are kept, and the mass of all that
    are kept, these and others; None: more of them are needed.

    total: the mass of all, where truncation depends on it; is_whole: there are no more.
    """
    if not (is_whole or 0 < params.top_k <= len(mass)):
        if params.top_k > 0:
            return None
        if params.top_p == 1.0 and params.min_p == 0.0:
            return len(mass), total
        count = kept_count(mass, params, values, total)
        is_bounded = count < len(mass) or (params.top_p < 1.0 and mass[-1] >= params.top_p * total)
        return (count, float(mass[count - 1])) if is_bounded else None
    count = kept_count(mass, params, values, float(mass[-1]))
    return count, float(mass[count - 1])


def kept_count(mass: Array, params: SamplingParams, values: Array, total: float) -> int:
    """How many of a row's sorted tokens survive; len(mass) may mean "all of these, and perhaps
    more".

    mass, values: [K] of one row's sorted tokens; total: the mass of the whole row.
    """
    count = len(mass)
    if 0 < params.top_k <= count:
        count = params.top_k
        total = float(mass[count - 1])
    if params.top_p < 1.0:
        count = min(count, int(np.searchsorted(mass[:count], params.top_p * total, side="left")) + 1)
    if params.min_p > 0.0:
        weights = np.exp((values[:count].astype(np.float64) - values[0]) / params.temperature)
        count = min(count, int(np.searchsorted(-weights, -params.min_p, side="right")))
    return max(count, 1)
