"""llama.cpp's chain of samplers over a whole row: top-n-sigma, top-k, typical-p, top-p, min-p, XTC,
and the temperature last of all.

Each stage sees the probabilities at temperature 1 of what the one before has left, and leaves a
stretch of the sorted row: a prefix, or, of typical-p and XTC, a stretch from further inside. So a
row whose other tokens `truncate` has set to minus infinity is a plain row:
what is left is drawn at the temperature that `truncate` gives, by the rules of
shared/model/decision.py, and the sampler knows nothing of the chain.

Sources: Holtzman et al. 2020 (top-p); Meister et al. 2023 (typical-p); "Top-nσ", Tang et al. 2024;
Nguyen et al. 2024 (min-p); XTC and dynamic temperature as llama.cpp defines them. Equal logits
stand in the order of their token ids.
"""

import numpy as np

from shared.model.arrays import Array
from shared.model.noise import XTC, uniform
from shared.model.sampling_params import ChainParams, SamplingParams

MAX_TEMPERATURE = 100.0
NOT_FINITE = "the model's numbers for this request's next token are not finite"


def truncate(row: Array, params: SamplingParams, position: int) -> tuple[Array, float]:
    """The tokens that the chain takes away from a row of logits [vocab] float32, as booleans
    [vocab], and the temperature of the draw among the others.

    params: with a chain; position: of the token to be decided. Raises ArithmeticError for a row with a NaN or without a
    finite largest logit.
    """
    chain = params.chain
    assert chain is not None
    if not np.isfinite(row.max()):
        raise ArithmeticError(NOT_FINITE)
    values = np.sort(row[row > -np.inf])[::-1].astype(np.float64)  # falling
    begin, end = 0, len(values)
    if chain.top_n_sigma > 0.0:
        end = int(np.searchsorted(-values, -(values[0] - chain.top_n_sigma * values.std()), side="right"))
    if params.top_k > 0:
        end = min(end, params.top_k)
    if chain.typical_p < 1.0:
        begin, end = typical(values[:end], chain.typical_p)
    if params.top_p < 1.0:
        end = min(
            end,
            begin + int(np.searchsorted(np.cumsum(probabilities(values[begin:end])), params.top_p, side="left")) + 1,
        )
    if params.min_p > 0.0:
        end = begin + int(np.searchsorted(-values[begin:end], -(values[begin] + np.log(params.min_p)), side="right"))
    if is_applied(chain, params.seed, position):
        likely = int(np.count_nonzero(probabilities(values[begin:end]) >= chain.xtc_threshold))
        begin += max(likely - 1, 0)  # of the likely ones only the least likely stays
    return dropped(row, values, begin, end), temperature(values[begin:end], params.temperature, chain)


def probabilities(values: Array) -> Array:
    """Probabilities at temperature 1 of falling logits [n] float64."""
    weights = np.exp(values - values[0])
    found: Array = weights / weights.sum()
    return found


def typical(values: Array, mass: float) -> tuple[int, int]:
    """The stretch [begin, end) of tokens whose surprise is nearest to its mean, the entropy: as few
    as have more than `mass` together."""
    p = probabilities(values)
    surprise = np.log(np.exp(values - values[0]).sum()) - (values - values[0])
    distance = np.abs(surprise - float((p * surprise).sum()))
    order = np.argsort(distance, kind="stable")
    count = min(int(np.searchsorted(np.cumsum(p[order]), mass, side="right")) + 1, len(values))
    border = distance[order[count - 1]]
    within = np.flatnonzero(distance <= border)
    begin, end = int(within[0]), int(within[-1]) + 1
    # several are as far away as the last one: the less likely ones go first, then the likeliest
    surplus = end - begin - count
    tied = min(surplus, int(np.count_nonzero(distance[end - surplus : end] == border)) if surplus else 0)
    return begin + surplus - tied, end - tied


def is_applied(chain: ChainParams, seed: int, position: int) -> bool:
    """Whether XTC is applied to this token: a draw of its own."""
    if chain.xtc_probability <= 0.0 or chain.xtc_threshold > 0.5:
        return False
    return bool(uniform(np.array([seed], np.uint64), np.array([position], np.int32), XTC)[0] < chain.xtc_probability)


def temperature(values: Array, base: float, chain: ChainParams) -> float:
    """The request's, or with a range one within it by how even the candidates are: their entropy's
    share of the largest possible."""
    if chain.dynatemp_range == 0.0:
        return base
    low, high = max(0.0, base - chain.dynatemp_range), base + chain.dynatemp_range
    if len(values) > 1:
        p = probabilities(values)
        entropy = -float((p[p > 0] * np.log(p[p > 0])).sum())
        base = low + (high - low) * (entropy / float(np.log(len(values)))) ** chain.dynatemp_exponent
    return float(np.float32(min(base, MAX_TEMPERATURE)))


def dropped(row: Array, values: Array, begin: int, end: int) -> Array:
    """Tokens of the row that are not at the places [begin, end) of its sorted values."""
    first, last = np.float32(values[begin]), np.float32(values[end - 1])
    outside: Array = ~((row <= first) & (row >= last))
    for value in {float(first), float(last)}:
        equal = np.flatnonzero(row == value)
        places = int(np.searchsorted(-values, -value, side="left")) + np.arange(len(equal))
        outside[equal[(places < begin) | (places >= end)]] = True
    return outside
