"""CI without the native library fails: skipped kernel tests would look like passed ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(("known", "code", "words"), [("", 1, "3 errors"), ("1", 0, "3 skipped")])
def test_kernel_tests_without_a_library_fail_unless_that_is_known(known: str, code: int, words: str, tmp_path: Path) -> None:
    test = tmp_path / "test_one.py"
    test.write_text("from tests.kernels.conftest import instruction_set\n\ndef test_one(instruction_set):\n    pass\n")
    environment = os.environ | {"PENSTOCK_KERNELS": "torch", "PENSTOCK_TEST_WITHOUT_KERNELS": known}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == code and words in found.stdout, found.stdout + found.stderr
