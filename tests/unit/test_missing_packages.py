"""A command of which a package is not installed says so in one line."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from services.operator.cli import main

ROOT = Path(__file__).parent.parent.parent


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


@pytest.mark.parametrize(
    ("package", "command"),
    [("simulator", ["simulate"]), ("modeltools", ["quantize", "a", "b"]), ("modeltools", ["make-model", "a"])],
)
def test_what_an_image_leaves_out_is_one_line(
    package: str, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left_out = [f"services.{each}" for each in ("simulator", "modeltools")]
    assert set(left_out) <= set((ROOT / ".dockerignore").read_text().replace("/", ".").splitlines())
    for name in [name for name in sys.modules if name.startswith(f"services.{package}")]:
        monkeypatch.delitem(sys.modules, name)
    find = PathFinder.find_spec
    monkeypatch.setattr(
        PathFinder,
        "find_spec",
        lambda name, *others: None if name == f"services.{package}" else find(name, *others),
    )
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"penstock: the package 'services.{package}") and len(error.splitlines()) == 1


def test_a_mistake_of_ours_is_no_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "services.operator.status", None)
    with pytest.raises(ModuleNotFoundError):
        main(["status"])
