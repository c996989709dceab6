"""The plugin that runs tests in forked processes: every test has a report, also where a process dies; fixtures of a session end."""

import json
import subprocess
import sys
from pathlib import Path

from tests.__main__ import ROOT

TESTS = """
import os, signal, pytest

@pytest.fixture(scope="session")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    yield folder
    (folder / "ended").touch()

@pytest.mark.parametrize("number", range(3))
def test_passes(place, number):
    assert place.is_dir()

def test_fails(place):
    os.system("echo what a child says")
    assert place is None
"""
DEADLY = """
import os, signal

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_comes_after():
    pass
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.forked", "--forks", "2", "--basetemp", str(folder / "base"), *arguments, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_every_test_has_a_report_and_every_fixture_its_end(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    (tmp_path / "test_deadly.py").write_text(DEADLY)
    done = run(tmp_path)
    assert done.returncode == 1 and "5 failed, 9 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("what a child says") == 2 * 3, "as a part of the source, and as what was captured"
    assert done.stdout.count("the process that ran this file died, in this test or before it") == 2
    for test in ("test_dies", "test_comes_after"):
        assert f"test_deadly.py::{test}" in done.stdout.partition("short test summary")[2]
    assert "by exit code or signal: [-9]" in done.stdout
    assert len(json.loads((tmp_path / ".pytest_cache/v/cache/lastfailed").read_text())) == 5, "they may run once more"
    assert len(list(tmp_path.glob("base/*/place0"))) - len(list(tmp_path.glob("base/*/place0/ended"))) <= 1, "but that of the process that died"


def test_the_first_failure_may_be_the_last(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TESTS)
    done = run(tmp_path, "--maxfail=1")
    assert done.returncode == 1 and "stopping after 1 failures" in done.stdout, done.stdout + done.stderr


def test_what_can_t_be_collected_ends_it_before_it_forks(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("import nothing_of_this_name")
    done = run(tmp_path)
    assert done.returncode == 2 and "1 error" in done.stdout, done.stdout + done.stderr
