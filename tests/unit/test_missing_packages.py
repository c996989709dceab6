"""A command of which a package is not installed says so in one line."""

import sys

import pytest

from services.operator.cli import main


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    for name in [name for name in sys.modules if name.startswith(("rich.", "services.operator.status"))]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["status"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("penstock: the package 'rich")
        and "pip install 'penstock[all]'" in error
        and len(error.splitlines()) == 1
    )


def test_a_mistake_of_ours_is_no_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "services.operator.status", None)
    with pytest.raises(ModuleNotFoundError):
        main(["status"])
