"""`python -m tests.unit.answers_in_front`: the helper that checks answers, at its starter's priority.

Behind all others, it would wait for as long as those of other tests compute.
"""

from services.requests.workers.grammars.answer_worker import answer
from shared.process.worker import run_worker

if __name__ == "__main__":
    run_worker(answer)
