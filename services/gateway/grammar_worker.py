"""`python -m services.gateway.grammar_worker`: the gateway's helper that makes what clients want their answers to match such that it can be enforced.

It compiles it, too, to see whether it is.

A grammar comes from whoever sends a request. The library counts its work and its memory; where that should not hold, this process is killed, or its memory
ends, and nothing else with it. A question is a pickled Constraint, the answer Prepared or Invalid.
"""

import pickle
import resource
import sys

from services.gateway.schemas.prepare import Prepared, prepare
from services.gateway.worker import run_worker

MEMORY = 512 << 20  # more than what the process has when it begins


def answer(question: bytes) -> Prepared:
    return prepare(pickle.loads(question))


def limit_memory() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


if __name__ == "__main__":
    if sys.platform == "linux":
        limit_memory()
    run_worker(answer)
