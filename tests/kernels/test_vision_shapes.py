"""How many tokens images take, against what the transformers library's processors make of the image
itself; and where they stand in a prompt.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers import AutoImageProcessor, AyaVisionProcessor, InternVLProcessor, LlavaNextProcessor, SmolVLMProcessor

from shared.model.vision.families import read_family
from shared.model.vision.images import FIRST_NAME, Image, PromptImage, names_of, place_images
from shared.model.vision.shape import VisionFamily
from shared.process.errors import Invalid, StartupError
from tests.kernels.vision_models import CONFIGS, IMAGE_TOKEN, PROCESSORS, prompt_with

SIDES = st.one_of(st.integers(1, 40), st.integers(1, 700))
LOADED: dict[str, tuple[VisionFamily, Any]] = {}


def loaded(name: str, folder: Path, processor: dict[str, Any] | None = None) -> tuple[VisionFamily, Any]:
    config = {"model_type": name, **CONFIGS[name]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor or PROCESSORS[name]))
    family = read_family(config, processor or PROCESSORS[name])
    assert family is not None
    return family, AutoImageProcessor.from_pretrained(folder, backend="pil")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processors")


def processed(processor: Any, width: int, height: int, options: dict[str, Any]) -> Any:
    return processor(Pillow.new("RGB", (width, height), (9, 99, 200)), return_tensors="np", **options)


@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
@given(width=SIDES, height=SIDES, is_low=st.booleans())
@example(width=2, height=700, is_low=False)
@settings(max_examples=60, deadline=None)
def test_tiles(name: str, folder: Path, width: int, height: int, is_low: bool) -> None:
    family, processor = LOADED.setdefault(name, loaded(name, folder))
    shape = family.shape(width, height, is_low=is_low)
    found = processed(processor, width, height, family.processing(is_low=is_low) | {"return_row_col_info": True})
    assert shape.num_tokens == 4 * found["pixel_values"].shape[1]
    assert shape.text.count("<image>") == shape.num_tokens
    words = SimpleNamespace(
        image_seq_len=4,
        fake_image_token="<fake_token_around_image>",
        image_token="<image>",
        global_image_tag="<global-img>",
        global_image_token="<global-img>",
    )
    assert shape.text == SmolVLMProcessor.replace_image_token(words, {"rows": found["rows"], "cols": found["cols"]}, 0)


@pytest.mark.parametrize(
    ("width", "height"), [(640, 480), (480, 640), (3000, 500), (1, 2000), (4097, 4096), (2048, 2048), (5, 5)]
)
def test_tiles_of_smolvlm_s_own_size(width: int, height: int, tmp_path: Path) -> None:
    own = PROCESSORS["smolvlm"] | {"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048}}
    family, processor = loaded("smolvlm", tmp_path, own)
    found = processed(processor, width, height, {"return_row_col_info": True})
    assert family.shape(width, height, is_low=False).num_tokens == 4 * found["pixel_values"].shape[1]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
@given(width=SIDES, height=SIDES, is_low=st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows_and_columns(name: str, folder: Path, width: int, height: int, is_low: bool) -> None:
    family, processor = LOADED.setdefault(name, loaded(name, folder))
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(Invalid, match="too narrow"):
            family.shape(width, height, is_low=is_low)
        return
    shape = family.shape(width, height, is_low=is_low)
    [grid] = processed(processor, width, height, family.processing(is_low=is_low))["image_grid_thw"].tolist()
    assert [1, 2 * shape.num_rows, 2 * shape.num_columns] == grid
    assert shape.num_tokens == shape.num_rows * shape.num_columns == shape.text.count("<|image_pad|>")


@pytest.mark.parametrize("name", ["aya_vision", "internvl"])
@given(width=SIDES, height=SIDES, is_low=st.booleans())
@settings(max_examples=60, deadline=None)
def test_arrangements_of_tiles(name: str, folder: Path, width: int, height: int, is_low: bool) -> None:
    family, processor = LOADED.setdefault(name, loaded(name, folder))
    shape = family.shape(width, height, is_low=is_low)
    found = processed(processor, width, height, family.processing(is_low=is_low))
    assert shape.num_tokens == 16 * len(found["pixel_values"]) == shape.text.count(family.placeholder)
    own = SimpleNamespace(
        start_image_token="<img>",
        end_image_token="</img>",
        image_token="<IMG_CONTEXT>",
        image_seq_length=16,
        img_size=64,
        patch_size=16,
        start_of_img_token="<|START_OF_IMG|>",
        end_of_img_token="<|END_OF_IMG|>",
        img_patch_token="<|IMG_PATCH|>",
        tile_token="TILE",
        tile_global_token="TILE_GLOBAL",
    )
    made = (AyaVisionProcessor if name == "aya_vision" else InternVLProcessor).replace_image_token(own, found, 0)
    assert shape.text == made


@pytest.mark.parametrize("name", ["mistral3", "pixtral"])
@given(width=SIDES, height=SIDES, is_low=st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows(name: str, folder: Path, width: int, height: int, is_low: bool) -> None:
    family, processor = LOADED.setdefault(name, loaded(name, folder))
    if max(width, height) > 128 * min(width, height):
        with pytest.raises(Invalid, match="too narrow"):
            family.shape(width, height, is_low=is_low)
        return
    shape = family.shape(width, height, is_low=is_low)
    _, _, down, across = processed(processor, width, height, family.processing(is_low=is_low))["pixel_values"].shape
    lines = shape.text.removesuffix("[IMG_END]").split("[IMG_BREAK]")
    assert lines == ["[IMG]" * (across // 16)] * (down // 16) and shape.num_tokens == len(lines) * (across // 16)


@given(width=st.integers(1, 3000), height=st.integers(1, 3000))
@settings(max_examples=300, deadline=None)
def test_resolutions(folder: Path, width: int, height: int) -> None:
    family, processor = LOADED.setdefault("llava_next", loaded("llava_next", folder))
    words = SimpleNamespace(image_processor=processor, patch_size=14, num_additional_image_tokens=1)
    words._get_unpadded_features = lambda *sizes: LlavaNextProcessor._get_unpadded_features(words, *sizes)
    count = LlavaNextProcessor._get_number_of_features(words, height, width, 56, 56) - 1  # without the class
    assert family.shape(width, height, is_low=False).num_tokens == count


def test_others_have_as_many_tokens_whatever_the_size(folder: Path) -> None:
    assert {loaded("llava", folder)[0].shape(side, 50, is_low=False).num_tokens for side in (1, 99, 2000)} == {16}
    gemma = loaded("gemma3", folder)[0].shape(70, 50, is_low=False)
    assert (
        gemma.text == "\n\n<start_of_image>" + 16 * "<image_soft_token>" + "<end_of_image>\n\n"
        and gemma.num_tokens == 16
    )


def test_what_is_no_configuration_is_said_so() -> None:
    assert read_family({"model_type": "llama"}, {}) is None and read_family({"model_type": "smolvlm"}, {}) is None
    for vision in ({"image_size": "x"}, {"patch_size": 0}):
        with pytest.raises(StartupError, match="do not say how the model sees"):
            read_family({"model_type": "smolvlm", "vision_config": vision}, PROCESSORS["smolvlm"])


def test_places_have_names_that_follow_from_the_image() -> None:
    family = read_family({"model_type": "smolvlm", **CONFIGS["smolvlm"]}, PROCESSORS["smolvlm"])
    assert family is not None
    one = prompt_with(family, [(90, 60), (64, 64)], keys=["a", "b"])
    twice = prompt_with(family, [(90, 60), (90, 60)], keys=["a", "a"])
    named = one.placed.token_ids[one.placed.token_ids < 0]
    assert (
        len(set(named.tolist())) == len(named) == sum(each.num_tokens for each in one.images)
        and named.max() <= FIRST_NAME
    )
    again = twice.placed.token_ids[twice.placed.token_ids < 0]
    assert again[: len(again) // 2].tolist() == again[len(again) // 2 :].tolist()
    assert [run.count for run in one.placed.runs] == [4] * (len(named) // 4)
    rows = [place for run in one.placed.runs for place in range(run.start, run.end)]
    assert rows == np.flatnonzero(one.placed.token_ids < 0).tolist()
    assert (
        np.array_equal(names_of("a", 9)[:5], names_of("a", 5))
        and not np.isin(names_of("a", 99), names_of("b", 99)).any()
    )


@pytest.mark.parametrize("count", [3, 5])
def test_a_prompt_must_have_as_many_places_as_its_images_take(count: int) -> None:
    with pytest.raises(Invalid, match="as many places"):
        place_images(np.array([1] + [IMAGE_TOKEN] * count), [PromptImage(Image("a", 9, 9, 9), 4)], IMAGE_TOKEN)


def test_rows_and_columns_must_be_in_one_piece() -> None:
    image = PromptImage(Image("a", 9, 9, 9), 4, 2, 2)
    placed = place_images(np.array([7, *[IMAGE_TOKEN] * 4, 8, 9]), [image], IMAGE_TOKEN)
    assert placed.positions is not None and placed.positions.tolist() == [
        [0, 1, 1, 1, 1, 3, 4],
        [0, 1, 1, 2, 2, 3, 4],
        [0, 1, 2, 1, 2, 3, 4],
    ]
    assert placed.position_shift == -2
    with pytest.raises(Invalid, match="rows and columns"):
        place_images(np.array([IMAGE_TOKEN, IMAGE_TOKEN, 7, IMAGE_TOKEN, IMAGE_TOKEN]), [image], IMAGE_TOKEN)
