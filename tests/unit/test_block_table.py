"""A sequence's block table: its tuple is always that of its blocks, and the same object until they change."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.compute.sequence import BlockTable
from tests.examples import examples


@examples(100)
@given(data=st.data())
def test_the_tuple_is_that_of_the_blocks(data: Any) -> None:
    table, plain = BlockTable(), list[int]()
    for _ in range(data.draw(st.integers(1, 20))):
        blocks = data.draw(st.lists(st.integers(0, 99), max_size=4))
        what = data.draw(st.sampled_from(["append", "extend", "replace", "replace some", "clear", "nothing"]))
        for each in (table, plain):
            if what == "append":
                each.append(5)
            elif what == "extend":
                each.extend(blocks)
            elif what == "replace" and each:
                each[-1] = 7
            elif what == "replace some":
                each[1 : 1 + len(blocks)] = blocks
            elif what == "clear":
                each.clear()
        before = table.frozen
        assert before == tuple(plain) and table.frozen is before
