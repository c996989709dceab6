"""Models that see: tokens and logits against the transformers library, and equal bits however they are computed."""

import itertools
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor

from bench.gpu.attention_checks import check_spans
from services.compute.backends.torch.attention import Heads
from services.compute.backends.torch.backend import TorchBackend
from services.compute.images.pixels import prepare
from services.compute.images.tower import load_tower
from shared.model.prefix_hash import prefix_hashes
from shared.process.plain import pack
from tests.kernels.backends import CPU, native_backend
from tests.kernels.families import Engine
from tests.kernels.vision_models import CONFIGS, IMAGE_TOKEN, Seen, family_of, picture, prompt_with, write_vision_model

SIZES = [(90, 60), (64, 200), (200, 64), (300, 300)]
NUM_TOKENS = 20


def png(image: Any) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def pixels_of(folder: Path, size: tuple[int, int], seed: int = 0, *, is_low: bool = False) -> dict[str, Any]:
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return prepare(processor, pack((family_of(folder).processing(is_low=is_low), png(picture(*size, seed)))))


def given_to_library(name: str, pixels: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The inputs of several images at once, as the library's model takes them."""
    if name in ("smolvlm", "idefics3"):
        return {"pixel_values": torch.cat([torch.from_numpy(each["pixel_values"]) for each in pixels], 1)}
    if name == "llava_next":
        most = max(each["pixel_values"].shape[1] for each in pixels)
        padded = [
            np.pad(each["pixel_values"], [(0, 0), (0, most - each["pixel_values"].shape[1]), *[(0, 0)] * 3])
            for each in pixels
        ]
        return {
            "pixel_values": torch.from_numpy(np.concatenate(padded)),
            "image_sizes": torch.from_numpy(np.concatenate([each["image_sizes"] for each in pixels])),
        }
    if name in ("mistral3", "pixtral"):
        height, width = np.max([each["pixel_values"].shape[2:] for each in pixels], 0)
        sides = [(height - each["pixel_values"].shape[2], width - each["pixel_values"].shape[3]) for each in pixels]
        padded = [
            np.pad(each["pixel_values"], [(0, 0), (0, 0), (0, down), (0, across)])
            for each, (down, across) in zip(pixels, sides, strict=True)
        ]
        return {
            "pixel_values": torch.from_numpy(np.concatenate(padded)),
            "image_sizes": torch.from_numpy(np.concatenate([each["image_sizes"] for each in pixels])),
        }
    return {name: torch.from_numpy(np.concatenate([each[name] for each in pixels])) for name in pixels[0]}


ON_MODULES = ["aya_vision"]  # of the library, the text, too
PARITY = [
    *((name, "transformers" if name in ON_MODULES else "native") for name in CONFIGS),
    ("smolvlm", "transformers"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "model_impl"), PARITY)
def test_tokens_and_logits_equal_the_library_s(name: str, model_impl: str, tmp_path: Path) -> None:
    reference, family = write_vision_model(name, tmp_path), family_of(tmp_path)
    tower = load_tower(tmp_path, torch.float32, torch.device("cpu"))
    engine = Engine(tmp_path, model_impl=model_impl, max_model_len=2048)
    for turn, sizes in enumerate([[SIZES[0]], [SIZES[1], SIZES[2]], [SIZES[3], SIZES[0], SIZES[3]]]):
        pixels = [pixels_of(tmp_path, size, seed) for seed, size in enumerate(sizes)]
        keys = [f"{turn}.{number}" for number in range(len(sizes))]
        seen = prompt_with(family, sizes, keys=keys)
        engine.runner.images = {
            key: torch.cat([tower.encode(call) for call in tower.calls(each)])
            for key, each in zip(keys, pixels, strict=True)
        }
        [tokens] = engine.generate(
            [seen.placed.token_ids.tolist()], NUM_TOKENS, images=[seen.placed], sees_whole_images=family.num_whole > 0
        )
        if IMAGE_TOKEN in tokens:  # the library takes one that is generated for a place
            tokens = tokens[: tokens.index(IMAGE_TOKEN) + 1]
        ids = torch.tensor([[*seen.token_ids, *tokens[:-1]]])
        kinds = (
            {{"q": "mm_token_type_ids", "g": "token_type_ids"}[name[0]]: (ids == IMAGE_TOKEN).int()}
            if name[0] in "qg"
            else {}
        )
        with torch.no_grad():
            found = reference(
                input_ids=ids, attention_mask=torch.ones_like(ids), **given_to_library(name, pixels), **kinds
            ).logits
        logits = found[0, len(seen.token_ids) - 1 :]
        if name == "aya_vision":  # its text's part alone multiplies them, and the library's model of both forgets that
            logits = logits * AutoConfig.from_pretrained(tmp_path).text_config.logit_scale
        torch.testing.assert_close(torch.stack(engine.logits[0][: len(tokens)]), logits, atol=2e-4, rtol=1e-4)
        assert tokens == logits.argmax(-1).tolist()


def test_an_image_s_tokens_see_each_other_where_the_model_was_made_so(tmp_path: Path) -> None:
    write_vision_model("gemma3", tmp_path)
    seen = prompt_with(family_of(tmp_path), [(64, 64)])
    found = []
    for whole in (True, False):
        engine = Engine(tmp_path)
        engine.runner.images = {"0": torch.randn(16, 64, generator=torch.Generator().manual_seed(1))}
        engine.generate([seen.placed.token_ids.tolist()], 1, images=[seen.placed], sees_whole_images=whole)
        found.append(engine.logits[0][0])
    assert not torch.allclose(*found, atol=1e-3)


@pytest.mark.parametrize("name", ["smolvlm", "qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "kv_group": 32},
        {"dtype": torch.bfloat16, "quantization": "w8a8"},
    ],
)
def test_company_chunks_preemption_and_the_cache_change_no_bit(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Some prompts share an image, or all but an image."""
    write_vision_model(name, tmp_path)
    family = family_of(tmp_path)
    prompts = [
        prompt_with(family, sizes, keys=keys, text=text)
        for sizes, keys, text in [
            ([SIZES[0]], ["a"], 7),
            ([SIZES[0]], ["b"], 7),
            ([SIZES[0], SIZES[1]], ["a", "c"], 7),
            ([SIZES[2]], ["d"], 40),
            ([SIZES[0]], ["a"], 90),
            ([], [], 50),
        ]
    ]
    loaded = Engine(tmp_path, **how)
    rng = torch.Generator().manual_seed(1)
    images = {
        image.image.key: torch.randn(image.num_tokens, 64, generator=rng).to(how.get("dtype", torch.float32))
        for each in prompts
        for image in each.images
    }

    def bits(engine: Engine, some: list[Seen]) -> list[torch.Tensor]:
        engine.runner.images = images
        engine.generate(
            [each.placed.token_ids.tolist() for each in some],
            NUM_TOKENS,
            images=[each.placed for each in some],
            sees_whole_images=family.num_whole > 0,
        )
        return [torch.stack(engine.logits[number]) for number in range(len(some))]

    def fresh(**limits: Any) -> Engine:
        return Engine(loaded, **how, **limits)

    alone = [bits(fresh(), [each])[0] for each in prompts]
    assert not torch.equal(alone[0], alone[1])
    longest = max(len(each.token_ids) for each in prompts)
    engines = [
        fresh(),
        fresh(max_batched_tokens=24, max_num_seqs=8),
        fresh(num_blocks=-(-(longest + NUM_TOKENS) // 16) + 1, strategy="paged"),
    ]
    for engine in engines:
        for step in (1, -1, 1):  # the second and third time their prompts are cached
            assert all(
                torch.equal(one, other) for one, other in zip(bits(engine, prompts[::step]), alone[::step], strict=True)
            )
    assert engines[2].scheduler.num_preemptions > 0
    assert engines[0].scheduler.prefixes.num_hits > 0


def test_prompts_with_other_images_share_no_block_of_them(tmp_path: Path) -> None:
    write_vision_model("smolvlm", tmp_path)
    family = family_of(tmp_path)
    one, other, low = (
        prompt_with(family, [SIZES[0]], keys=[key], text=16, is_low=is_low)
        for key, is_low in (("a", False), ("b", False), ("a", True))
    )
    assert one.token_ids == other.token_ids
    names = [[prefix_hashes(b"", each.placed.token_ids.tolist(), 16)] for each in (one, other, low)]
    for first, second in itertools.combinations((set(each) for [each] in names), 2):
        assert len(first & second) == 1, "the block of text before the image"
    engine = Engine(tmp_path)
    engine.runner.images = {key: torch.zeros(one.images[0].num_tokens, 64) for key in "ab"}
    for each in (one, other):
        engine.generate([each.placed.token_ids.tolist()], 1, images=[each.placed])
    assert engine.scheduler.prefixes.num_hits < 20


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("group", [0, 32])
def test_native_attention_of_spans_that_see_each_other(window: int | None, group: int) -> None:
    for backend in (native_backend(), TorchBackend(torch.float32, CPU)) if not group else (native_backend(),):
        check = check_spans(backend, Heads(4, 2, 32), window, group)
        assert check.holds, check
