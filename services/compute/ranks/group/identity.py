"""The identity of a rank. The ranks of a group must agree in whatever decides what they compute.

The form of Hello and HelloReply stays the same in all versions: so that two versions can refuse each
other in words.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import msgpack

from services.compute.ranks.group.channel import receive_frame, send_frame
from services.compute.ranks.group.commands import PROTOCOL, Loaded
from shared.process.errors import Invalid, StartupError, Unready
from shared.process.settings import ComputeSettings

MAGIC = "penstock group"
LONGEST_HELLO = 1 << 16  # bytes
COMMANDS, WATCH = "commands", "watch"  # what a connection is for
# that decide what is computed, and into how large buffers
SETTINGS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "shard_weights",
    "dtype",
    "model_impl",
    "quantization",
    "quantization_group",
    "quantize_attention_output",
    "quantize_lm_head",
    "activations",
    "block_size",
    "kv_cache_dtype",
    "kv_cache_group",
    "max_model_len",
    "max_num_seqs",
    "max_batched_tokens",
    "allow_batch_variance",
    "speculate",
    "num_speculative_tokens",
)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first that a rank says on a connection."""

    rank: int
    use: str  # COMMANDS or WATCH
    version: str
    protocol: str
    settings: dict[str, str]
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True, slots=True)
class HelloReply:
    """Rank 0's answer to a Hello. refusal: why the rank can't be in the group; empty: it is. passes:
    another start may go well."""

    refusal: str
    passes: bool
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


def hello_of(settings: ComputeSettings, rank: int, use: str = COMMANDS) -> Hello:
    return Hello(rank, use, version("penstock"), PROTOCOL, {name: str(getattr(settings, name)) for name in SETTINGS})


def say_hello(connection: socket.socket, hello: Hello, deadline: float | None = None) -> HelloReply:
    """Introduce this rank on a connection, and wait for rank 0's answer until then (monotonic, s).
    Raises StartupError for a refusal, EOFError, OSError or Invalid for an end that is not rank 0."""
    _send(connection, [hello.rank, hello.use, hello.version, hello.protocol, hello.settings, hello.host, hello.pid])
    answer = HelloReply(*_receive(connection, 4, deadline))
    if answer.refusal:
        raise (Unready if answer.passes else StartupError)(answer.refusal)
    return answer


def hear_hello(connection: socket.socket, deadline: float) -> Hello:
    """deadline: of all of it (monotonic, s). Raises EOFError, OSError, or Invalid."""
    hello = Hello(*_receive(connection, 7, deadline))
    if not (isinstance(hello.rank, int) and hello.use in (COMMANDS, WATCH) and isinstance(hello.settings, dict)):
        raise Invalid("this is not a Hello of a group")
    if not all(
        isinstance(each, str)
        for each in (hello.version, hello.protocol, hello.host, *hello.settings, *hello.settings.values())
    ):
        raise Invalid("this is not a Hello of a group")
    return hello


def answer_hello(connection: socket.socket, refusal: str = "", *, passes: bool = False) -> None:
    answer = HelloReply(refusal, passes)
    _send(connection, [answer.refusal, answer.passes, answer.host, answer.pid])


def refuse(name: str, theirs: Hello, ours: Hello) -> str:
    """Why the rank, which errors call `name`, can't be in our group; empty: it can."""
    if refusal := _first_difference(name, {"version": theirs.version}, {"version": ours.version}):
        return refusal
    if refusal := _first_difference(name, _flags(theirs.settings), _flags(ours.settings)):
        return refusal
    return _first_difference(name, {"protocol": theirs.protocol}, {"protocol": ours.protocol})


def refuse_loaded(name: str, theirs: Loaded, ours: Loaded) -> str:
    """The same, of what is known when a rank has loaded."""
    facts = [
        {
            "the arithmetic": each.arithmetic,
            "the fingerprint": each.fingerprint,
            "an EAGLE head that reads the layers": str(list(each.taps)),
            "--kv-disk": "a place" if each.has_disk else "none",
        }
        for each in (theirs, ours)
    ]
    return _first_difference(name, *facts)


def _first_difference(name: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    for fact in [*ours, *theirs]:
        one, other = theirs.get(fact, "none"), ours.get(fact, "none")
        if one != other:
            return f"{name} has {fact} {one}, and rank 0 has {other}: the ranks of a group must have the same"
    return ""


def _flags(settings: Mapping[str, str]) -> dict[str, str]:
    return {f"--{name.replace('_', '-')}": value for name, value in settings.items()}


def _send(connection: socket.socket, values: list[object]) -> None:
    send_frame(connection, msgpack.packb([MAGIC, *values]))


def _receive(connection: socket.socket, count: int, deadline: float | None) -> list[Any]:
    try:
        values = msgpack.unpackb(receive_frame(connection, LONGEST_HELLO, deadline))
    except (ValueError, msgpack.UnpackException) as error:
        raise Invalid(f"the peer is not a member of a group: {error}") from None
    if not isinstance(values, list) or values[:1] != [MAGIC] or len(values) != count + 1:
        raise Invalid("the peer is not a member of a group")
    return values[1:]
