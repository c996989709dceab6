"""`python -m bench.gpu` where cases fail, die and hang: the others run all the same, and what was found is on disk.

Part of `make verify SUITE=cuda-kernels`.
"""

import json
from pathlib import Path

import pytest

from bench.gpu import __main__ as bench
from bench.gpu.journal import DID_NOT_END, Journal
from bench.gpu.options import device_and_versions, parse
from shared.process.errors import StartupError

NAMES = ["first", "wrong", "failing", "dying", "hanging", "last"]


def errors_in(path: Path) -> dict[str, str | None]:
    """Errors by case; None: it holds."""
    return {each["name"]: None if each["holds"] else each["error"] for each in json.loads(path.read_text())["cases"]}


def test_a_case_that_fails_in_whatever_way_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "WORKER", "tests.kernels.cuda.failing_work")
    monkeypatch.setattr(bench, "is_interpreted", lambda: False)  # cases of a device are bounded in time
    arguments = ["--out", str(tmp_path), "--parts", "kernels"]
    assert bench.run_all(parse(arguments), arguments) == 1
    expected = {
        "first": None,
        "wrong": "",
        "failing": "RuntimeError: no kernel",
        "dying": DID_NOT_END,
        "hanging": DID_NOT_END,
        "last": None,
    }
    assert errors_in(tmp_path / "gpu.json") == expected
    page = (tmp_path / "gpu.md").read_text()
    assert (
        "2 of 6 cases hold" in page
        and "- failing: RuntimeError: no kernel" in page
        and "- wrong: does not hold" in page
    )
    assert "| kernel | float32 | 5 |" in page, "what was found before a case failed is there"
    begun = [line.split()[-1] for line in capfd.readouterr().out.splitlines() if line.startswith("ok  ")]
    assert begun == ["first", "last"]
    assert bench.run_all(parse(arguments), arguments) == 1
    output = capfd.readouterr().out
    assert "ok  " not in output and output.count("FAIL") == 2, "what holds is not run again; what does not, once more"
    assert sorted(errors_in(tmp_path / "gpu.json")) == sorted(NAMES)


def test_a_file_of_another_device_is_not_mixed_with_this_ones(tmp_path: Path) -> None:
    on = device_and_versions()
    journal = Journal(tmp_path / "gpu.json", on | {"device": "NVIDIA H100"}, "one")
    journal.begin("kernels", "first", 60.0)
    with pytest.raises(StartupError, match="is of NVIDIA H100 torch .*: choose another --out"):
        Journal(tmp_path / "gpu.json", on, "two")
    (tmp_path / "gpu.json").write_text("{}")
    with pytest.raises(StartupError, match="no file of this benchmark"):
        Journal(tmp_path / "gpu.json", on, "two")
