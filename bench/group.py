"""What does it cost to tell another rank of a group what to compute?

Method: a step of decodes, each with so many blocks, as bytes and back: our form of commands
(services/compute/ranks/group/commands.py) and pickle's, which may cross no network. Then the way
there: the head sends the step to a rank of its own, in another process, and waits for an answer of
a few bytes, over a socket pair and over TCP on this host. The floor is that round trip with a
command that holds nothing. In turns; the median of --rounds, each the mean of 100.

    python -m bench.group [--rows 64] [--blocks 100]
"""

import argparse
import json
import os
import pickle
import random
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial

from services.compute.ranks.group.channel import Channel
from services.compute.ranks.group.commands import Accepted, Close, RunStep, decode, encode
from services.compute.sequence.batch import BatchRow, ScheduledBatch

TIMES = 100
BLOCK_SIZE, POOL = 16, 20_000  # tokens of a block, and blocks to choose from


def main() -> None:
    parser = argparse.ArgumentParser(description="The price of a command to another rank.")
    parser.add_argument(
        "--rows", type=int, default=64, help="sequences of the step, a token each (default: %(default)s)"
    )
    parser.add_argument("--blocks", type=int, default=100, help="blocks of each, of 16 tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    step = RunStep(0, make_batch(args.rows, args.blocks))
    packed, pickled = encode(step), pickle.dumps(step, 5)
    assert decode(packed) == pickle.loads(pickled) == step
    pair, tcp = start_rank(*socket.socketpair()), start_rank(*tcp_pair())
    cases: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(step),
        "decode": lambda: decode(packed),
        "pickle": lambda: pickle.dumps(step, 5),
        "unpickle": lambda: pickle.loads(pickled),
        "there and back, socket pair": partial(ask, pair, step),
        "nothing, there and back, socket pair": partial(ask, pair, Accepted()),
        "there and back, TCP": partial(ask, tcp, step),
        "nothing, there and back, TCP": partial(ask, tcp, Accepted()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, case in cases.items():
            seconds[name].append(timed(case))
    for channel in (pair, tcp):
        channel.send(Close())
        os.wait()
    found = {name: statistics.median(values) * 1e6 for name, values in seconds.items()}
    print(f"{args.rows} rows of {args.blocks} blocks: {len(packed):,} bytes; pickled {len(pickled):,}")
    for name, microseconds in found.items():
        print(f"{name:40}{microseconds:8.0f} us")
    print(
        json.dumps(
            {name: round(value, 1) for name, value in found.items()}
            | {"bytes": len(packed), "pickled_bytes": len(pickled)}
        )
    )


def make_batch(num_rows: int, num_blocks: int) -> ScheduledBatch:
    choose = random.Random(0)
    rows = [
        BatchRow(
            handle,
            (choose.randrange(150_000),),
            num_blocks * BLOCK_SIZE - 1,
            tuple(choose.sample(range(POOL), num_blocks)),
            range(1),
            40,
        )
        for handle in range(num_rows)
    ]
    return ScheduledBatch(tuple(rows), num_rows)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for each in (one, other):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def start_rank(ours: socket.socket, theirs: socket.socket) -> Channel:
    """A process that answers each command."""
    if os.fork():
        theirs.close()
        return Channel(ours)
    ours.close()
    channel = Channel(theirs)
    while not isinstance(channel.receive(), Close):
        channel.send(Accepted())
    os._exit(0)


def ask(channel: Channel, command: object) -> None:
    channel.send(command)
    channel.receive()


def timed(case: Callable[[], object]) -> float:
    """Seconds of one, the mean of TIMES."""
    started = time.perf_counter()
    for _ in range(TIMES):
        case()
    return (time.perf_counter() - started) / TIMES


if __name__ == "__main__":
    main()
