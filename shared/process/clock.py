"""Clock: the time as an argument, which tests can set."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Both in s. wall: since 1970, comparable between machines, and may jump; monotonic: only goes
    forward, and means something in this process only."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


SYSTEM_CLOCK = Clock()
