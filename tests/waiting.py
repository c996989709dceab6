"""wait_until instead of sleep: it fails with words."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], *, description: str, timeout_s: float = 60.0) -> T:
    """The first true value of condition()."""
    deadline = time.monotonic() + timeout_s
    while True:
        is_last = time.monotonic() > deadline  # so that what has come while this process was held up still counts
        if value := condition():
            return value
        if is_last:
            raise AssertionError(f"after {timeout_s} s still not: {description}")
        time.sleep(0.02)
