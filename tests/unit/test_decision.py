"""The decision: the likeliest sum of logit and noise, who takes part in it, and how often two rows of logits agree."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from services.compute.candidates.truncation import cumulative_mass, kept_count, kept_of
from shared.model.arrays import Array
from shared.model.decision import Draws, decide, pad, weigh
from shared.model.noise import gumbel
from shared.model.sampling_params import SamplingParams
from tests.close_draws import close_draws
from tests.examples import examples


def draws_of(
    logits: Array, num_draws: int, *, tail_mass: float = 0.0, num_kept: int | None = None, temperature: float = 1.0
) -> Draws:
    """One row of logits [K], falling, at positions from 1 of a request with seed 3."""
    count = len(logits)
    return Draws(
        np.broadcast_to(logits.astype(np.float32), (num_draws, count)),
        np.broadcast_to(np.arange(count, dtype=np.int32) * 7, (num_draws, count)),
        np.full(num_draws, num_kept or count, np.int32),
        np.full(num_draws, tail_mass),
        np.full(num_draws, temperature),
        np.full(num_draws, 3, np.uint64),
        np.arange(1, num_draws + 1, dtype=np.int32),
    )


def test_the_kept_and_the_tail_are_drawn_by_their_weights() -> None:
    weights = np.array([8.0, 4.0, 2.0, 1.0])
    columns = decide(draws_of(np.log(weights) * 0.7, 50_000, temperature=0.7, num_kept=3))
    assert (
        stats.chisquare(np.bincount(columns, minlength=4)[:3], weights[:3] / weights[:3].sum() * 50_000).pvalue > 1e-3
        and columns.max() == 2
    )
    columns = decide(draws_of(np.log(weights), 50_000, tail_mass=5 / 8))
    assert stats.chisquare(np.bincount(columns), np.append(weights, 5) / 20 * 50_000).pvalue > 1e-3


def test_one_candidate_needs_no_draw() -> None:
    assert decide(draws_of(np.array([3.0, 2.9]), 100, num_kept=1, temperature=0.0)).tolist() == [0] * 100
    assert set(decide(draws_of(np.array([3.0]), 1000, tail_mass=1.0)).tolist()) == {0, 1}


def test_what_beats_everybody_by_far_always_wins() -> None:
    columns = decide(draws_of(np.array([50.0, 1.0, 0.0, -1e30]), 10_000, tail_mass=1e-12, temperature=1.0))
    assert (columns == 0).mean() > 0.9999


def test_a_row_s_draw_depends_on_the_row_alone() -> None:
    """Among rows of other widths, greedy ones, and ones with a tail."""
    rng = np.random.default_rng(2)
    num_kept = rng.integers(1, 9, 300).astype(np.int32)
    together = Draws(
        -np.sort(-rng.normal(size=(300, 8)).astype(np.float32), axis=1),
        rng.permuted(np.arange(2400, dtype=np.int32)).reshape(300, 8),
        num_kept,
        np.where((num_kept == 8) & (rng.random(300) < 0.5), 0.7, 0.0),
        rng.uniform(0.2, 2.0, 300),
        rng.integers(0, 1 << 63, 300).astype(np.uint64),
        rng.integers(1, 99, 300).astype(np.int32),
    )
    columns = decide(together)
    for row in range(300):
        one = Draws(*(getattr(together, each.name)[row : row + 1] for each in dataclasses.fields(Draws)))
        assert decide(one)[0] == columns[row]
        narrow = dataclasses.replace(
            one, logits=one.logits[:, : num_kept[row]], token_ids=one.token_ids[:, : num_kept[row]]
        )
        assert decide(narrow)[0] == columns[row]


def test_close_draws_are_decided_by_our_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's may err in its last bits, or be another machine's: that changes nothing."""
    close = close_draws(2_000)
    shifted, u = weigh(close)
    expected = np.minimum((shifted + gumbel(u)).argmax(axis=1), close.num_kept).tolist()
    assert 0.2 < np.mean(np.array(expected) == 0) < 0.8
    assert decide(close).tolist() == expected
    exact = np.log
    for towards in (-np.inf, np.inf):
        monkeypatch.setattr(
            np, "log", lambda x, out=None, towards=towards: np.nextafter(exact(x, out=out), towards, out=out)
        )
        assert decide(close).tolist() == expected


def agreement(target: Array, draft: Array, num_draws: int) -> float:
    """The share of draws from two distributions over the same tokens that are the same token."""
    found = []
    for p in (target, draft):
        order = np.argsort(-p, kind="stable")
        row = draws_of(np.log(p[order]), num_draws)
        ids = np.broadcast_to(order.astype(np.int32), row.token_ids.shape)
        found.append(order[decide(dataclasses.replace(row, token_ids=ids))])
    return float((found[0] == found[1]).mean())


@examples(60)
@given(
    size=st.integers(2, 40),
    spread=st.sampled_from([0.5, 1.5, 3.0]),
    error=st.sampled_from([0.0, 0.1, 0.5, 2.0]),
    seed=st.integers(0, 1 << 30),
)
def test_a_draft_by_the_same_noise_agrees_as_often_as_is_promised(
    size: int, spread: float, error: float, seed: int
) -> None:
    """At least in (1 - d) / (1 + d) of the draws, at a distance d in total variation; and never
    more often than anybody could, 1 - d.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=size) * spread
    target, draft = (
        np.exp(each - each.max()) / np.exp(each - each.max()).sum()
        for each in (logits, logits + rng.normal(size=size) * error)
    )
    distance = 0.5 * np.abs(target - draft).sum()
    found = agreement(target, draft, 4_000)
    slack = 4.0 * 0.5 / np.sqrt(4_000)  # four standard deviations
    assert (1 - distance) / (1 + distance) - slack <= found <= 1 - distance + slack
    assert error > 0.0 or found == 1.0


def test_rows_are_padded_to_one_width() -> None:
    assert pad(np.array([1.0, 2.0, 3.0]), np.array([2, 1]), -np.inf).tolist() == [[1.0, 2.0], [3.0, -np.inf]]


def test_truncations_keep_a_prefix() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    mass = cumulative_mass(logits[None], np.ones(1))[0]
    total = float(mass[-1])

    def kept(**params: float) -> int:
        return kept_count(mass, SamplingParams(**params), logits, total)  # type: ignore[arg-type]

    assert [kept(), kept(top_k=2), kept(top_p=0.6), kept(top_p=0.01), kept(min_p=0.4)] == [4, 2, 2, 1, 2]
    assert kept(top_k=2, top_p=0.6) == 1  # of the two that top-k leaves, the first has two thirds


def test_a_list_says_whether_it_is_long_enough() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125], np.float32))
    mass = cumulative_mass(logits[None], np.ones(1))[0]
    assert kept_of(SamplingParams(), mass, logits, 2.0) == (3, 2.0)
    assert kept_of(SamplingParams(), mass, logits, float(mass[-1]), is_whole=True) == (3, mass[-1])
    assert kept_of(SamplingParams(top_k=2), mass, logits, 2.0) == (2, mass[1])
    assert kept_of(SamplingParams(top_k=4), mass, logits, 2.0) is None
    assert kept_of(SamplingParams(top_p=0.7), mass, logits, 2.0) == (2, mass[1])
    assert kept_of(SamplingParams(top_p=0.95), mass, logits, 2.0) is None
    assert kept_of(SamplingParams(min_p=0.4), mass, logits, 2.0) == (2, mass[1])
    assert kept_of(SamplingParams(min_p=0.2), mass, logits, 2.0) is None
