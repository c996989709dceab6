"""`python -m tests.patient_gateway`: a gateway that waits for its helpers' verdicts for as long as they
take. They run behind everything else, and on a busy machine theirs is the last turn.
"""

from services.gateway.__main__ import main
from services.requests.workers.grammars import answers, checker
from shared.wire.stage import run_stage

if __name__ == "__main__":
    answers.CHECK_TIMEOUT_S = checker.CHECK_TIMEOUT_S = checker.WITHIN_S = 600.0
    run_stage(main)
