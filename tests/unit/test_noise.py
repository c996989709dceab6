"""The noise: generators against their published vectors, the logarithm against one of more digits,
and the distribution.
"""

import numpy as np
import pytest
from scipy import stats

from shared.model.arrays import Array
from shared.model.noise import TAIL, TAIL_ID, TOKEN, XTC, gumbel, log, philox, row_bits, token_bits, uniform, unit

KNOWN = [  # known-answer vectors of the authors' library, philox4x32-10: counter, key, result
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
SPLITMIX = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]  # of the state 1234567
NUM_DRAWS = 200_000


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_numbers(counter: list[int], key: list[int], result: list[int]) -> None:
    words = philox(np.array([counter, counter], np.uint64).T, np.array([key, key], np.uint64).T)
    assert words.T.tolist() == [result, result]


def test_a_token_takes_its_own_output_of_splitmix() -> None:
    assert token_bits(np.array([1234567], np.uint64), np.arange(5, dtype=np.int32)[None]).tolist() == [SPLITMIX]
    states = np.array([1234567, 0, (1 << 64) - 1], np.uint64)
    ids = np.array([[TAIL_ID, 3], [7, TAIL_ID], [2**31 - 1, 0]], np.int32)
    together = token_bits(states, ids)
    assert together[0, 1] == SPLITMIX[3] and len(set(together.ravel().tolist())) == 6
    for row in range(3):
        assert token_bits(states[row : row + 1], ids[row : row + 1, 1:]).tolist() == [[together[row, 1]]]


def test_a_number_depends_on_seed_position_and_purpose_alone() -> None:
    seeds, positions = np.array([1, 2, 1, 1 << 63], np.uint64), np.array([1, 1, 2, 1], np.int32)
    found = np.concatenate([uniform(seeds, positions, purpose) for purpose in (TOKEN, XTC, TAIL)])
    assert len(set(found.tolist())) == 12
    for row in range(4):
        assert uniform(seeds[row : row + 1], positions[row : row + 1], TOKEN)[0] == found[row]


def test_a_number_is_neither_0_nor_1_and_its_noise_is_finite() -> None:
    bits = np.array([0, (1 << 12) - 1, 1 << 12, 1 << 63, (1 << 64) - (1 << 12), (1 << 64) - 1], np.uint64)
    u = unit(bits)
    assert u.tolist() == [2.0**-53, 2.0**-53, 3 * 2.0**-53, 0.5 + 2.0**-53, 1 - 2.0**-53, 1 - 2.0**-53]
    noise = gumbel(u)
    assert (
        (np.diff(noise) >= 0).all() and noise[0] == pytest.approx(-3.6037789) and noise[-1] == pytest.approx(36.7368006)
    )


def of_all_sizes() -> Array:
    """Normal numbers above 0, [n] float64: of every binade, near 1 and near the borders of the reduction."""
    rng = np.random.default_rng(1)
    around = [
        np.nextafter(value, towards) for value in (0.5, np.sqrt(0.5), 1.0, np.sqrt(2.0), 2.0) for towards in (0.0, 4.0)
    ]
    return np.concatenate(
        [
            rng.random(100_000),
            1 + rng.uniform(-1e-3, 1e-3, 100_000),
            np.exp(rng.uniform(-708, 709, 100_000)),
            2.0 ** np.arange(-1022, 1024),
            1 - 2.0 ** -np.arange(1.0, 54),
            1 + 2.0 ** -np.arange(1.0, 53),
            around,
            [np.finfo(np.float64).tiny, np.finfo(np.float64).max],
        ]
    )


def test_the_logarithm_is_within_two_units_in_the_last_place() -> None:
    x = of_all_sizes()
    x = x[x != 1.0]
    assert log(np.ones(1))[0] == 0.0
    exact = np.log(x.astype(np.longdouble))
    assert np.finfo(np.longdouble).nmant >= 63, "no longer numbers to compare with"
    assert (np.abs(log(x) - exact) / np.spacing(np.abs(exact.astype(np.float64)))).max() < 2.0


def test_the_noise_is_gumbels_in_seeds_positions_and_tokens_and_no_two_have_to_do_with_each_other() -> None:
    count = np.arange(NUM_DRAWS)
    fixed = np.full(NUM_DRAWS, 9)

    def noise(seeds: Array, positions: Array, token_ids: Array) -> Array:
        return gumbel(
            unit(token_bits(row_bits(seeds.astype(np.uint64), positions.astype(np.int32), TOKEN), token_ids[:, None]))
        )[:, 0]

    along = [
        noise(count, fixed, fixed),
        noise(fixed, count, fixed),
        noise(fixed, fixed, count),
        noise(count + 1, fixed, fixed),
    ]
    for each in along:
        assert stats.kstest(each, stats.gumbel_r.cdf).pvalue > 1e-3
        assert stats.kstest(each[-2000:], stats.gumbel_r.cdf).pvalue > 1e-3
    neighbours = [(each[1:], each[:-1]) for each in along]
    for a, b in [*neighbours, *((along[0], each) for each in along[1:])]:
        shares = [np.floor(stats.gumbel_r.cdf(each) * 16) for each in (a, b)]
        pairs = np.bincount((shares[0] * 16 + shares[1]).astype(int), minlength=256)
        assert stats.chisquare(pairs).pvalue > 1e-3
