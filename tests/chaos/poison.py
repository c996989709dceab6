"""Messages that nobody can read, on every stream there is: garbage, wrong types, fields that are
missing or are not text.
"""

import random

import msgpack

from tests.chaos.arena import Arena
from tests.chaos.redis_faults import REDIS_ERRORS

GROUP_STREAMS = ("requests*", "prompts:*")
DIRECT_STREAMS = ("candidates:*", "decisions:*", "events:*", "control")
TAGS = {
    "requests": "generate",
    "prompts": "tokenized",
    "candidates": "candidates",
    "decisions": "decisions",
    "events": "events",
    "control": "control",
}
PER_STREAM = 3


async def poison_message(arena: Arena, rng: random.Random) -> None:
    """A few on each stream. Redis may be away: then there are none this time."""
    try:
        async with arena.store.client() as client:
            for pattern in (*GROUP_STREAMS, *DIRECT_STREAMS):
                for key in sorted(await client.keys(pattern)):
                    for _ in range(PER_STREAM):
                        await client.xadd(
                            key, entry(key.decode(), rng, is_group=pattern in GROUP_STREAMS), nomkstream=True
                        )
    except REDIS_ERRORS:
        return


def entry(key: str, rng: random.Random, *, is_group: bool) -> dict[bytes, bytes]:
    """The fields of an entry that is wrong in one way."""
    fields = {b"m": message(TAGS[key.split(":")[0]], rng)}
    if is_group:
        fields |= {b"r": f"poison-{rng.randrange(1 << 32):x}.0".encode(), b"g": b""}
        fields |= rng.choice(
            [{}, {b"r": b"\xff\xfe\x80"}, {b"g": b"\xff\xfe"}, {b"g": b"gateway-that-never-was"}, {b"r": b""}]
        )
        if rng.random() < 0.2:
            del fields[b"r"]
    if rng.random() < 0.15:
        fields.pop(b"m")
        fields[b"x"] = b"no message"
    return fields


def message(tag: str, rng: random.Random) -> bytes:
    """Bytes that are no message of this tag."""
    packed: bytes = msgpack.packb(
        rng.choice(
            [
                None,
                [],
                [tag],
                [tag, "1"],
                [tag, 1],
                [tag, 99, "from", "the", "future"],
                [tag, 1, *([None] * 8)],
                [tag, 1, *([-1] * 13)],
                [tag, 1, *(["\u0000"] * 4)],
                [tag, 1, *([b"\x01\x02\x03"] * 11)],
                [tag, 1, [b"\xc1", packed_event(), 7]],
                ["nobody", 1, 2, 3],
                {"a": 1},
            ]
        )
    )
    return rng.choice([packed, packed[:-1], b"\xc1 not msgpack", b"", packed + b"\x00", rng.randbytes(40)])


def packed_event() -> bytes:
    """An event whose fields have the wrong types."""
    packed: bytes = msgpack.packb(["token", 1, 5, "x", None])
    return packed
