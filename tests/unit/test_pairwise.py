"""The cases that the mark `pairwise` leaves of a test have every pair of values."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.pairwise import covering, values_of

CASES = st.integers(1, 4).flatmap(lambda width: st.lists(st.tuples(*[st.integers(0, 3)] * width), max_size=40))


@given(cases=CASES, once=st.sets(st.integers(0, 3)))
@examples(200)
def test_every_pair_of_values_that_a_case_has_is_there(cases: list[tuple[int, ...]], once: set[int]) -> None:
    chosen = [cases[number] for number in covering(cases, once)]
    assert {pair for case in chosen for pair in values_of(case, once)} == {
        pair for case in cases for pair in values_of(case, once)
    }
    for first, second in product(set(range(4)) - once, repeat=2):
        assert pairs(chosen, first, second) == pairs(cases, first, second)
    for each in range(4):
        assert pairs(chosen, each, each) == pairs(cases, each, each)


def pairs(cases: list[tuple[int, ...]], first: int, second: int) -> set[tuple[int, int]]:
    return {(case[first], case[second]) for case in cases if max(first, second) < len(case)}


def test_a_part_of_a_product_is_enough() -> None:
    cases = list(product(range(5), range(3), range(3), range(2)))
    assert 15 <= len(covering(cases)) <= 20, "of 90"
    assert len(covering(cases, once=(1, 2))) == 10, "each of the five with each of the two"
