"""Hostile bytes in Redis: random ones, and the messages of the golden file with fields changed,
into every stream that a stage reads.

No stage may die of them. What is no message goes to the dead letters; what is one, and nonsense,
fails the requests that it is about, and no others.
"""

import random
from typing import Any

import msgpack
import redis

from shared.wire.messages import Control, GenerateRequest, StepCandidates, StepDecisions, StepEvents, TokenizedRequest
from shared.wire.replica import Replica
from shared.wire.streams import (
    CONTROL,
    MESSAGE,
    REPLICAS,
    candidates,
    decisions,
    events,
    prompts,
    replica_key,
    requests,
)
from tests.deployment import MODEL
from tests.wire.golden import GOLDEN

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    1 << 31,
    1 << 40,
    (1 << 64) - 1,
    -(1 << 63),
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x00",
    "a" * 3000,
    b"",
    b"\x00" * 4,
    b"\xff" * 8,
    b"\x01" * 5,
    [],
    [1],
    ["a"],
    [[]],
    {},
    {"a": 1},
    {1: 1},
    MODEL,
]


def inject(client: "redis.Redis", count: int, seed: int) -> None:
    """`count` messages, into the streams of the replicas `<stage>-1` and their groups, and as announcements."""
    rng = random.Random(seed)
    trees = {type(each.message): msgpack.unpackb(bytes.fromhex(each.now), strict_map_key=False) for each in GOLDEN}
    streams = {
        requests(MODEL).key: GenerateRequest,
        prompts(MODEL).key: TokenizedRequest,
        candidates("sampler-1").key: StepCandidates,
        decisions("compute-1").key: StepDecisions,
        events("gateway-1").key: StepEvents,
        CONTROL.key: Control,
    }
    for number in range(count):
        key, kind = rng.choice(list(streams.items()))
        client.xadd(key, {MESSAGE: hostile(rng, trees[kind])} if rng.random() < 0.97 else {"what": "is this"})
        if number % 20 == 0:
            name = f"hostile-{number}"
            client.set(replica_key("compute", name), hostile(rng, trees[Replica]), ex=2)
            client.sadd(REPLICAS, f"compute:{name}", rng.choice((b"\xff\xfe", b"no colon", b":", b"gateway:")))


def hostile(rng: random.Random, tree: list[Any]) -> bytes:
    """Bytes that are nearly this message."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tree = changed(rng, tree)
    packed: bytes = msgpack.packb(tree)
    if rng.random() < 0.1:
        packed = packed[: rng.randrange(len(packed))] + rng.randbytes(rng.randrange(4))
    return packed


def changed(rng: random.Random, value: Any) -> Any:
    """The tree with a value in some place of it changed; its tag and version rarely."""
    if not isinstance(value, list) or not value or rng.random() < 0.05:
        return rng.choice(VALUES)
    place = rng.randrange(min(2, len(value) - 1), len(value))
    inner = value[place]
    return [
        *value[:place],
        changed(rng, inner) if isinstance(inner, list) and rng.random() < 0.7 else rng.choice(VALUES),
        *value[place + 1 :],
    ]
