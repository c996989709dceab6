"""Rules that refer to one another, however many a grammar has room for, end no process."""

import subprocess
import sys

import pytest


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "names",
    [
        ("rules", "property"),
        ("terminals", "option"),
        ("gbnf", "item"),
        ("reference", "strict property", "strict option"),
    ],
)
def test_a_chain_of_rules_ends_no_process(names: tuple[str, ...]) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.grammars.chains", *names],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["done"]), ran.stderr
