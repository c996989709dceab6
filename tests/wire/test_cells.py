"""The tag of a cell: before every key of every command, and before nothing else."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from shared.wire import cells, streams
from shared.wire.cells import Nodes, in_cell, keys_of, without_cell
from shared.wire.redis_urls import parse_named
from shared.wire.transport import connect

SAMPLES: list[tuple[Any, ...]] = [
    ("SET", "k", "v", "PX", 5),
    ("GET", b"k"),
    ("DEL", "k1", "k2", "k3"),
    ("EXISTS", "k1", "k2"),
    ("MGET", "k1", "k2"),
    ("UNLINK", "k1"),
    ("XREAD", b"BLOCK", b"5", b"STREAMS", "k1", "k2", "0", "0"),
    ("XREAD", "COUNT", "1", "STREAMS", "k1", "0"),
    ("XREADGROUP", "GROUP", "g", "c", b"COUNT", 3, b"STREAMS", "k1", ">"),
    ("XADD", "k", "*", "m", b"STREAMS"),
    ("XRANGE", "k", "-", "+"),
    ("XGROUP CREATE", "k", "g", "0"),
    ("XINFO GROUPS", "k"),
    ("XPENDING", "k", "g"),
    ("XCLAIM", "k", "g", "c", 0, "1-0"),
    ("XTRIM", "k", "MAXLEN", 5),
    ("EVAL", "return 1", 2, "k1", "k2", "argument", b"STREAMS"),
    ("EVALSHA", "0" * 40, 0, "argument"),
    ("EVALSHA", "0" * 40, 1, "k1"),
    ("BLPOP", "k1", "k2", 1),
    ("LPOP", "k"),
    ("HSET", "k", "f", "v"),
    ("ZADD", "k", 1, "m"),
    ("ZRANGEBYSCORE", "k", 0, 1),
    ("SADD", "k", "m"),
    ("EXPIRE", "k", 5),
    ("PTTL", "k"),
    ("STRLEN", "k"),
    ("OBJECT FREQ", "k"),
    ("WATCH", "k1", "k2"),
    ("ZREVRANGE", "k", 0, 1),
]


def test_keys_are_where_the_server_says_they_are(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        for command in SAMPLES:
            mine = [command[index] for index in keys_of(command)]
            try:
                found: Any = client.execute_command("COMMAND GETKEYS", *command[0].split(), *command[1:])
            except redis.ResponseError as error:
                assert "no key arguments" in str(error)
                found = []
            assert [key.decode() if isinstance(key, bytes) else key for key in mine] == found, command


def test_what_has_no_keys_stays_and_what_nobody_knows_is_refused() -> None:
    for command in (
        ("PING",),
        ("INFO", "memory"),
        ("CLIENT SETINFO", "LIB-NAME", "x"),
        ("SCRIPT LOAD", "return 1"),
        ("MULTI",),
    ):
        assert in_cell("{a}:", command) == list(command)
    with pytest.raises(ValueError, match="NOSUCH"):
        in_cell("{a}:", ("NOSUCH", "k"))
    assert in_cell("{a}:", ("SCAN", 0, b"MATCH", "log:*", b"COUNT", 9)) == [
        "SCAN",
        0,
        b"MATCH",
        "{a}:log:*",
        b"COUNT",
        9,
    ]
    with pytest.raises(ValueError, match="SCAN"):
        in_cell("{a}:", ("SCAN", 0))


@given(st.sampled_from([each for each in SAMPLES if keys_of(each)]), st.from_regex(r"[a-z0-9-]{1,16}", fullmatch=True))
def test_the_tag_comes_off_again(command: tuple[Any, ...], cell: str) -> None:
    tagged = in_cell(f"{{{cell}}}:", command)
    for index, (before, after) in enumerate(zip(command, tagged, strict=True)):
        if index in keys_of(command):
            assert without_cell(after if isinstance(after, bytes) else after.encode()) == (
                before if isinstance(before, bytes) else before.encode()
            )
        else:
            assert after is before


def test_every_command_of_this_code_is_known() -> None:
    root = Path(cells.__file__).parents[2]
    texts = [path.read_text() for folder in ("shared", "services") for path in (root / folder).rglob("*.py")]
    called = {name for text in texts for name in re.findall(r"\b(?:client|pipe)\.([a-z_]+)\(", text)}
    words = {name.partition("_")[0].upper() for name in called if hasattr(redis.Redis, name)} - {
        "PIPELINE",
        "CLOSE",
        "SCAN",
        "EXECUTE",
    }
    assert len(words) > 30
    for word in sorted(words):
        keys_of(("DEL" if word == "DELETE" else word, "k", 0, "STREAMS", "k", "0"))


def test_no_key_of_ours_begins_with_a_tag() -> None:
    keys = [
        streams.log_key("x"),
        streams.requests("m").key,
        streams.REPLICAS,
        streams.CONTROL.key,
        streams.JOB_QUEUE,
        streams.batch_key("b"),
    ]
    assert [without_cell(each.encode()) for each in keys] == [each.encode() for each in keys]


def test_a_node_that_was_wrong_is_asked_last_and_one_that_has_gone_is_forgotten() -> None:
    named = parse_named("redis+cluster://one:1,two:2/a")
    assert named is not None
    nodes = Nodes(named)
    all_slots = [0, 16383]
    assert nodes.learn(("one", 1), [[*all_slots, [b"ten", 10, b"id"], [None, 11, b"id"]]]) == ("ten", 10)
    assert nodes.addresses == [("one", 1), ("two", 2), ("ten", 10), ("one", 11)], (
        "a server without a name is where the node is"
    )
    nodes.was_wrong()
    assert nodes.learn(("two", 2), [[*all_slots, [b"?", 12, b"id"]]]) == ("two", 12)
    assert nodes.addresses == [("two", 2), ("one", 1), ("two", 12)]
    assert nodes.learn(("two", 2), [[1, 2, [b"ten", 10, b"id"]]]) is None, "nobody has the slot"


def test_nobody_who_is_asked_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    class Noting(redis.Redis):
        """Notes whom it is to ask."""

        def __init__(self, host: str, port: int, **options: Any) -> None:
            asked.append((host, port))
            super().__init__(host, port, **options)

    monkeypatch.setattr(cells, "redis", SimpleNamespace(**vars(redis) | {"Redis": Noting}))
    with pytest.raises(redis.ConnectionError, match="no node of the Redis Cluster names a primary for the cell 'a'"):
        connect("redis+cluster://127.0.0.1:1,127.0.0.1:2/a").ping()
    assert asked == [("127.0.0.1", 1), ("127.0.0.1", 2)], "each is asked once"
