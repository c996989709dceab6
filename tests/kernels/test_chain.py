"""llama.cpp's chain of samplers: stage by stage what its definition says, over the whole row, and
the draws have the distribution that is left.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from scipy import stats

from services.compute.backends.backend import RowSearch
from services.compute.backends.choose import choose_backend
from services.compute.candidates.chain import is_applied, truncate
from services.compute.candidates.reduction import reduce
from services.compute.sequence import Request, RowKey, Sequence, Tokens
from shared.model.noise import TOKEN, uniform
from shared.model.sampling_params import ChainParams, SamplingParams
from shared.wire.messages import encode
from tests.examples import examples
from tests.kernels.draws import draw_many

SEARCH = choose_backend(torch.bfloat16, torch.device("cpu")).row_search
VOCAB = 800
NUM_DRAWS = 20_000
OFF = ChainParams()


# one branch a stage
def left_by_definition(row: torch.Tensor, params: SamplingParams, position: int) -> tuple[list[int], float]:  # noqa: C901
    """The tokens that the chain leaves, by falling logit, and the temperature: a list of (logit,
    token), each stage a loop over it as llama.cpp's is.
    """
    chain = params.chain or OFF
    finite = sorted(
        ((value, token) for token, value in enumerate(row.double().tolist()) if value > -math.inf),
        key=lambda each: (-each[0], each[1]),
    )
    if chain.top_n_sigma > 0:
        numbers = torch.tensor([value for value, _ in finite], dtype=torch.float64)
        least = numbers.max() - chain.top_n_sigma * numbers.std(correction=0)
        finite = [each for each in finite if each[0] >= least]
    if params.top_k > 0:
        finite = finite[: params.top_k]
    if chain.typical_p < 1:
        p = softmax(finite)
        entropy = -sum(each * math.log(each) for each in p)
        order = sorted(range(len(finite)), key=lambda place: (abs(-math.log(p[place]) - entropy), place))
        kept, mass = [], 0.0
        for place in order:
            kept.append(place)
            mass += p[place]
            if mass > chain.typical_p:
                break
        finite = [finite[place] for place in sorted(kept)]
    if params.top_p < 1:
        mass = 0.0
        for count, each in enumerate(softmax(finite), 1):
            mass += each
            if mass >= params.top_p:
                finite = finite[:count]
                break
    if params.min_p > 0:
        finite = [each for each in finite if each[0] >= finite[0][0] + math.log(params.min_p)]
    if is_applied(chain, params.seed, position) and len(finite) > 1:
        likely = sum(each >= chain.xtc_threshold for each in softmax(finite))
        finite = finite[max(likely - 1, 0) :]
    temperature = params.temperature
    if chain.dynatemp_range > 0:
        low, high = max(0.0, temperature - chain.dynatemp_range), temperature + chain.dynatemp_range
        if len(finite) > 1:
            p = softmax(finite)
            entropy = -sum(each * math.log(each) for each in p if each > 0)
            temperature = low + (high - low) * (entropy / math.log(len(finite))) ** chain.dynatemp_exponent
    return [token for _, token in finite], temperature


def softmax(finite: list[tuple[float, int]]) -> list[float]:
    p: list[float] = torch.softmax(torch.tensor([value for value, _ in finite], dtype=torch.float64), dim=0).tolist()
    return p


chains = st.builds(
    ChainParams,
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
    typical_p=st.sampled_from([1.0, 1.0, 0.2, 0.7, 0.95]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 0.6]),
    dynatemp_range=st.sampled_from([0.0, 0.5, 3.0]),
    dynatemp_exponent=st.sampled_from([0.5, 1.0, 2.0]),
)
requests = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 40, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    seed=st.integers(0, (1 << 64) - 1),
    chain=chains,
)


@examples(400)
@given(
    params=requests,
    seed=st.integers(0, 1 << 30),
    spread=st.sampled_from([0.2, 1.0, 4.0]),
    vocab=st.sampled_from([1, 2, 7, 130]),
    banned=st.integers(0, 5),
)
def test_what_is_left_is_what_the_definition_leaves(
    params: SamplingParams, seed: int, spread: float, vocab: int, banned: int
) -> None:
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    row[: min(banned, vocab - 1)] = -torch.inf
    assert params.chain is not None
    dropped, temperature = truncate(row.numpy(), params, 3)
    expected, expected_temperature = left_by_definition(row, params, 3)
    assert sorted(expected) == np.flatnonzero(~dropped).tolist()
    assert temperature == pytest.approx(expected_temperature, rel=1e-5)


@examples(200)
@given(params=requests, seed=st.integers(0, 1 << 30))
def test_equal_logits_are_as_many_as_the_definition_leaves(params: SamplingParams, seed: int) -> None:
    """Rounded to halves: which of two tokens that are equally far from the entropy goes first is
    nobody's definition, how likely those are that stay is.
    """
    row = (torch.randn(60, generator=torch.Generator().manual_seed(seed)) * 2).round() / 2
    assert params.chain is not None
    dropped, _ = truncate(row.numpy(), params, 3)
    expected, _ = left_by_definition(row, params, 3)
    if params.chain.typical_p == 1:
        assert sorted(expected) == np.flatnonzero(~dropped).tolist()
    assert (~dropped).any() and not (
        dropped & (row.numpy() > row.numpy()[~dropped].min()) & (row.numpy() < row.numpy()[~dropped].max())
    ).any()


CASES = {
    "top-n-sigma": (SamplingParams(chain=ChainParams(top_n_sigma=1.5), temperature=1.3), 2.0),
    "typical-p": (SamplingParams(chain=ChainParams(typical_p=0.6)), 1.0),
    "typical-p of a peaked row": (SamplingParams(chain=ChainParams(typical_p=0.5), temperature=0.8), 3.0),
    "XTC, always": (SamplingParams(chain=ChainParams(xtc_probability=1.0, xtc_threshold=0.02)), 3.0),
    "dynamic temperature": (
        SamplingParams(chain=ChainParams(dynatemp_range=0.6, dynatemp_exponent=1.5), temperature=0.9, top_k=200),
        2.0,
    ),
    "all": (
        SamplingParams(
            top_k=300, top_p=0.9, min_p=0.01, temperature=1.2, chain=ChainParams(2.5, 0.9, 1.0, 0.03, 0.3, 1.0)
        ),
        2.0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_draws_have_the_distribution_that_is_left(name: str) -> None:
    params, spread = CASES[name]
    params = structs.replace(params, seed=99)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * spread
    left, temperature = left_by_definition(logits, params, 1)
    expected = np.zeros(VOCAB)
    expected[left] = torch.softmax(logits[left].double() / temperature, dim=0).numpy() * NUM_DRAWS
    counts = np.bincount(draw_many(logits, params, NUM_DRAWS, SEARCH), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    often = expected >= 8
    observed, wanted = counts[often], expected[often]
    if (rest := expected[~often].sum()) > 8:
        observed, wanted = np.append(observed, counts[~often].sum()), np.append(wanted, rest)
    assert len(wanted) > 1
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


def test_xtc_is_applied_as_often_as_asked_and_does_not_depend_on_the_draw() -> None:
    chain = ChainParams(xtc_probability=0.3)
    applied = np.array([is_applied(chain, 5, position) for position in range(1, 3_001)])
    assert stats.binomtest(int(applied.sum()), len(applied), 0.3).pvalue > 1e-3
    u = uniform(np.full(3_000, 5, np.uint64), np.arange(1, 3_001, dtype=np.int32), TOKEN)
    assert stats.ks_2samp(u[applied], u[~applied]).pvalue > 1e-3


def test_a_row_of_the_chain_does_not_depend_on_its_company(search: RowSearch) -> None:
    logits = torch.randn(len(CASES) + 2, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    params = [
        SamplingParams(seed=1),
        *(each for each, _ in CASES.values()),
        SamplingParams(temperature=0.0, logprobs=5, chain=ChainParams(1.0)),
    ]

    def sequences() -> list[Sequence]:
        return [Sequence(Request(handle, "r", each), Tokens([1, 2, 3], 2)) for handle, each in enumerate(params)]

    together = reduce(logits.clone(), sequences(), search)
    for row, sequence in enumerate(sequences()):
        alone = reduce(logits[row : row + 1].clone(), [sequence], search)
        assert encode(alone.message([0], "c", 1, (), [])) == encode(together.message([row], "c", 1, (), []))


def test_logprobs_are_those_of_the_row_before_the_chain() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(8)) * 2
    expected = torch.log_softmax(logits[0].double(), dim=0)
    params = SamplingParams(logprobs=4, seed=3, chain=ChainParams(typical_p=0.3, xtc_probability=1.0))
    rows = reduce(logits.clone(), [Sequence(Request(0, "r", params), Tokens([1, 2], 2))], SEARCH)
    listed = rows.token_ids[0, : rows.counts[0]]
    np.testing.assert_allclose(
        rows.logits[0, : rows.counts[0]] - rows.logsumexp[0], expected[torch.from_numpy(listed).long()], atol=1e-5
    )


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_its_own_failure(wrong: float) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    logits[0, 17] = wrong
    params = SamplingParams(chain=ChainParams(typical_p=0.5))
    found = reduce(logits, [Sequence(Request(handle, "r", params), Tokens([1], 1)) for handle in range(2)], SEARCH)
    assert (
        list(found.failures) == [(0, 1)]
        and "not finite" in found.failures[RowKey(0, 1)].message
        and found.handles.tolist() == [1]
    )
