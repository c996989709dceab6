"""Which heads are a rank's: every query head on one, with the KV head that it reads."""

from hypothesis import given
from hypothesis import strategies as st

from services.compute.ranks.parallel.heads import HeadsOfRank, divide_heads

counts, sizes = st.integers(1, 12), st.integers(1, 40)


def most_columns(ranks: tuple[HeadsOfRank, ...]) -> int:
    return max(len(each.queries) + 2 * len(each.kv) for each in ranks)


def most_kv(ranks: tuple[HeadsOfRank, ...]) -> int:
    return max(len(each.kv) for each in ranks)


@given(counts, counts, sizes)
def test_every_query_head_is_on_one_rank_with_the_kv_head_that_it_reads(
    num_kv_heads: int, sharing: int, size: int
) -> None:
    num_heads = num_kv_heads * sharing
    for may_repeat in (True, False):
        found = divide_heads(num_heads, num_kv_heads, size, may_repeat=may_repeat)
        assert len(found) == size
        assert [head for each in found for head in each.queries] == list(range(num_heads))
        for each in found:
            assert {head // sharing for head in each.queries} == set(each.kv)
            assert 0 <= each.queries.start - each.kv.start * sharing < sharing
    assert [head for each in found for head in each.kv] == list(range(num_kv_heads))


@given(counts, counts, sizes)
def test_a_kv_head_is_repeated_only_where_that_helps_and_no_rank_gets_more_of_them(
    num_kv_heads: int, sharing: int, size: int
) -> None:
    found, whole = (divide_heads(num_kv_heads * sharing, num_kv_heads, size, may_repeat=each) for each in (True, False))
    assert found == whole or most_columns(found) < most_columns(whole)
    assert most_kv(found) <= most_kv(whole)
    if num_kv_heads % size == 0:
        assert found == whole
    if size % num_kv_heads == 0 and size <= num_kv_heads * sharing:
        assert most_columns(found) == -(-num_kv_heads * sharing // size) + 2


def test_models_that_people_have() -> None:
    """SmolLM2 135M on two ranks, Qwen2.5 0.5B on four."""
    assert divide_heads(9, 3, 2) == (HeadsOfRank(range(5), range(2)), HeadsOfRank(range(5, 9), range(1, 3)))
    found = divide_heads(14, 2, 4)
    assert [len(each.queries) for each in found] == [4, 3, 4, 3] and [each.kv for each in found] == [range(1)] * 2 + [
        range(1, 2)
    ] * 2
