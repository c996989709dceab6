"""CI without the native library fails: skipped kernel tests would look like passed ones."""

import os
from pathlib import Path

import pytest

from services.compute.backends.cpu.build import INSTRUCTION_SETS
from tests import forge


@pytest.mark.parametrize(("known", "code", "words"), [("", 1, "errors"), ("1", 0, "skipped")])
def test_kernel_tests_without_a_library_fail_unless_that_is_known(
    known: str, code: int, words: str, tmp_path: Path
) -> None:
    test = tmp_path / "test_one.py"
    test.write_text("from tests.kernels.conftest import instruction_set\n\ndef test_one(instruction_set):\n    pass\n")
    environment, log = (
        os.environ | {"PENSTOCK_KERNELS": "torch", "PENSTOCK_TEST_WITHOUT_KERNELS": known},
        tmp_path / "log",
    )
    ended_with = forge.start("pytest", environment, log, "-q", "-p", "no:cacheprovider", str(test)).wait(120)
    assert ended_with == code and f"{len(INSTRUCTION_SETS)} {words}" in log.read_text(), log.read_text()
