"""`python -m tests.gateway_of_tests`: a gateway that waits for its helpers' verdicts for as long as they
take, and starts each with its first question. They run behind everything else, and on a busy machine
theirs is the last turn; and the start of all takes ten times what the gateway's own does.
"""

from services.gateway.__main__ import main
from services.requests.workers.grammars import answers, checker
from services.requests.workers.pool import HelperPool
from shared.wire.stage import run_stage


async def started_when_asked(self: HelperPool) -> None:
    """As HelperPool.start, but for the start."""


if __name__ == "__main__":
    answers.CHECK_TIMEOUT_S = checker.CHECK_TIMEOUT_S = checker.WITHIN_S = 600.0
    HelperPool.start = started_when_asked  # type: ignore[method-assign]
    run_stage(main)
