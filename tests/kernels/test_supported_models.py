"""The page of architectures: every row runs in the form that it names, from safetensors and from GGUF in Q8_0."""

from copy import deepcopy
from dataclasses import replace
from functools import cache as once
from pathlib import Path

import gguf
import pytest

from docs.reference.models import FORMS, class_of, listed
from services.compute.models.architectures import is_native
from shared.model.files import DEMO_MODEL, open_model, text_config
from shared.model.gguf.families import FAMILIES
from shared.model.gguf.library_families import LIBRARY_FAMILIES
from shared.process.errors import StartupError
from tests.kernels.gguf_files import ARCHITECTURES, Kind, Writer
from tests.kernels.gguf_library_files import LibraryWriter
from tests.kernels.test_gguf import FAMILIES as NATIVE
from tests.kernels.test_gguf import cache, random_model  # noqa: F401
from tests.kernels.test_gguf_layouts import FILES, original
from tests.kernels.test_gguf_layouts import write as write_layouts
from tests.kernels.test_gguf_library import CONFIGS as LIBRARY
from tests.models.cases import CASES
from tests.models.compare import build, write_checkpoint

ENCODERS = {"bert", "nomic-bert"}  # which no row names
# of classes whose tensors lie in files as they are
CONFIGS = NATIVE | LIBRARY
PLAIN = [(ARCHITECTURES[config.model_type], name) for name, config in CONFIGS.items()]
RENAMED = [("mistral3", "llama3"), ("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"), ("qwen3vlmoe", "qwen3-moe")]
WRITTEN = [*PLAIN, *RENAMED, *((word, name) for name, (word, _) in FILES.items())]  # GGUF's word, and what makes a file


@once
def forms() -> dict[tuple[str, str], tuple[str, list[str], str]]:
    """The page's form, names of GGUF and reason, by architecture and its text's type."""
    return {(name, text): rest for name, text, *rest in listed()}


@pytest.mark.parametrize("name", CASES)
def test_the_choice_is_the_pages(name: str) -> None:
    _, blueprint = CASES[name]
    row = class_of(blueprint), "" if blueprint.text is None else blueprint.text.model_type
    form, _, _ = forms()[row]
    config = text_config(blueprint.config(2).to_dict() | {"architectures": [row[0]]})
    files = replace(open_model(str(DEMO_MODEL)), config=config)
    assert is_native(files, "auto") == (form == "native") and not is_native(files, "transformers")
    if form == "native":
        assert is_native(files, "native")
    else:
        with pytest.raises(StartupError, match="--model-impl native: .* is not supported"):
            is_native(files, "native")


def test_every_row_has_a_case_and_every_family_of_gguf_a_row() -> None:
    cases = {
        (class_of(blueprint), "" if blueprint.text is None else blueprint.text.model_type)
        for _, blueprint in CASES.values()
    }
    # as published, where the class of transformers is Llama's
    assert forms().keys() == cases | {("InternLM3ForCausalLM", "")}
    words = {word for _, words, _ in forms().values() for word in words}
    written = {word for word, _ in WRITTEN}
    assert words == written == FAMILIES.keys() - ENCODERS


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_runs_as_its_row_says(name: str, tmp_path: Path) -> None:
    _, blueprint = CASES[name]
    config = blueprint.config()
    write_checkpoint(name, blueprint.model_class(config), config, tmp_path)
    _, outcome = build(open_model(str(tmp_path), weights=True))
    form, _, reason = forms()[class_of(blueprint), "" if blueprint.text is None else blueprint.text.model_type]
    way, _, why = outcome.partition(": ")
    assert FORMS.get(way, way) in form.split(" or ")
    assert way != "refused" or any(each in why for each in reason.split("; "))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("word", "name"), WRITTEN)
def test_a_gguf_file_runs_as_its_row_says(
    word: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    if name in FILES:
        write_layouts(name, original(name), path, gguf.GGMLQuantizationType.Q8_0)
    else:
        config = deepcopy(CONFIGS[name])
        for size in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
            if isinstance(getattr(config, size, None), int):
                setattr(config, size, 96)  # which blocks of 32 fill
        monkeypatch.setitem(ARCHITECTURES, config.model_type, word)
        (LibraryWriter if word in LIBRARY_FAMILIES else Writer)(random_model(config), path).write(Kind.Q8_0)
    files = open_model(str(path), weights=True)
    _, outcome = build(files)
    form, words, _ = forms()[files.config["architectures"][0], ""]
    assert word in words and FORMS[outcome] in form.split(" or ")
