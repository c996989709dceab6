"""Which heads are a rank's: every query head on one, with the KV head that it reads."""

from hypothesis import given
from hypothesis import strategies as st

from services.compute.parallel.heads import HeadsOfRank, divide_heads
from services.compute.parallel.share import Share

counts = st.integers(1, 12)


def columns(of_rank: HeadsOfRank) -> int:
    return len(of_rank.queries) + 2 * len(of_rank.kv)


@given(counts, counts, counts, st.booleans())
def test_every_query_head_is_on_one_rank_with_the_kv_head_that_it_reads(num_kv_heads: int, sharing: int, size: int, may_repeat: bool) -> None:
    num_heads = num_kv_heads * sharing
    found = divide_heads(num_heads, num_kv_heads, Share(0, size), may_repeat=may_repeat)
    assert len(found) == size
    assert [head for each in found for head in each.queries] == list(range(num_heads))
    for each in found:
        assert {head // sharing for head in each.queries} == set(each.kv)
    if not may_repeat:
        assert [head for each in found for head in each.kv] == list(range(num_kv_heads))


@given(counts, counts, counts)
def test_a_kv_head_is_repeated_only_where_that_helps_the_rank_that_has_most(num_kv_heads: int, sharing: int, size: int) -> None:
    found, whole = (divide_heads(num_kv_heads * sharing, num_kv_heads, Share(0, size), may_repeat=each) for each in (True, False))
    assert found == whole or max(map(columns, found)) < max(map(columns, whole))
    if num_kv_heads % size == 0:
        assert found == whole


def test_models_that_people_have() -> None:
    """SmolLM2 135M on two ranks, Qwen2.5 0.5B on four."""
    assert divide_heads(9, 3, Share(0, 2)) == (HeadsOfRank(range(5), range(2)), HeadsOfRank(range(5, 9), range(1, 3)))
    found = divide_heads(14, 2, Share(0, 4))
    assert [len(each.queries) for each in found] == [4, 4, 3, 3] and [len(each.kv) for each in found] == [1, 2, 1, 1]
