"""Agents want a new Node: the suite says so first, in a line."""

from pathlib import Path

import pytest

from tests.clients.install import check_node


@pytest.mark.parametrize("told", ["v20.20.2", "v8.0.0", "nothing", ""])
def test_a_node_that_is_too_old_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    if told:
        (tmp_path / "node").write_text(f"#!/bin/sh\necho {told}\n")
        (tmp_path / "node").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SystemExit, match=f"agents need Node 22 or newer, and this machine has {told or 'none'}: install it"
    ) as refused:
        check_node()
    assert len(str(refused.value).splitlines()) == 1


def test_a_newer_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node").write_text("#!/bin/sh\necho v22.1.0\n")
    (tmp_path / "node").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check_node()
