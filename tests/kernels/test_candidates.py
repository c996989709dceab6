"""Candidate sets are exact: the sampler's draws have the full vocabulary's distribution, and the
same seed draws the same token.
"""

import itertools
import random

import numpy as np
import pytest
import torch
from scipy import stats

from services.compute.backends.backend import RowSearch
from services.compute.backends.buffers import ensure_works
from services.compute.backends.choose import choose_backend
from services.compute.backends.torch.row_search import CHUNK, TorchRowSearch, largest_on_device
from services.compute.candidates import reduction as reduction_module
from services.compute.candidates.chain import NOT_FINITE
from services.compute.candidates.draw import SortedHead
from services.compute.candidates.reduction import reduce
from services.compute.candidates.rows import CandidateRows
from services.compute.sequence import Request, RowKey, Sequence, Tokens
from shared.model.arrays import Array
from shared.model.sampling_params import SamplingParams
from shared.wire.messages import encode
from tests.kernels.draws import decided, draw_many, sent

SEARCH = choose_backend(torch.bfloat16, torch.device("cpu")).row_search  # native where that is built
VOCAB = 3000
NUM_DRAWS = 20_000


def make_logits(spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def exact(logits: torch.Tensor, params: SamplingParams, tokens: list[int] | None = None) -> Array:
    """The distribution by its definition, on the whole row in float64."""
    row = logits.double().numpy().copy()
    for token in {7, 8, *(tokens or [])}:
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(tokens or []):
        row[token] -= params.frequency_penalty * (tokens or []).count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if params.allowed_token_ids:
        row[np.setdiff1d(np.arange(len(row)), params.allowed_token_ids)] = -np.inf
    order = np.argsort(-row, kind="stable")
    probabilities = np.exp((row[order] - row.max()) / params.temperature)
    if params.top_k:
        probabilities[params.top_k :] = 0
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        before = np.cumsum(probabilities) - probabilities
        probabilities[before >= params.top_p] = 0
    probabilities[probabilities < params.min_p * probabilities[0]] = 0
    result = np.zeros(len(row))
    result[order] = probabilities / probabilities.sum()
    return result


HISTORY = [5, 5, 5, 11, 200, 11]
CASES = {
    "plain": (SamplingParams(), 1.0, None),
    "peaked": (SamplingParams(temperature=0.7), 3.0, None),
    "hot": (SamplingParams(temperature=1.7), 1.0, None),
    "top-k": (SamplingParams(top_k=20), 1.0, None),
    "large top-k": (SamplingParams(top_k=700), 1.0, None),
    "top-p in the list": (SamplingParams(top_p=0.8), 3.0, None),
    "top-p beyond the list": (SamplingParams(top_p=0.6, temperature=1.2), 1.0, None),
    "min-p": (SamplingParams(min_p=0.1), 1.5, None),
    "min-p beyond the list": (SamplingParams(min_p=0.02), 1.0, None),
    "all": (SamplingParams(top_k=100, top_p=0.9, min_p=0.03, temperature=1.3), 1.5, None),
    "large top-k and top-p": (SamplingParams(top_k=900, top_p=0.7, temperature=1.1), 1.0, None),
    "penalties": (SamplingParams(frequency_penalty=0.5, presence_penalty=0.7, repetition_penalty=1.3), 2.0, HISTORY),
    "masked, top-p beyond the list": (
        SamplingParams(allowed_token_ids=tuple(range(5, VOCAB, 3)), top_p=0.7),
        0.5,
        None,
    ),
    "masked to fewer than are listed": (
        SamplingParams(allowed_token_ids=(3, 50, 700, 2999), top_p=0.95, min_p=0.01),
        1.0,
        None,
    ),
    "masked to fewer than top-k": (
        SamplingParams(allowed_token_ids=tuple(range(30)), top_k=40, temperature=1.5),
        2.0,
        None,
    ),
    "bias": (SamplingParams(logit_bias={3: 6.0, 4: -100.0}, top_p=0.9), 1.0, []),
}


@pytest.mark.parametrize("name", CASES)
def test_the_draws_have_the_full_vocabulary_s_distribution(name: str) -> None:
    """Chi-square over 20,000 draws; tokens expected fewer than 8 times are counted as one."""
    params, spread, history = CASES[name]
    logits = make_logits(spread)
    expected = exact(logits, params, history) * NUM_DRAWS
    counts = np.bincount(draw_many(logits, params, NUM_DRAWS, SEARCH, history), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    often = expected >= 8
    observed, wanted = counts[often], expected[often]
    if (rest := expected[~often].sum()) > 8:
        observed, wanted = np.append(observed, counts[~often].sum()), np.append(wanted, rest)
    wanted = wanted * observed.sum() / wanted.sum()
    assert len(wanted) > 1
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_a_draw_does_not_depend_on_the_batch(search: RowSearch) -> None:
    """The same row alone and among others with longer lists, greedy ones and penalized ones: the
    same candidates, byte for byte.
    """
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3))
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=200),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3, top_p=0.5),
        SamplingParams(temperature=0.0, logprobs=5),
        SamplingParams(seed=4, frequency_penalty=1.0),
    ]

    def sequences() -> list[Sequence]:
        return [Sequence(Request(handle, "r", each), Tokens([1, 2, 3], 2)) for handle, each in enumerate(params)]

    together = reduce(logits.clone(), sequences(), search)
    for row, sequence in enumerate(sequences()):
        alone = reduce(logits[row : row + 1].clone(), [sequence], search)
        assert message_of(alone, 0) == message_of(together, row)


def message_of(rows: CandidateRows, row: int) -> bytes:
    return encode(rows.message([row], "c", 1, (), []))


def random_params(rng: random.Random) -> SamplingParams:
    """Any kind of request."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.05, 0.7, 1.0, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 5, 64, 65, 300, 900]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.2, 1.0]),
        seed=rng.getrandbits(64),
        logprobs=rng.choice([None, None, 0, 20]),
        frequency_penalty=rng.choice([0.0, 0.0, 1.5, -2.0]),
        presence_penalty=rng.choice([0.0, 0.0, 2.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        logit_bias=rng.choice([{}, {}, {9: 50.0, 10: -100.0}]),
        min_tokens=rng.choice([0, 6]),
        stop_token_ids=(rng.randrange(VOCAB),),
    )


def random_step(rng: random.Random, num_rows: int) -> tuple[torch.Tensor, list[Sequence]]:
    """Sharp, broad and flat rows; in some most logits are tied."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    spreads = torch.tensor([rng.choice([0.3, 1.0, 3.0, 10.0]) for _ in range(num_rows)])
    logits = torch.randn(num_rows, VOCAB, generator=generator) * spreads[:, None]
    tied = torch.tensor([rng.random() < 0.3 for _ in range(num_rows)])
    logits[tied] = (logits[tied] * 2).round() / 2
    outputs = [rng.choices(range(20), k=rng.randrange(12)) for _ in range(num_rows)]
    return logits, [
        Sequence(Request(number, "r", random_params(rng), eos_token_ids=(1,)), Tokens([7, 8, *output], 2))
        for number, output in enumerate(outputs)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_what_compute_foresees_is_what_the_sampler_decides(seed: int) -> None:
    """300 rows of any kind in one step, to three samplers, in messages of different widths."""
    rng = random.Random(seed)
    logits, sequences = random_step(rng, 300)
    rows = reduce(logits, sequences, SEARCH)
    assert not rows.failures and rows.handles.tolist() == list(range(300))
    assert rows.previous_token_ids.tolist() == [
        sequence.tokens.ids[-1] if sequence.tokens.num_output else -1 for sequence in sequences
    ]
    for sampler in range(3):
        which = [row for row in range(300) if row % 5 % 3 == sampler]
        assert decided(sent(rows, which), [sequences[row] for row in which]).tolist() == rows.chosen[which].tolist()


FAULTS = {  # the request, what is wrong with its row, and what the failure says of it
    "nothing but NaN": (SamplingParams(temperature=0.0), lambda row: row.fill_(torch.nan), NOT_FINITE),
    "one NaN in a greedy row": (SamplingParams(temperature=0.0), lambda row: row[2999].fill_(torch.nan), NOT_FINITE),
    "one NaN beside a short list": (SamplingParams(top_k=3), lambda row: row[VOCAB // 2].fill_(torch.nan), NOT_FINITE),
    "NaN in a row drawn at random": (SamplingParams(), lambda row: row[3:500].fill_(torch.nan), NOT_FINITE),
    "NaN where logprobs are asked": (
        SamplingParams(temperature=0.0, logprobs=0),
        lambda row: row[17].fill_(torch.nan),
        NOT_FINITE,
    ),
    "NaN behind a long list": (
        SamplingParams(top_p=0.99, temperature=2.0),
        lambda row: row[2000].fill_(torch.nan),
        NOT_FINITE,
    ),
    "an overflow": (SamplingParams(temperature=0.0), lambda row: row[3].fill_(torch.inf), NOT_FINITE),
    "an overflow, drawn at random": (SamplingParams(top_k=3), lambda row: row[3].fill_(torch.inf), NOT_FINITE),
    "nothing left": (SamplingParams(temperature=0.5, min_p=0.1), lambda row: row.fill_(-torch.inf), NOT_FINITE),
    "a bias that overflows": (
        SamplingParams(temperature=0.0, logit_bias={5: 100.0}),
        lambda row: row[5].fill_(torch.inf),
        NOT_FINITE,
    ),
    "a bias for a token that is not there": (SamplingParams(logit_bias={VOCAB: 1.0}), lambda row: row, "out of bounds"),
    "a penalty for a token that is not there": (
        SamplingParams(repetition_penalty=1.5, seed=1 << 20),
        lambda row: row,
        "out of bounds",
    ),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says so, and goes on
@pytest.mark.parametrize("names", [[name] for name in FAULTS] + [list(FAULTS)])
def test_a_row_that_cannot_be_reduced_fails_alone(names: list[str], search: RowSearch) -> None:
    """The others come out bit for bit as they do alone."""
    rng = random.Random(5)
    logits, sequences = random_step(rng, 12 + len(names))
    bad = dict(zip(rng.sample(range(len(sequences)), len(names)), names, strict=True))
    for row, name in bad.items():
        params, spoil, _ = FAULTS[name]
        spoil(logits[row])
        prompt = [7, VOCAB + 5] if "penalty" in name else [7, 8]
        sequences[row] = Sequence(Request(row, "r", params), Tokens([*prompt, 4], 2))
    alone = {row: reduce(logits[row : row + 1].clone(), [sequence], search) for row, sequence in enumerate(sequences)}
    together = reduce(logits.clone(), sequences, search)
    assert sorted(together.failures) == [(row, 2) for row in sorted(bad)]
    for row, name in bad.items():
        key = RowKey(row, 2)
        assert FAULTS[name][2] in together.failures[key].message
        assert alone[row].failures == {key: together.failures[key]} and len(alone[row].handles) == 0
    good = [row for row in range(len(sequences)) if row not in bad]
    assert together.handles.tolist() == good
    for at, row in enumerate(good):
        assert message_of(together, at) == message_of(alone[row], 0)
        assert together.chosen[at] == alone[row].chosen[0]


def test_a_device_that_fails_is_no_rows_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row's edits fail the device is asked; and what it says, or that its memory is full, ends the step."""
    bad = Sequence(Request(0, "r", SamplingParams(logit_bias={VOCAB: 1.0})), Tokens([7, 8], 2))
    assert reduce(make_logits(1.0)[None], [bad], SEARCH).failures
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: pytest.fail("a CPU has no CUDA"))
    ensure_works(torch.device("cpu"))

    def broken(_: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(torch.AcceleratorError):
        ensure_works(torch.device("cuda"))
    nan = torch.full((1, VOCAB), torch.nan)
    with monkeypatch.context() as patch:
        patch.setattr(reduction_module, "ensure_works", broken)
        for logits, sequence in (
            (make_logits(1.0)[None], bad),
            (nan, Sequence(Request(0, "r", SamplingParams()), Tokens([7, 8], 2))),
        ):
            with pytest.raises(torch.AcceleratorError):
                reduce(logits, [sequence], SEARCH)
    for name in ("edits_of", "fill"):
        with monkeypatch.context() as patch:
            patch.setattr(reduction_module, name, full)
            with pytest.raises(torch.OutOfMemoryError):
                reduce(make_logits(1.0)[None], [bad], SEARCH)


def test_greedy_lists_one_candidate_and_the_first_of_equal_ones() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [40, 2000]] = 1.0
    rows = reduce(
        logits,
        [Sequence(Request(handle, "r", SamplingParams(temperature=0.0)), Tokens([1], 1)) for handle in range(2)],
        SEARCH,
    )
    assert rows.token_ids.tolist() == [[0], [40]]
    assert rows.counts.tolist() == [1, 1]


@pytest.mark.pairwise
@pytest.mark.parametrize(("vocab", "k"), list(itertools.product([130, 2048, 5003], [1, 2, 20, 64])))
@pytest.mark.parametrize("place", ["native", "numpy", "device"])
def test_the_largest_are_in_order_with_ties_by_id(vocab: int, k: int, place: str) -> None:
    """Rounded to quarters, so that most values are tied, at the list's border too. The GPU's way
    runs on the CPU as well.
    """
    logits = (torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab + k)) * 4).round() / 4
    logits[-1, 5:] = -torch.inf
    if place == "native":
        values, ids = SEARCH.find_largest(logits, k)
    elif place == "numpy":
        values, ids = TorchRowSearch().find_largest(logits, k)
    elif k <= vocab // CHUNK:
        values, ids = largest_on_device(logits, k, vocab // CHUNK)
    else:
        pytest.skip("fewer chunks than are wanted: the whole row is sorted")
    for row in range(len(logits)):
        order = np.lexsort((np.arange(vocab), -logits[row].numpy()))[:k]
        assert ids[row].tolist() == order.tolist()
        assert values[row].tolist() == logits[row].numpy()[order].tolist()


@pytest.mark.pairwise
@pytest.mark.parametrize(("vocab", "k"), list(itertools.product([130, 2048, 5003], [1, 2, 20, 64])))
@pytest.mark.parametrize("place", ["native", "numpy", "device"])
def test_a_row_says_that_it_has_a_nan(vocab: int, k: int, place: str) -> None:
    """Wherever it stands; also where many logits are tied at the list's border, or are banned. The
    rows beside it are as ever.
    """
    places = [0, 15, 63, 64, vocab // 2, vocab - 3, vocab - 1]
    logits = (torch.randn(len(places) + 2, vocab, generator=torch.Generator().manual_seed(vocab + k)) * 2).round()
    logits[2, 5:] = -torch.inf
    clean = logits[-2:].clone()
    for row, at in enumerate(places):
        logits[row, at] = torch.nan
    if place == "device" and k > vocab // CHUNK:
        pytest.skip("fewer chunks than are wanted: the whole row is sorted")
    find = {
        "native": SEARCH.find_largest,
        "numpy": TorchRowSearch().find_largest,
        "device": lambda some, k: largest_on_device(some, k, vocab // CHUNK),
    }[place]
    (values, ids), expected = find(logits, k), find(clean, k)
    assert np.isnan(values[:-2, 0]).all() and ((ids >= 0) & (ids < vocab)).all()
    assert (values[-2:] == expected[0]).all() and (ids[-2:] == expected[1]).all()


def test_the_mass_of_a_row_is_the_same_by_numpy() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    some = (np.array([3, 0]), logits.amax(1).numpy()[[3, 0]], np.array([0.7, 1.3], np.float32))
    np.testing.assert_allclose(
        SEARCH.total_masses(logits, *some), TorchRowSearch().total_masses(logits, *some), rtol=1e-5
    )


def test_a_sorted_row_knows_which_token_is_where() -> None:
    row = (torch.randn(700, generator=torch.Generator().manual_seed(1)) * 4).round() / 4
    order = np.lexsort((np.arange(len(row)), -row.numpy()))
    weights = np.exp((row.double().numpy()[order] - float(row.max())) / 0.7)
    for reach, count in ((1.0, 3), (8.0, 143), (np.inf, 700)):
        head = SortedHead(row.numpy(), 0.7, reach)
        assert len(head.mass) == (row >= row.max() - 0.7 * reach).sum() >= count
        assert head.is_whole == (reach == np.inf)
        assert [head.token_at(place) for place in range(len(head.mass))] == order[: len(head.mass)].tolist()
        np.testing.assert_allclose(head.mass, weights.cumsum()[: len(head.mass)], rtol=1e-12)


def test_min_tokens_bans_what_would_end_the_answer() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [9, 10]] = 50.0
    params = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=(10,))
    early = Sequence(Request(0, "r", params, eos_token_ids=(9,)), Tokens([1, 2], 2))
    late = Sequence(Request(1, "r", params, eos_token_ids=(9,)), Tokens([1, 2, 3], 2))
    assert reduce(logits, [early, late], SEARCH).token_ids[:, 0].tolist() == [0, 9]


def test_bytes_of_a_step_are_kilobytes() -> None:
    """Batch 32 with Qwen's vocabulary: what crosses to the sampler, without and with random sampling."""
    logits = torch.randn(32, 151_936, generator=torch.Generator().manual_seed(0)) * 3
    sizes = {}
    for name, params in {
        "greedy": SamplingParams(temperature=0.0),
        "top-p": SamplingParams(top_p=0.9, temperature=0.8),
        "plain": SamplingParams(),
    }.items():
        rows = reduce(
            logits.clone(), [Sequence(Request(handle, "r", params), Tokens([1], 1)) for handle in range(32)], SEARCH
        )
        sizes[name] = len(encode(rows.message(list(range(32)), "compute-0123456789ab", 1000, (), [])))
    assert sizes["greedy"] < 2_000
    assert sizes["top-p"] == sizes["plain"] < 20_000
