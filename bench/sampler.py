"""What does a step cost the sampler? Microseconds per sequence per step, at batch 256.

Method: a real SamplerService and a real Redis (the embedded one, on a Unix socket). Each step is
answered as in production: decode, draw, detokenize, and one script that writes 256 logs, the
gateway's events and the decisions. Greedy and random rows. What a step is made of is timed from
outside: `write` is the script and its round trip, the rest is the draw, the text and the encoding
of events.

    python -m bench.sampler
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import redis

from services.operator.redis_server import socket_path, start_server
from services.sampler.detokenizer import load_tokenizer
from services.sampler.service import SamplerService
from shared.model.files import DEMO_MODEL
from shared.model.sampling_params import SamplingParams
from shared.process.settings import SamplerSettings
from shared.wire.messages import SequenceIntro, StepCandidates, decode, encode
from shared.wire.stage import Stage


def make_step(batch: int, step: int, count: int, params: SamplingParams, rng: "np.random.Generator") -> bytes:
    intros = (
        tuple(
            SequenceIntro(row, f"bench.{row}", "gateway-bench", params, (1,), 10, np.array([40], np.int32))
            for row in range(batch)
        )
        if step == 1
        else ()
    )
    logits = -np.sort(-rng.normal(size=(batch, count)).astype(np.float32) * 3, axis=1)
    return encode(
        StepCandidates(
            "compute-bench",
            step,
            intros,
            np.zeros(0, np.int32),
            np.arange(batch, dtype=np.int32),
            np.full(batch, step, np.int32),
            np.full(batch, count, np.int32),
            rng.integers(260, 2048, batch * count).astype(np.int32),
            logits.ravel(),
            np.zeros(batch, np.float32),
            np.full(batch, count, np.int32),
            np.zeros(batch),
            np.full(batch, -1, np.int32),
            np.zeros(batch, np.float32),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Microseconds per sequence per step in the sampler.")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder))
        url = f"unix://{socket_path(Path(folder))}"
        try:
            for name, count, params in (
                ("greedy", 1, SamplingParams(max_tokens=999, temperature=0.0)),
                ("random", 64, SamplingParams(max_tokens=999)),
            ):
                settings = SamplerSettings(redis_url=url)
                stage = Stage("sampler", settings, model="bench")
                stage.transport.wait_until_up(10)
                redis.Redis.from_url(url).flushall()
                service = SamplerService(stage, settings, load_tokenizer(DEMO_MODEL))
                rng = np.random.default_rng(0)
                times: list[float] = []
                writes: list[float] = []
                write = service.writer.write

                def timed(step, decided, write=write, writes=writes):  # type: ignore[no-untyped-def]
                    at = time.perf_counter()
                    answered = write(step, decided)
                    writes.append(time.perf_counter() - at)
                    return answered

                service.writer.write = timed  # type: ignore[method-assign]
                for step in range(1, args.steps + 1):
                    packed = make_step(args.batch, step, count, params, rng)
                    at = time.perf_counter()
                    service.answer(decode(StepCandidates, packed))
                    times.append(time.perf_counter() - at)
                per_sequence = 1e6 / args.batch
                results[name] = {
                    "us_per_sequence": round(statistics.median(times[5:]) * per_sequence, 1),
                    "of_it_write_us": round(statistics.median(writes[5:]) * per_sequence, 1),
                    "candidates_bytes": len(packed),
                }
                print(name, results[name])
        finally:
            server.terminate()
            server.wait()
    print(json.dumps({"batch": args.batch, **results}))


if __name__ == "__main__":
    main()
