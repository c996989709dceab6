"""`python -m tests.gateway.grammars_that_last`: the helper that checks grammars, but for those that
begin with "lasting" or "deadly".
"""

import os
import time

from services.requests.text.schemas.prepare import Enforceable
from services.requests.workers.grammars import worker
from shared.model.constraint import Constraint
from shared.process.plain import unpack
from shared.process.worker import run_worker


def answer(question: bytes) -> Enforceable:
    constraint = unpack(question, (Constraint,))
    if constraint.text.startswith("lasting"):
        time.sleep(3600)
    if constraint.text.startswith("deadly"):
        os._exit(7)  # as running out of memory does
    return worker.answer(question)


if __name__ == "__main__":
    run_worker(answer)
