"""Whatever is read from Redis is a message, or is refused as Invalid: nothing else is raised by
bytes, and nothing is taken that no stage could have sent.
"""

from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from shared.process.errors import Invalid
from shared.wire.messages import TAGS, decode
from tests.examples import examples
from tests.wire.golden import GOLDEN

NUMBERS = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.sampled_from([0, -1, 1 << 31, 1 << 32, 1 << 62])
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.text(max_size=8),
    st.binary(max_size=24),
    st.builds(msgpack.Timestamp, st.just(1)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(LEAVES, inner, max_size=3)),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree of msgpack's values but its root."""
    inner = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    return [found for key, each in inner for found in [(*path, key), *places(each, (*path, key))]]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The tree with another value at this place."""
    if not path:
        return new
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_invalid(data: bytes) -> None:
    for message_type in TAGS:
        try:
            assert type(decode(message_type, data)) is message_type
        except Invalid:
            continue


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: type(golden.message).__name__)
@examples(120, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_message_with_any_field_changed_is_a_message_or_invalid(golden: Any, data: st.DataObject) -> None:
    tree = msgpack.unpackb(bytes.fromhex(golden.now), strict_map_key=False)
    for _ in range(data.draw(st.integers(1, 2))):
        fields = [path for path in places(tree) if path not in ((0,), (1,))]
        tree = changed(tree, data.draw(st.sampled_from(fields)), data.draw(VALUES))
    try:
        packed = msgpack.packb(tree)
    except ValueError:
        return
    try:
        assert type(decode(type(golden.message), packed)) is type(golden.message)
    except Invalid as error:
        assert str(error)
