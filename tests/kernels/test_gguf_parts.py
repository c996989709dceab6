"""GGUF models in several files: they are the one model that the files were before they were cut,
and a part that is missing or wrong is named in one line.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from services.compute.backends.choose import choose_backend
from services.compute.models.architectures import read_config
from services.compute.weights.fingerprint import content_hashes, fingerprint
from services.compute.weights.loader import load_weights
from services.compute.weights.sizes import sizes_of
from services.operator.preflight import weights_bytes
from shared.model.files import open_model
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings, UpSettings
from tests.kernels.backends import CPU, FLOAT32
from tests.kernels.families import CONFIGS, SIZES, Engine
from tests.kernels.gguf_files import Kind, Writer
from tests.kernels.test_gguf import check_against, random_model
from tests.kernels.test_models import prompts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def cut(
    path: Path, folder: Path, count: int, *, is_first_empty: bool = False, num_tensors: int | None = None
) -> list[Path]:
    """The file's parts, written by the package's writer, as gguf-split names and numbers them; the
    first may hold the metadata only.
    """
    folder.mkdir(exist_ok=True)
    reader = GGUFReader(path)
    tensors = reader.tensors
    cuts = np.array_split(np.arange(len(tensors)), count - is_first_empty)
    shares: list[np.ndarray] = [np.arange(0), *cuts] if is_first_empty else list(cuts)
    names = [folder / f"model-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]
    for number, (name, share) in enumerate(zip(names, shares, strict=True)):
        writer = GGUFWriter(name, reader.fields["general.architecture"].contents() if number == 0 else "")
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    kind = field.types[0]
                    writer.add_key_value(
                        key, field.contents(), kind, field.types[1] if kind == GGUFValueType.ARRAY else None
                    )
        else:
            writer.kv_data[0].clear()  # the other parts say nothing of the model
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(tensors) if num_tensors is None else num_tensors)
        for at in share:
            writer.add_tensor(tensors[at].name, np.asarray(tensors[at].data), raw_dtype=tensors[at].tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return Writer(random_model(CONFIGS["llama3"]), tmp_path / "model.gguf").write(Kind.F16)


@pytest.mark.parametrize("is_first_empty", [False, True])
def test_parts_are_the_model_that_was_cut(whole: Path, tmp_path: Path, is_first_empty: bool) -> None:
    parts = cut(whole, tmp_path / "parts", 4, is_first_empty=is_first_empty)
    some = prompts(3, SIZES["vocab_size"])
    expected = Engine(open_model(str(whole))).generate(some, 20)
    for name in (parts[0], tmp_path / "parts"):
        files = open_model(str(name))
        assert files.weights == parts[0] and files.name == ("model" if name == parts[0] else "parts")
        assert files.config == open_model(str(whole)).config
        assert Engine(files).generate(some, 20) == expected
        assert sizes_of(files)["n_params"] == sizes_of(open_model(str(whole)))["n_params"]
        assert (
            sizes_of(files)["size"] == weights_bytes(files, UpSettings()) == sum(part.stat().st_size for part in parts)
        )


def test_they_are_compared_with_transformers(tmp_path: Path) -> None:
    model = random_model(CONFIGS["qwen2"])
    [first, *_] = cut(Writer(model, tmp_path / "model.gguf").write(Kind.F32), tmp_path / "parts", 3)
    check_against(model, first)


def test_links_of_a_cache_keep_the_parts_names(whole: Path, tmp_path: Path) -> None:
    """As the hub's client leaves them: links to files that are named by what they hold."""
    parts = cut(whole, tmp_path / "parts", 2)
    (tmp_path / "links").mkdir()
    for number, part in enumerate(parts):
        (tmp_path / "links" / part.name).symlink_to(part.rename(tmp_path / f"blob{number}"))
    files = open_model(str(tmp_path / "links" / parts[0].name))
    load_weights(files.weights, read_config(files.config), FLOAT32)


def test_the_fingerprint_is_of_all_parts(whole: Path, tmp_path: Path) -> None:
    parts = cut(whole, tmp_path / "parts", 3)
    backend, settings = choose_backend(torch.float32, CPU), ComputeSettings(model=str(parts[0]))

    def name() -> str:
        return fingerprint(settings, open_model(str(parts[0])), backend).name

    assert list(content_hashes(open_model(str(parts[0])))) == [part.name for part in parts]
    before = name()
    changed = bytearray(parts[2].read_bytes())
    changed[-1] ^= 1
    parts[2].write_bytes(changed)
    assert name() != before


def test_a_part_that_is_missing_or_wrong_is_named(whole: Path, tmp_path: Path) -> None:
    parts = cut(whole, tmp_path / "parts", 3)

    def refused(message: str, model: Path = parts[0]) -> None:
        with pytest.raises(StartupError, match=message) as caught:
            open_model(str(model))
        assert len(str(caught.value).splitlines()) == 1

    refused("model-00002-of-00003.gguf is not the first part of its model: name model-00001-of-00003.gguf", parts[1])
    aside = parts[1].rename(tmp_path / "aside")
    refused("part 2 of 3 is missing: .*model-00002-of-00003.gguf")
    refused("part 2 of 3 is missing: .*model-00002-of-00003.gguf", tmp_path / "parts")
    shutil.copy(parts[2], parts[1])
    refused("its metadata says that it is part 3 of 3, its name says 2 of 3")
    shutil.copy(cut(whole, tmp_path / "shorter", 2)[1], parts[1])
    refused("its metadata says that it is part 2 of 2, its name says 2 of 3")
    aside.replace(parts[1])
    renamed = shutil.copy(parts[0], tmp_path / "other.gguf")
    refused("other.gguf: its metadata says that it is part 1 of 3, its name says 1 of 1", Path(renamed))
    shutil.copy(cut(whole, tmp_path / "otherwise", 3, is_first_empty=True)[1], parts[1])
    refused("a tensor is in two of its 3 parts|hold .* tensors, and should hold")
    cut(whole, tmp_path / "parts", 3, num_tensors=99)
    refused("its 3 parts hold 30 tensors, and should hold 99")
    parts[1].write_bytes(parts[1].read_bytes()[:-100])
    refused("model-00002-of-00003.gguf ends in the middle of")
