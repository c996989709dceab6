"""What does a watcher of the live view cost? It measures a compute replica's CPU time for a
view, and the time of its steps with and without a watcher.

Method: the largest view there can be (64 sequences, 256 blocks each, scattered) is made and
encoded; the process's CPU time of one, the best of REPEATS. Then the demo model runs NUM_SEQUENCES
sequences without end, and windows of WINDOW_S with the key `watched` and without it take turns, now
this and now that first; of each window, the time a step took (all its parts but waiting). What is
told is the median ratio of neighbours: other load on the machine is in both. Ceiling: a view's CPU
time, twice a second.

    python -m bench.live_view [--windows 12] [--seconds 200]
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np

from services.compute.cache.block_manager import BlockManager
from services.compute.exchange.active import ActiveRequest
from services.compute.sequence import BlockTable, Kv, Request, Sequence, Tokens
from services.compute.telemetry.view import make_view
from shared.model.sampling_params import SamplingParams
from shared.wire.load import STEP_PARTS
from shared.wire.messages import TokenizedRequest, encode
from shared.wire.streams import WATCHED
from shared.wire.views import MAX_BLOCKS_SHOWN, MAX_SEQUENCES_SHOWN
from tests.conftest import running_redis
from tests.deployment import MODEL, Deployment

REPEATS = 50
NUM_SEQUENCES = 16
WINDOW_S = 4.0


def cpu_of_a_view() -> tuple[float, int]:
    """Seconds, and bytes."""
    blocks = BlockManager(2 * MAX_SEQUENCES_SHOWN * MAX_BLOCKS_SHOWN, 16)
    request = TokenizedRequest(
        "chatcmpl-0123456789abcdef.0",
        None,
        MODEL,
        SamplingParams(max_tokens=1),
        prompt_token_ids=np.ones(1, np.int32),
        eos_token_ids=(),
    )
    active = []
    for handle in range(MAX_SEQUENCES_SHOWN):
        table = BlockTable(range(handle, 2 * MAX_SEQUENCES_SHOWN * MAX_BLOCKS_SHOWN, 2 * MAX_SEQUENCES_SHOWN))
        active.append(
            ActiveRequest(
                Sequence(Request(handle, request.request_id, request.params), Tokens([1], 1), Kv(block_table=table)),
                request,
                b"1-0",
                None,
            )
        )
    seconds, packed = [], b""
    for _ in range(REPEATS):
        started_at = time.process_time()
        packed = encode(make_view("compute-0123456789ab", active, range(MAX_SEQUENCES_SHOWN), blocks, {}))
        seconds.append(time.process_time() - started_at)
    return min(seconds), len(packed)


def step_s(deployment: Deployment, *, is_watched: bool) -> float:
    """The time of a step, over a window."""
    with deployment.redis() as client:
        if is_watched:
            client.set(WATCHED, 1, px=int((WINDOW_S + 3) * 1000))
        else:
            client.delete(WATCHED)
        time.sleep(1.2)  # for the replica to notice
        before = deployment.registry().of("compute")[0].load
        time.sleep(WINDOW_S)
        after = deployment.registry().of("compute")[0].load
    if (num_steps := (after.steps or 0) - (before.steps or 0)) <= 0:
        raise SystemExit(f"compute made no step in {WINDOW_S} s: is the machine free?\n{deployment.logs()[-2000:]}")
    return sum(after.step_s[part] - before.step_s[part] for part in STEP_PARTS if part != "wait") / num_steps


def compare(deployment: Deployment, num_pairs: int, seconds: float) -> list[tuple[float, float]]:
    """The time of a step watched and alone, of so many pairs of windows; of fewer, if the time is over."""
    until = time.monotonic() + seconds
    pairs: list[tuple[float, float]] = []
    print(f"{'pair':>4}{'watched, ms':>14}{'alone, ms':>14}{'ratio':>9}")
    while len(pairs) < num_pairs and (not pairs or time.monotonic() < until):
        measured = {
            is_watched: step_s(deployment, is_watched=is_watched)
            for is_watched in ((True, False), (False, True))[len(pairs) % 2]
        }
        pairs.append((measured[True], measured[False]))
        print(
            f"{len(pairs):>4}{1e3 * measured[True]:>14.3f}{1e3 * measured[False]:>14.3f}{measured[True] / measured[False]:>9.3f}",  # noqa: E501
            flush=True,
        )
    return pairs


def run_without_end(url: str, is_over: threading.Event) -> None:
    body = {"model": MODEL, "prompt": ["The"] * NUM_SEQUENCES, "max_tokens": 200, "ignore_eos": True}
    while not is_over.is_set():
        httpx.post(f"{url}/v1/completions", json=body, timeout=600, trust_env=False).raise_for_status()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.live_view", description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=12, help="pairs (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=200, help="after which no further pair begins (default: %(default)s)"
    )
    args = parser.parse_args()
    view_s, num_bytes = cpu_of_a_view()
    print(
        f"a view of {MAX_SEQUENCES_SHOWN} sequences with {MAX_BLOCKS_SHOWN} blocks each: {1e3 * view_s:.2f} ms of "
        f"CPU, {num_bytes} bytes"
    )
    with tempfile.TemporaryDirectory() as folder, running_redis(Path(folder) / "redis", None) as redis_url:
        deployment = Deployment(redis_url, Path(folder))
        is_over = threading.Event()
        try:
            deployment.start_all()
            load = threading.Thread(target=run_without_end, args=(deployment.url(), is_over), daemon=True)
            load.start()
            time.sleep(2)
            pairs = compare(deployment, args.windows, args.seconds)
            is_over.set()
            load.join()
        finally:
            deployment.stop()
    ratio = statistics.median(watched / alone for watched, alone in pairs)
    watched, alone = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"a step: {1e3 * watched:.2f} ms watched, {1e3 * alone:.2f} ms alone; ratio of neighbouring windows, median: "
        f"{ratio:.3f}"
    )
    print(
        json.dumps(
            {
                "pairs": len(pairs),
                "view_cpu_ms": 1e3 * view_s,
                "view_bytes": num_bytes,
                "step_watched_ms": 1e3 * watched,
                "step_alone_ms": 1e3 * alone,
                "ratio": ratio,
            }
        )
    )


if __name__ == "__main__":
    main()
