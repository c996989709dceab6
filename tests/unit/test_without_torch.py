"""CPU stages start without torch: the import contracts see our own imports, this test also those of
the libraries. And compute imports it when its settings are good."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = ("gateway.app", "tokenizer.service", "sampler.service", "jobs.worker", "operator.launcher", "operator.cli")


def test_cpu_stages_do_not_import_torch() -> None:
    code = f"import sys, {', '.join(f'services.{each}' for each in MODULES)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--max-num-seqs", "many"],
            "penstock: --max-num-seqs: Input should be a valid integer, unable to parse string as an integer, got "
            "'many'\n",
        ),
        (["--no-such-flag", "1"], "penstock: no flag '--no-such-flag'; penstock serve compute --help lists them\n"),
        (["--model", "/no/such/folder"], "penstock: no folder '/no/such/folder' and no file"),
    ],
)
def test_compute_tells_a_bad_setting_without_waiting_for_torch(flags: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    command = [sys.executable, "-m", "services.compute", *flags]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(message) and len(ended.stderr.splitlines()) == 1


def test_the_helper_that_parses_bodies_starts_without_redis() -> None:
    code = "import sys, services.gateway.bodies; sys.exit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
