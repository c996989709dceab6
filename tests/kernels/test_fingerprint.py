"""The fingerprint follows the contents of a model's files, which are read once."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from services.compute.backends.choose import choose_backend
from services.compute.fingerprint import HASHES, fingerprint
from shared.model.files import DEMO_MODEL, open_model
from shared.process.settings import ComputeSettings
from tests.kernels.backends import CPU

FLOAT32, BFLOAT16 = (choose_backend(dtype, CPU) for dtype in (torch.float32, torch.bfloat16))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns(HASHES)))


def fingerprint_of(folder: Path, **settings: object) -> str:
    return fingerprint(ComputeSettings(model=str(folder), **settings), open_model(str(folder), weights=True), FLOAT32)


def test_two_fine_tunes_of_one_base_have_two_fingerprints(folder: Path) -> None:
    """They have the same names and sizes; a single weight differs."""
    before = fingerprint_of(folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert fingerprint_of(folder) != before


def test_a_copy_elsewhere_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    assert fingerprint_of(folder) == fingerprint_of(Path(shutil.copytree(folder, tmp_path / "copied" / "model")))


def test_another_tokenizer_is_another_fingerprint(folder: Path) -> None:
    before = fingerprint_of(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": None}, indent=3))
    assert fingerprint_of(folder) != before


def test_another_arithmetic_is_another_fingerprint(folder: Path) -> None:
    settings, files = ComputeSettings(model=str(folder)), open_model(str(folder), weights=True)
    assert fingerprint(settings, files, FLOAT32) != fingerprint(settings, files, BFLOAT16)


def test_contents_are_hashed_once(folder: Path) -> None:
    """Of a file that has not changed, the hash beside it is believed."""
    before = fingerprint_of(folder)
    kept = json.loads((folder / HASHES).read_text())
    kept["model.safetensors"][1] = "0" * 64
    (folder / HASHES).write_text(json.dumps(kept))
    assert fingerprint_of(folder) != before
    (folder / "model.safetensors").touch()
    assert fingerprint_of(folder) == before


@pytest.mark.parametrize("broken", ["", "[]", "{", '{"model.safetensors": 3}', '{"model.safetensors": [[1]]}', '{"model.safetensors": [[1], 2]}'])
def test_a_broken_file_of_hashes_is_written_again(broken: str, folder: Path) -> None:
    before = fingerprint_of(folder)
    (folder / HASHES).write_text(broken)
    assert fingerprint_of(folder) == before
    assert len(json.loads((folder / HASHES).read_text())["model.safetensors"][1]) == 64
