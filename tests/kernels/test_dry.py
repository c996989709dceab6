"""DRY penalizes what llama.cpp penalizes, token by token: its own way, with the Z algorithm over
the reversed history, stands here as the reference.
"""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.backends.choose import choose_backend
from services.compute.candidates.dry import MAX_REPEAT, dry_penalties
from services.compute.candidates.reduction import reduce
from services.compute.sequence import Request, Sequence, Tokens
from shared.model.dry_breakers import Breakers, pack_breakers, unpack_breakers
from shared.model.sampling_params import DryParams, SamplingParams
from tests.examples import examples

SEARCH = choose_backend(torch.bfloat16, torch.device("cpu")).row_search


# it is another's
def reference(history: list[int], params: DryParams, breakers: Breakers) -> dict[int, float]:  # noqa: C901
    """Token → penalty."""
    size = len(history) if params.penalty_last_n == -1 else min(params.penalty_last_n, len(history))
    if size <= params.allowed_length:
        return {}
    back = list(reversed(history))  # back[0] is the last token
    limit = size
    for at in range(size):
        longest = -1
        for tail in breakers.get(back[at], []):
            if longest < len(tail) <= at and all(tail[offset] == back[at - offset - 1] for offset in range(len(tail))):
                longest = len(tail)
        if longest >= 0:
            limit = at - longest
            break
    if limit < params.allowed_length:
        return {}
    counts, last, left, right = [0] * size, size - 1, 0, 0
    for lag in range(1, size):
        if lag > right:
            length = 0
            while length + lag < size and back[length] == back[length + lag]:
                length += 1
            counts[last - lag] = min(length, limit)
            if length > 0:
                left, right = lag, lag + length - 1
        else:
            place, part = lag - left, right - lag + 1
            if counts[last - place] < part:
                counts[last - lag] = min(counts[last - place], limit)
            else:
                end = right + 1
                while end < size and back[end] == back[end - lag]:
                    end += 1
                counts[last - lag] = min(end - lag, limit)
                left, right = lag, end - 1
    longest_by_token: dict[int, int] = {}
    for at in range(size - 1):
        if counts[at] >= params.allowed_length:
            token = back[size - 2 - at]
            longest_by_token[token] = max(longest_by_token.get(token, 0), counts[at])
    most = int(88.7228391 / math.log(params.base)) if params.base > 1.000001 else 0
    found = {}
    for token, length in longest_by_token.items():
        exponent = length - params.allowed_length
        found[token] = params.multiplier * params.base ** (min(exponent, most) if most else exponent)
    return found


histories = st.lists(st.integers(0, 3), max_size=60) | st.lists(st.integers(0, 12), max_size=60)
breakers = st.dictionaries(
    st.integers(0, 12), st.lists(st.lists(st.integers(0, 3), max_size=2).map(tuple), min_size=1, max_size=3), max_size=3
)
params = st.builds(
    DryParams,
    multiplier=st.sampled_from([0.5, 0.8, 3.0]),
    base=st.sampled_from([1.0, 1.1, 1.75, 4.0]),
    allowed_length=st.sampled_from([0, 1, 2, 5]),
    penalty_last_n=st.sampled_from([-1, -1, 0, 1, 5, 30]),
)


@examples(1500)
@given(history=histories, dry=params, breakers=breakers)
def test_the_penalties_are_llama_cpp_s(history: list[int], dry: DryParams, breakers: Breakers) -> None:
    tokens, penalties = dry_penalties(np.array(history, np.int64), dry, breakers)
    expected = reference(history, dry, breakers)
    if dry.allowed_length == 0 and len(history) < 2:
        expected = {}
    assert sorted(expected) == tokens.tolist()
    np.testing.assert_allclose(penalties, [expected[token] for token in tokens.tolist()], rtol=1e-6)


def test_a_long_repetition_costs_no_more_than_a_bound() -> None:
    dry = DryParams(1.0, base=1.01)
    tokens, penalties = dry_penalties(np.full(20_000, 7), dry, {})
    assert tokens.tolist() == [7] and penalties[0] == np.float32(1.01**MAX_REPEAT)
    tokens, penalties = dry_penalties(np.full(20_000, 7), DryParams(100.0, base=100.0), {})
    assert np.isfinite(penalties).all() and penalties[0] > 1e38


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple), max_size=9))
def test_breakers_survive_their_packing(breakers: list[tuple[int, ...]]) -> None:
    found = unpack_breakers(pack_breakers(breakers))
    assert sorted((head, *tail) for head, tails in found.items() for tail in tails) == sorted(breakers)


def test_a_row_loses_what_goes_on_with_a_repetition() -> None:
    """… 1 2 3 … 1 2: the third would be 3. Not if a breaker stands before it; nor once the history
    is cut back to where nothing repeats.
    """
    logits = torch.zeros(1, 50)
    request = SamplingParams(temperature=0.0, logprobs=1, dry=DryParams(2.0, allowed_length=2))
    sequence = Sequence(Request(0, "r", request), Tokens([9, 1, 2, 3, 8, 1, 2], 5, num_undecided=1))

    def penalized(sequence: Sequence) -> list[int]:
        row = logits.clone()
        reduce(row, [sequence], SEARCH)
        assert set(row[0].tolist()) <= {0.0, -2.0}
        return np.flatnonzero(row[0].numpy()).tolist()

    assert penalized(sequence) == [3]
    assert penalized(Sequence(Request(0, "r", request, dry_breakers={1: [()]}), Tokens(sequence.tokens.ids, 5))) == []
    sequence.tokens.truncate(6)
    assert penalized(sequence) == []
