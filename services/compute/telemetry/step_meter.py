"""StepMeter: where the time of compute's steps goes, and how full they are. Totals since the start;
/metrics shows them as counters."""

import time
from bisect import bisect_left

from shared.wire.load import STEP_PARTS, Load, StepPart

TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # upper ends


class StepMeter:
    """`begin` a step, `lap` at the end of each part, `end` it. A step in flight ends in the midst
    of the next."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.seconds: dict[StepPart, float] = dict.fromkeys(STEP_PARTS, 0.0)
        self.num_tokens = 0
        self._steps_by_bucket = [0] * (len(TOKEN_BUCKETS) + 1)
        self.began_at = self._lapped_at = self._ended_at = 0.0

    def begin(self) -> None:
        self.began_at = self._lapped_at = time.perf_counter()

    def lap(self, part: StepPart) -> None:
        """Count the time since the last lap to this part."""
        now = time.perf_counter()
        self.seconds[part] += now - self._lapped_at
        self._lapped_at = now

    def end(self, num_tokens: int, began_at: float) -> float:
        """The step is over that began then. Returns its seconds, but for those in which another was
        not over yet."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        self._steps_by_bucket[bisect_left(TOKEN_BUCKETS, num_tokens)] += 1
        seconds = self._lapped_at - max(began_at, self._ended_at)
        self._ended_at = self._lapped_at
        return seconds

    def load(self) -> Load:
        """The meter's figures, for the registry."""
        buckets = {
            str(end): float(count) for end, count in zip((*TOKEN_BUCKETS, "inf"), self._steps_by_bucket, strict=True)
        }
        return Load(
            steps=self.num_steps, iteration_tokens=self.num_tokens, step_s=dict(self.seconds), steps_by_tokens=buckets
        )
