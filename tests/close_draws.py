"""Draws that the last bits of the noise decide: whoever makes noise of other bits decides some of them otherwise."""

import numpy as np

from shared.model.decision import Draws, weigh
from shared.model.noise import gumbel


def close_draws(num_rows: int, seed: int = 0) -> Draws:
    """Rows of two candidates, or of one and a tail, at the temperature at which their sums with
    noise are equal, or one or two of its neighbours.
    """
    rng = np.random.default_rng(seed)
    is_tail = rng.random(num_rows) < 0.3
    plain = Draws(
        logits=np.column_stack([np.zeros(num_rows), -rng.uniform(0.01, 3.0, num_rows)]).astype(np.float32),
        token_ids=rng.integers(0, 1 << 20, (num_rows, 2)).astype(np.int32),
        num_kept=np.full(num_rows, 2, np.int32),
        tail_mass=np.zeros(num_rows),
        temperatures=np.ones(num_rows),
        seeds=rng.integers(0, 1 << 63, num_rows).astype(np.uint64) * np.uint64(2)
        + rng.integers(0, 2, num_rows).astype(np.uint64),
        positions=rng.integers(1, 1 << 24, num_rows).astype(np.int32),
    )
    noise = gumbel(weigh(plain)[1])
    ahead = noise[:, 1] - noise[:, 0]
    # the second has to be ahead in its noise: of the others the two change places
    plain.token_ids[ahead < 0] = plain.token_ids[ahead < 0, ::-1]
    temperatures = -plain.logits[:, 1].astype(np.float64) / np.abs(ahead)
    for _ in range(2):
        temperatures = np.where(
            rng.random(num_rows) < 0.5, temperatures, np.nextafter(temperatures, rng.choice([0.0, np.inf], num_rows))
        )
    # of a tail it is the mass that makes the two equal
    lead = gumbel(weigh(plain)[1])[:, [0, 2]]
    tail_mass = np.exp(lead[:, 0] - lead[:, 1])
    tail_mass = np.where(
        rng.random(num_rows) < 0.5, tail_mass, np.nextafter(tail_mass, rng.choice([0.0, np.inf], num_rows))
    )
    return Draws(
        plain.logits,
        plain.token_ids,
        np.where(is_tail, 1, 2).astype(np.int32),
        np.where(is_tail, tail_mass, 0.0),
        temperatures,
        plain.seeds,
        plain.positions,
    )
