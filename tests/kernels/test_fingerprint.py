"""The fingerprint follows the contents of a model's files, which are read once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.compute.backends.choose import choose_backend
from services.compute.weights.fingerprint import HASHES, Fingerprint, _cached, fingerprint
from shared.model.files import DEMO_MODEL, open_model
from shared.model.prefix_hash import prefix_root
from shared.process.settings import ComputeSettings
from tests.kernels.backends import CPU

FLOAT32, BFLOAT16 = (choose_backend(dtype, CPU) for dtype in (torch.float32, torch.bfloat16))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns(HASHES)))


def fingerprint_of(folder: Path, **settings: object) -> str:
    return whole_of(folder, **settings).name


def whole_of(folder: Path, **settings: object) -> Fingerprint:
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
    """The hash beside a file that has not changed is believed."""
    before = fingerprint_of(folder)
    kept = json.loads((folder / HASHES).read_text())
    kept["model.safetensors"][1] = "0" * 64
    (folder / HASHES).write_text(json.dumps(kept))
    assert fingerprint_of(folder) != before
    (folder / "model.safetensors").touch()
    assert fingerprint_of(folder) == before


def test_processes_that_start_at_once_hash_once_also_in_a_folder_that_is_read_only(
    folder: Path, tmp_path: Path
) -> None:
    """Also as root, who may write into any folder: a folder of the hashes' name stands in the way."""
    (folder / HASHES).mkdir()
    code = (
        "import logging, sys; from services.compute.weights.fingerprint import content_hashes; from "
        "shared.model.files import open_model; "
    )
    code += "logging.basicConfig(level='INFO'); print(content_hashes(open_model(sys.argv[1], weights=True)))"
    command, environment = (
        (sys.executable, "-c", code, str(folder)),
        os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) for _ in range(2)]
    found = [process.communicate(timeout=120) for process in processes]
    assert len({answer for answer, _ in found}) == 1 and "model.safetensors" in found[0][0]
    assert sum(log.count("model files hashed") for _, log in found) == 1


def test_hashes_in_the_cache_are_found_beside_old_ones_in_a_folder_that_is_read_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = fingerprint_of(folder)
    (folder / HASHES).replace(_cached(folder))
    (folder / HASHES).write_text(json.dumps({"model.safetensors": [[1, 2, 3, 4], "0" * 64]}))
    monkeypatch.setattr("services.compute.weights.fingerprint._hash", pytest.fail)
    assert fingerprint_of(folder) == before


def test_who_has_no_home_hashes_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_of(folder)

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    (folder / HASHES).unlink()
    assert fingerprint_of(folder) == before and (folder / HASHES).is_file()


@pytest.mark.parametrize(
    "broken",
    ["", "[]", "{", '{"model.safetensors": 3}', '{"model.safetensors": [[1]]}', '{"model.safetensors": [[1], 2]}'],
)
def test_a_broken_file_of_hashes_is_written_again(broken: str, folder: Path) -> None:
    before = fingerprint_of(folder)
    (folder / HASHES).write_text(broken)
    assert fingerprint_of(folder) == before
    assert len(json.loads((folder / HASHES).read_text())["model.safetensors"][1]) == 64


def test_blocks_are_named_by_what_decides_their_bytes(folder: Path) -> None:
    """Equal keys and values are shared, whatever else differs; others never are."""
    plain = whole_of(folder)
    head = whole_of(folder, quantize_lm_head=True)
    assert head.kv == plain.kv and head.name != plain.name
    assert len({plain.kv, whole_of(folder, kv_cache_dtype="int8").kv, whole_of(folder, quantization="w8a8").kv}) == 3
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    other_text = whole_of(folder)
    assert other_text.kv == plain.kv and other_text.name != plain.name
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert whole_of(folder).kv != plain.kv


def test_the_longest_sequence_counts_where_it_chooses_frequencies(folder: Path) -> None:
    """A longrope model has other factors for long sequences, and the server's limit says which all get."""
    assert whole_of(folder, max_model_len=64) == whole_of(folder, max_model_len=128)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}})
    )
    assert whole_of(folder, max_model_len=64).kv != whole_of(folder, max_model_len=128).kv


def test_no_two_roots_of_prefixes_are_one() -> None:
    places = [("a", ""), ("", "a"), ("ab", ""), ("a", "b"), ("", "ab"), ("", "")]
    assert len({prefix_root(one, salt=two) for one, two in places}) == len(places)
