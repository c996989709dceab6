"""`python -m services.requests.workers.grammars.worker`: the gateway's helper that makes what clients want
their answers to match such that it can be enforced.

It compiles it, too, to see whether it is.

A grammar comes from any client. The library counts its work and its memory; if that should fail, this
process is killed, or its memory ends, and nothing else with it. A question is
a packed Constraint. The answer is Enforceable or Invalid.
"""

from services.requests.text.schemas.prepare import Enforceable, prepare
from shared.model.constraint import Constraint
from shared.process.plain import unpack
from shared.process.worker import run_worker


def answer(question: bytes) -> Enforceable:
    return prepare(unpack(question, (Constraint,)))


if __name__ == "__main__":
    run_worker(answer)
