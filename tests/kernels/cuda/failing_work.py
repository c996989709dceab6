"""`python -m tests.kernels.cuda.failing_work`: bench.gpu's worker with cases that fail in every way. No kernel runs."""

import os
import sys
import threading
from collections.abc import Iterator

from bench.gpu import work
from bench.gpu.cases import Case
from bench.gpu.check import Check
from bench.gpu.journal import Found


def good() -> Iterator[Found]:
    yield Check("kernel", "float32", "case", 1e-7, 1e-6, is_same_alone=True)


def wrong() -> Iterator[Found]:
    yield Check("kernel", "float32", "wrong", 1e-5, 1e-6, is_same_alone=True)


def failing() -> Iterator[Found]:
    yield from good()
    raise RuntimeError("no\n  kernel")


def dying() -> Iterator[Found]:
    os._exit(9)


def hanging() -> Iterator[Found]:
    yield from good()
    threading.Event().wait()


def cases(*_: object) -> Iterator[Case]:
    runs = {"first": good, "wrong": wrong, "failing": failing, "dying": dying, "hanging": hanging, "last": good}
    return (Case("kernels", name, run, limit_s=1.0 if run is hanging else 60.0) for name, run in runs.items())


if __name__ == "__main__":
    work.make_cases = cases  # type: ignore[assignment]
    sys.exit(work.main())
