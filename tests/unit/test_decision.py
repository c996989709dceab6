"""The decision's parts: the generator against its published vectors, and the prefix that truncation keeps."""

import numpy as np
import pytest

from shared.model.decision import decide, kept_count, pad, philox, uniform

KNOWN = [  # known-answer vectors of the authors' library, philox4x32-10: counter, key, result
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_numbers(counter: list[int], key: list[int], result: list[int]) -> None:
    words = philox(np.array([counter], np.uint64).T, np.array([key], np.uint64).T)
    assert words[:, 0].tolist() == result


def test_uniform_depends_on_seed_and_position_alone() -> None:
    seeds, positions = np.array([1, 2, 1, 1 << 63], np.uint64), np.array([1, 1, 2, 1], np.int32)
    together = uniform(seeds, positions)
    assert len(set(together.tolist())) == 4
    for row in range(4):
        assert uniform(seeds[row : row + 1], positions[row : row + 1])[0] == together[row]
    many = uniform(np.full(20_000, 3, np.uint64), np.arange(20_000))
    assert many.min() >= 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.01


def test_a_draw_is_the_first_token_whose_cumulative_mass_exceeds_it() -> None:
    counts = np.array([3, 3, 3, 2], np.int32)
    logits = pad(np.log(np.array([4, 2, 2, 4, 2, 2, 4, 2, 2, 4, 2], np.float32)), counts, -np.inf)
    ones, mass = np.ones(4), np.array([2.0, 2.0, 2.0, 2.0])  # 1 + 0.5 + 0.5
    assert decide(logits, counts, ones, mass, np.array([0.49, 0.51, 0.99, 0.99])).tolist() == [0, 1, 2, 2]
    assert decide(logits, counts, ones, np.zeros(4), np.array([0.9] * 4)).tolist() == [0, 0, 0, 0]


def test_truncations_keep_a_prefix() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    mass = np.cumsum(np.exp(logits.astype(np.float64) - logits[0]))
    total = float(mass[-1])
    assert kept_count(mass, 0, 1.0, 0.0, 1.0, logits, total) == 4
    assert kept_count(mass, 2, 1.0, 0.0, 1.0, logits, total) == 2
    assert kept_count(mass, 0, 0.6, 0.0, 1.0, logits, total) == 2
    assert kept_count(mass, 0, 0.01, 0.0, 1.0, logits, total) == 1
    assert kept_count(mass, 0, 1.0, 0.4, 1.0, logits, total) == 2
    assert kept_count(mass, 2, 0.6, 0.0, 1.0, logits, total) == 1  # of the two that top-k leaves, the first has two thirds
