"""`python -m tests.tokenizer_of_tests`: a tokenizer whose helper, which renders templates, is a fork."""

from services.tokenizer.__main__ import main
from shared.wire.stage import run_stage
from tests.forge import fork_helpers

if __name__ == "__main__":
    fork_helpers()
    run_stage(main)
