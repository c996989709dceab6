"""The names of blocks: two never share one that differ in anything, and the tokenizer's are compute's."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from services.compute.cache.block_manager import BlockManager
from services.compute.sequence import Request, Sequence, Tokens
from shared.model.prefix_hash import block_hash, prefix_hashes, prefix_root, segment_root
from shared.model.sampling_params import SamplingParams
from shared.model.segments import Layout, Segment, segment_hashes
from tests.examples import examples

TEXTS = st.text(alphabet="ab\0", max_size=3)


@given(one=st.tuples(TEXTS, TEXTS), other=st.tuples(TEXTS, TEXTS))
def test_no_fingerprint_and_salt_can_be_read_as_another_two(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (prefix_root(one[0], salt=one[1]) == prefix_root(other[0], salt=other[1])) == (one == other)


def test_planted_collisions_are_none() -> None:
    """The same bytes, cut in other places: of a fingerprint and a salt, of a block and of a
    segment, of what a segment sees.
    """
    root, seen = prefix_root("f"), [bytes([each]) * 16 for each in range(1, 4)]
    as_tokens = [int.from_bytes(seen[0][:8], "little"), int.from_bytes(seen[0][8:], "little")]
    names = [
        prefix_root("ab", salt="c"),
        prefix_root("a", salt="bc"),
        prefix_root("abc"),
        prefix_root("", salt="abc"),
        root,
        block_hash(root, [5]),
        segment_root(root, 5, []),
        block_hash(root, [5, *as_tokens]),
        segment_root(root, 5, seen[:1]),
        block_hash(seen[0], [5]),
        segment_root(root, 5, seen),
        segment_root(root, 5, seen[::-1]),
        segment_root(root, 5, seen[:2]),
        segment_root(root, 6, seen),
        segment_root(seen[0], 5, []),
    ]
    assert all(one != other for one, other in combinations(names, 2))


def test_two_salts_models_or_places_share_no_block_of_a_module() -> None:
    tokens = list(range(60))
    layouts = [Layout((Segment(16, 0), Segment(20, place, (0,)), Segment(24, 90, (0, 1))), 16) for place in (16, 17)]
    roots = [prefix_root(fingerprint, salt=salt) for fingerprint in ("one", "two") for salt in ("", "s")]
    names = [name for root in roots for layout in layouts for name in segment_hashes(root, tokens, layout)[1:]]
    names += [name for root in roots for name in prefix_hashes(root, tokens, 16)]
    assert len(set(names)) == len(names)
    trunks = {segment_hashes(root, tokens, layout)[0] for root in roots for layout in layouts}
    assert len(trunks) == len(roots), "what stands before modules is a prefix like any other"


@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    places=st.lists(st.integers(0, 99), min_size=5, max_size=5),
    data=st.data(),
    size=st.sampled_from([1, 2, 4, 8, 16]),
)
@examples(60)
def test_a_tokenizer_has_the_names_that_compute_has(
    lengths: list[int], places: list[int], data: st.DataObject, size: int
) -> None:
    last = len(lengths) - 1
    sees = [
        tuple(sorted(data.draw(st.sets(st.integers(0, number - 1))))) if number else () for number in range(last)
    ] + [tuple(range(last))]
    segments = tuple(Segment(length, place, seen) for length, place, seen in zip(lengths, places, sees, strict=False))
    tokens, layout = list(range(sum(lengths))), Layout(segments, size)
    slots = layout.pad(tokens)
    sequence = Sequence(Request(0, "", SamplingParams(), layout=layout, cache_salt="s"), Tokens(slots))
    blocks = BlockManager(4, size, fingerprint="f")
    found = segment_hashes(prefix_root("f", salt="s"), tokens, layout)
    assert found == [blocks._hash(sequence, number) for number in range(len(slots) // size)]
    assert len(set(found)) == len(found)
