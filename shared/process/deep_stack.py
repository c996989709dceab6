"""Threads with a deep stack, for libraries that recurse for each reference in a text, and crash the
process when the stack is full.

For a grammar of 262,144 characters, a single chain of rules, llguidance takes 80 MB of stack. A
thread has 8 by default, and 2 on some systems; unused stack takes no memory.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

STACK_BYTES = 160 << 20

T = TypeVar("T")


def deep_threads(count: int, name: str) -> ThreadPoolExecutor:
    """An executor with so many threads, all started."""
    pool, begun = ThreadPoolExecutor(count, name), threading.Barrier(count + 1)
    usual = threading.stack_size(STACK_BYTES)  # of threads that start from now on
    try:
        for _ in range(count):
            pool.submit(begun.wait)
    finally:
        threading.stack_size(usual)
    begun.wait()
    return pool


def on_deep_stack(call: Callable[[], T]) -> T:
    with deep_threads(1, "deep-stack") as pool:
        return pool.submit(call).result()
