"""`penstock make-model`, and what it shares with quantize: the folder that a model is written to."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.operator.cli import main
from shared.model.files import open_model


@pytest.fixture
def umask() -> Iterator[int]:
    """An unusual one."""
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def test_a_model_is_replaced_only_if_asked(tmp_path: Path, umask: int, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert main(["make-model", str(out)]) == 0
    assert capsys.readouterr().out == f"written to {out}; serve it: penstock up --model {out}\n"
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o666 & ~umask}
    first = (out / "model.safetensors").read_bytes()
    assert main(["make-model", str(out), "--seed", "1"]) == 2
    assert (
        capsys.readouterr().err
        == f"penstock: {out}: model.safetensors is there already; --force replaces it, or give another folder\n"
    )
    (out / "model.safetensors").rename(out / "model-00001-of-00001.safetensors")
    assert main(["make-model", str(out), "--seed", "1", "--force"]) == 0
    assert [file.name for file in out.glob("*.safetensors*")] == ["model.safetensors"] and (
        out / "model.safetensors"
    ).read_bytes() != first
    assert open_model(str(out), weights=True).vocab_size == 2048


def test_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["make-model", str(tmp_path / "file"), "--force"]) == 2
    assert capsys.readouterr().err == f"penstock: {tmp_path}/file is a file: a model is written to a folder\n"


def test_the_source_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-model", str(tmp_path / "model")]) == 0
    capsys.readouterr()
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "model"), "--force"]) == 2
    assert "needs a folder of its own" in capsys.readouterr().err
