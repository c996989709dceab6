"""How far the loading of a model has come."""

import sys
import time

from tqdm import tqdm

from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")

LINE_EVERY_S = 5.0


class LoadingProgress:
    """A bar on a terminal that is this process's own; elsewhere a line of log every few seconds,
    which disturbs no other's."""

    def __init__(self, num_tensors: int) -> None:
        self._num_tensors = num_tensors
        self._num_read = 0
        self._told_at = time.monotonic()
        self._bar = tqdm(
            total=num_tensors, desc="loading weights", unit="tensor", file=sys.stderr, mininterval=0.5, delay=0.5
        )

    def update(self) -> None:
        """Count one more tensor that was read."""
        self._num_read += 1
        self._bar.update()
        if self._bar.disable and time.monotonic() - self._told_at > LINE_EVERY_S:
            self._told_at = time.monotonic()
            log.info("loading weights", tensors=f"{self._num_read}/{self._num_tensors}")

    def close(self) -> None:
        self._bar.close()
