"""bench/sizing.py's arithmetic, and the prompts of bench/texts.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.sizing import CARRIERS, LONG, SHORT, Run, Shape, needed, per_output_token
from bench.texts import Prose
from shared.model.files import DEMO_MODEL

positive = st.floats(1e-7, 1e-2)


@given(request=positive, token=positive, num_requests=st.integers(1, 500), num_tokens=st.integers(2, 2000))
def test_a_token_costs_what_is_left_of_the_streams_without_their_requests(
    request: float, token: float, num_requests: int, num_tokens: int
) -> None:
    total = num_requests * (request + (num_tokens - 1) * token)
    run = Run(num_requests, num_requests * num_tokens, 2.0, 0.0, {"gateway": total})
    assert run.per_token({"gateway": request})["gateway"] == pytest.approx(token, rel=1e-5, abs=1e-9)
    assert run.tokens_per_s == num_requests * num_tokens / 2


def test_a_token_of_a_deployment_has_its_share_of_its_request() -> None:
    short, long, token = (dict.fromkeys(CARRIERS, value) for value in (1.0, 3.0, 0.5))
    cost = per_output_token(token, short, long, Shape((SHORT + LONG) // 2, 10))
    assert cost["gateway"] == cost["redis"] == (2.0 + 9 * 0.5) / 10
    assert cost["tokenizer"] == 2.0 / 10, "which has no part in later tokens"


@given(goal=st.floats(1.0, 1e7), cost=st.floats(1e-7, 1e-2))
def test_as_many_processes_as_the_goal_needs_and_no_more(goal: float, cost: float) -> None:
    count = needed(goal, cost, load=0.7)
    assert count * 0.7 / cost >= goal * (1 - 1e-9)
    assert count == 1 or (count - 1) * 0.7 / cost < goal


def test_prompts_have_their_lengths_and_begin_differently() -> None:
    prose = Prose(DEMO_MODEL)
    prompts = [prose.take(length) for length in (1, 8, 100, 3000)]
    lengths = [len(prose.tokenizer.encode(each, add_special_tokens=False).ids) for each in prompts]
    assert lengths == pytest.approx([1, 8, 100, 3000], abs=2)
    assert len({prose.take(32) for _ in range(500)}) == 500
    assert len(prose.tokenizer.encode(prose.take(len(prose.token_ids) + 5), add_special_tokens=False).ids) > len(
        prose.token_ids
    )
