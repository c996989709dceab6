"""The compute loop alone, in a process of its own: what bench.pipeline compares the pipeline with.

Scheduler, runner and reduction are the service's, built from the same flags; decisions are taken at
once. The process has the threads and the niceness that `penstock up` gives compute. Where the
device draws, a step is in flight. It answers each line on its standard input, {"streams": 8,
"num_in": 128, "num_out": 128}, with one of JSON.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from services.operator.launcher import COMPUTE_NICENESS


def prompts(streams: int, length: int) -> list[list[int]]:
    """No two begin alike."""
    return [[(7 * number + 13 * at) % 2000 + 5 for at in range(length)] for number in range(streams)]


class Loop:
    """The process, from outside."""

    def __init__(self, flags: list[str], log: Path) -> None:
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                ["nice", "-n", str(COMPUTE_NICENESS), sys.executable, "-m", "bench.loop", *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PENSTOCK_LOG_LEVEL": "error"},
            )
        self.log = log
        self.num_threads: int = self._read()["threads"]

    def run(self, streams: int, num_in: int, num_out: int) -> dict[str, float]:
        """Seconds from the first prompt to the last token, those of its parts, and CPU seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"streams": streams, "num_in": num_in, "num_out": num_out}).encode() + b"\n"
        )
        self.process.stdin.flush()
        return self._read()

    def resident_bytes(self) -> int:
        """Memory that the process has now, without what it only maps from files."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the compute loop has ended:\n{self.log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    import torch

    from bench.gpu.steps import Steps
    from services.compute.candidates.reduction import reduce
    from services.compute.loop.engine import build_engine
    from services.compute.scheduling.offline import run_step
    from services.compute.sequence import Request, Sequence, Tokens
    from services.compute.sequence.batch import ScheduledBatch
    from shared.model.files import open_model
    from shared.model.sampling_params import SamplingParams
    from shared.process.settings import ComputeSettings, load_settings

    settings = load_settings(ComputeSettings)
    engine = build_engine(settings, open_model(settings.model, weights=True))
    seconds: dict[str, float] = {}
    draws = engine.runner.model.backend.device.type == "cuda"

    def decide(batch: ScheduledBatch, sampled: list[Sequence]) -> list[int]:
        started = time.perf_counter()
        logits = engine.runner.forward(batch)
        computed = time.perf_counter()
        chosen: list[int] = reduce(logits, sampled, engine.runner.row_search).chosen.tolist() if sampled else []
        seconds["forward"] += computed - started
        seconds["reduce"] += time.perf_counter() - computed
        return chosen

    print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(max_tokens=asked["num_out"], temperature=0.0)
        seconds |= {"forward": 0.0, "reduce": 0.0}
        num_steps, started, cpu = 0, time.perf_counter(), time.process_time()
        steps = Steps(engine.scheduler, engine.runner, engine.runner.row_search, is_ahead=True)
        for number, prompt in enumerate(prompts(asked["streams"], asked["num_in"])):
            engine.scheduler.add(Sequence(Request(number, str(number), params), Tokens(prompt)))
        while engine.scheduler.num_unfinished:
            steps.step() if draws else run_step(engine.scheduler, decide)
            num_steps += 1
        seconds["forward"] += (time.perf_counter() - started) * draws
        print(
            json.dumps(
                {
                    "seconds": time.perf_counter() - started,
                    "cpu": time.process_time() - cpu,
                    "steps": num_steps,
                    **seconds,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
