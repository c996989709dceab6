"""The families of models that see, by config.json's model_type: how many tokens an image takes.

What is computed here is what the transformers library's processor of the family computes from the
image itself; tests compare the two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.model.vision.shape import Config, ImageShape, VisionFamily, too_narrow
from shared.process.errors import StartupError

LARGEST_EDGE = 4096  # of what Idefics 3 and SmolVLM resize to
LOW_EDGE = 512  # of an image that may be small, where the family has no size of its own for it
LOW_PIXELS = LOW_EDGE * LOW_EDGE
MOST_NARROW = 200  # sides of an image, where patches follow its shape


@dataclass(frozen=True, slots=True)
class Tiled:
    """Idefics 3 and SmolVLM: tiles row by row, then the whole image in the size of one tile."""

    tile: int  # pixels of a side
    longest_edge: int  # that images are resized to
    is_split: bool
    num_tile_tokens: int
    placeholder: str = "<image>"
    marker: str = "<image>"
    num_whole: int = 0

    def shape(self, width: int, height: int, *, is_low: bool) -> ImageShape:
        rows, columns = (0, 0) if is_low or not self.is_split else self.tiles(width, height)
        own = self.placeholder * self.num_tile_tokens
        lines = [
            "".join(f"<fake_token_around_image><row_{row + 1}_col_{column + 1}>{own}" for column in range(columns))
            for row in range(rows)
        ]
        text = (
            "".join(line + "\n" for line in lines)
            + ("\n" if lines else "")
            + f"<fake_token_around_image><global-img>{own}<fake_token_around_image>"
        )
        return ImageShape(text, (rows * columns + 1) * self.num_tile_tokens)

    def tiles(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns; 0, 0: the image is one tile."""
        ratio = width / height
        if width >= height:
            width, height = self.longest_edge, even(int(self.longest_edge / ratio))
        else:
            width, height = even(int(self.longest_edge * ratio)), self.longest_edge
        height, width = max(height, 1), max(width, 1)
        if max(width, height) > LARGEST_EDGE:
            ratio = width / height
            width, height = (
                (LARGEST_EDGE, int(LARGEST_EDGE / ratio))
                if width >= height
                else (int(LARGEST_EDGE * ratio), LARGEST_EDGE)
            )
            height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height:
            width = whole_tiles(width, self.tile)
            height = whole_tiles(int(width / ratio), self.tile)
        else:
            height = whole_tiles(height, self.tile)
            width = whole_tiles(int(height * ratio), self.tile)
        return (height // self.tile, width // self.tile) if max(width, height) > self.tile else (0, 0)

    def processing(self, *, is_low: bool) -> dict[str, Any]:
        return {"do_image_splitting": self.is_split and not is_low}


@dataclass(frozen=True, slots=True)
class Fixed:
    """LLaVA 1.5 and Gemma 3: every image has as many tokens."""

    num_tokens: int
    placeholder: str = "<image>"
    marker: str = "<image>"
    before: str = ""
    behind: str = ""
    num_whole: int = 0

    def shape(self, width: int, height: int, *, is_low: bool) -> ImageShape:  # noqa: ARG002
        return ImageShape(self.before + self.placeholder * self.num_tokens + self.behind, self.num_tokens)

    def processing(self, *, is_low: bool) -> dict[str, Any]:  # noqa: ARG002
        return {}


@dataclass(frozen=True, slots=True)
class BestResolution:
    """LLaVA-NeXT: the image at the best of some resolutions, without its padding, a token at the end
    of each row, and the whole image before."""

    side: int  # patches of a tile's side
    size: int  # pixels of it
    resolutions: tuple[tuple[int, int], ...]  # height, width
    num_small: int  # tokens of the whole image
    placeholder: str = "<image>"
    marker: str = "<image>"
    num_whole: int = 0

    def shape(self, width: int, height: int, *, is_low: bool) -> ImageShape:  # noqa: ARG002
        best_height, best_width = self.best(width, height)
        rows, columns = self.side * (best_height // self.size), self.side * (best_width // self.size)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        num_tokens = rows * columns + rows + self.num_small
        return ImageShape(self.placeholder * num_tokens, num_tokens)

    def best(self, width: int, height: int) -> tuple[int, int]:
        """The resolution that keeps most of the image's pixels, and of those the one with least
        room left."""

        def worth(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[1] / width, resolution[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - resolution[0] * resolution[1]

        return max(self.resolutions, key=worth)

    def processing(self, *, is_low: bool) -> dict[str, Any]:  # noqa: ARG002
        return {}


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Qwen 2 VL and 2.5 VL: as many patches as the image has room for, within bounds."""

    patch: int  # pixels of a side
    merge: int  # patches of a token's side
    min_pixels: int
    max_pixels: int
    placeholder: str = "<|image_pad|>"
    marker: str = "<|image_pad|>"
    num_whole: int = 0

    def shape(self, width: int, height: int, *, is_low: bool) -> ImageShape:
        if max(width, height) > MOST_NARROW * min(width, height):
            raise too_narrow(width, height, MOST_NARROW)
        factor, max_pixels = self.patch * self.merge, self.most_pixels(is_low=is_low)
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor * factor > max_pixels:
            beta = math.sqrt(height * width / max_pixels)
            rows, columns = (max(1, math.floor(each / beta / factor)) for each in (height, width))
        elif rows * columns * factor * factor < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(each * beta / factor) for each in (height, width))
        return ImageShape(self.placeholder * (rows * columns), rows * columns, rows, columns)

    def most_pixels(self, *, is_low: bool) -> int:
        return max(min(self.max_pixels, LOW_PIXELS), self.min_pixels) if is_low else self.max_pixels

    def processing(self, *, is_low: bool) -> dict[str, Any]:
        return {"size": {"shortest_edge": self.min_pixels, "longest_edge": self.most_pixels(is_low=is_low)}}


@dataclass(frozen=True, slots=True)
class Cropped:
    """InternVL and Aya Vision: tiles in the arrangement that is nearest to the image's proportions, then
    the whole image in the size of one tile."""

    tile: int  # pixels of a side
    min_tiles: int
    max_tiles: int
    num_tile_tokens: int
    placeholder: str
    marker: str
    before: str
    behind: str
    is_numbered: bool  # a text says which tile follows
    num_whole: int = 0

    def shape(self, width: int, height: int, *, is_low: bool) -> ImageShape:
        count = 1 if is_low else self.num_tiles(width, height)
        own = self.placeholder * self.num_tile_tokens
        text = (
            "".join(f"TILE_{number}{own}" for number in range(1, count)) + "TILE_GLOBAL" + own
            if self.is_numbered
            else own * count
        )
        return ImageShape(self.before + text + self.behind, count * self.num_tile_tokens)

    def num_tiles(self, width: int, height: int) -> int:
        """With that of the whole image."""
        counts = range(1, self.max_tiles + 1)
        grids = sorted(
            (
                (across, down)
                for across in counts
                for down in counts
                if self.min_tiles <= across * down <= self.max_tiles
            ),
            key=math.prod,
        )
        best, smallest = (1, 1), math.inf
        for across, down in grids:
            difference = abs(width / height - across / down)
            if difference < smallest or (
                difference == smallest and width * height > 0.5 * self.tile**2 * across * down
            ):
                best, smallest = (across, down), difference
        count = math.prod(best) if self.max_tiles > 1 else 1
        return count + (count > 1)

    def processing(self, *, is_low: bool) -> dict[str, Any]:
        return {"crop_to_patches": not is_low}


@dataclass(frozen=True, slots=True)
class PatchRows:
    """Mistral 3 and Pixtral: as many patches as the image has, up to a longest edge; a token behind each row."""

    patch: int  # pixels of a token's side
    longest_edge: int
    placeholder: str = "[IMG]"
    marker: str = "[IMG]"
    num_whole: int = 0

    def shape(self, width: int, height: int, *, is_low: bool) -> ImageShape:
        max_edge = self.most_pixels(is_low=is_low)
        if max(width, height) > min(MOST_NARROW, max_edge) * min(width, height):
            raise too_narrow(width, height, min(MOST_NARROW, max_edge))
        ratio = max(height / max_edge, width / max_edge)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = ((each - 1) // self.patch + 1 for each in (height, width))
        return ImageShape("[IMG_BREAK]".join([self.placeholder * columns] * rows) + "[IMG_END]", rows * columns)

    def most_pixels(self, *, is_low: bool) -> int:
        return min(self.longest_edge, LOW_EDGE) if is_low else self.longest_edge

    def processing(self, *, is_low: bool) -> dict[str, Any]:
        return {"patch_size": self.patch, "size": {"longest_edge": self.most_pixels(is_low=is_low)}}


def _tiled(config: Config, processor: Config) -> Tiled:
    vision = config["vision_config"]
    tile = int(vision.get("image_size", 224))
    scale = int(config.get("scale_factor", 2))
    tokens = (tile // int(vision.get("patch_size", 32))) ** 2 // scale**2
    longest = int((processor.get("size") or {}).get("longest_edge", 4 * 364))
    tile = int((processor.get("max_image_size") or {}).get("longest_edge", tile))
    return Tiled(tile, longest, bool(processor.get("do_image_splitting", True)), tokens)


def _num_patches(config: Config) -> tuple[int, int, int]:
    """The vision tower's pixels a side, its patches a side, and the tokens of an image."""
    vision = config["vision_config"]
    size, patch = int(vision.get("image_size", 224)), int(vision.get("patch_size", 32))
    has_class = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    drops_first = (
        config.get("vision_feature_select_strategy", "default") == "default"
    )  # of any tower, whether a class's token or not
    return size, size // patch, (size // patch) ** 2 + has_class - drops_first


def _llava(config: Config, processor: Config) -> VisionFamily:
    if config["vision_config"].get("model_type") == "pixtral":
        return _rows({"spatial_merge_size": 1, **config}, processor)
    return Fixed(_num_patches(config)[2])


def _llava_next(config: Config, processor: Config) -> BestResolution:
    size, side, num_whole = _num_patches(config)
    grids = (
        config.get("image_grid_pinpoints")
        or processor.get("image_grid_pinpoints")
        or [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    )
    return BestResolution(side, size, tuple((int(height), int(width)) for height, width in grids), num_whole)


def _gemma3(config: Config, processor: Config) -> Fixed:  # noqa: ARG001
    count = int(config.get("mm_tokens_per_image", 256))
    return Fixed(
        count, "<image_soft_token>", "<start_of_image>", "\n\n<start_of_image>", "<end_of_image>\n\n", num_whole=count
    )


def _qwen(config: Config, processor: Config) -> Dynamic:
    vision, size = config["vision_config"], processor.get("size") or {}
    min_pixels = processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    max_pixels = processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    return Dynamic(
        int(vision.get("patch_size", 14)), int(vision.get("spatial_merge_size", 2)), int(min_pixels), int(max_pixels)
    )


def _cropped(config: Config, processor: Config, merge: float) -> dict[str, Any]:
    """merge: patches of a token's side."""
    vision, size = config["vision_config"], processor.get("size") or {}
    side, patch = (_side(vision.get(name, default)) for name, default in (("image_size", 448), ("patch_size", 14)))
    min_tiles, max_tiles = int(processor.get("min_patches", 1)), int(processor.get("max_patches", 12))
    return {
        "tile": _side(size.get("height", side)),
        "min_tiles": min_tiles,
        "max_tiles": max_tiles,
        "num_tile_tokens": round(side / patch / merge) ** 2,
    }


def _side(length: Any) -> int:
    """The side of a square, which some write as a pair."""
    return int(length[0] if isinstance(length, list) else length)


def _internvl(config: Config, processor: Config) -> Cropped:
    shape = _cropped(config, processor, 1 / float(config.get("downsample_ratio", 0.5)))
    return Cropped(
        **shape, placeholder="<IMG_CONTEXT>", marker="<IMG_CONTEXT>", before="<img>", behind="</img>", is_numbered=False
    )


def _aya_vision(config: Config, processor: Config) -> Cropped:
    shape = _cropped(config, processor, int(config.get("downsample_factor", 2)))
    return Cropped(
        **shape,
        placeholder="<|IMG_PATCH|>",
        marker="<image>",
        before="<|START_OF_IMG|>",
        behind="<|END_OF_IMG|>",
        is_numbered=True,
    )


def _rows(config: Config, processor: Config) -> PatchRows:
    patch = int(config["vision_config"].get("patch_size", 14)) * int(config.get("spatial_merge_size", 2))
    return PatchRows(patch, int((processor.get("size") or {}).get("longest_edge", 1024)))


READERS: dict[str, Callable[[Config, Config], VisionFamily]] = {
    "aya_vision": _aya_vision,
    "gemma3": _gemma3,
    "idefics3": _tiled,
    "internvl": _internvl,
    "llava": _llava,
    "llava_next": _llava_next,
    "mistral3": _rows,
    "qwen2_5_vl": _qwen,
    "qwen2_vl": _qwen,
    "smolvlm": _tiled,
}


def read_family(config: Config, processor: Config) -> VisionFamily | None:
    """How a model sees, by its whole config.json and preprocessor_config.json; None: it does not,
    or not here. Raises StartupError."""
    reader = READERS.get(str(config.get("model_type")))
    if reader is None or not isinstance(config.get("vision_config"), dict):
        return None
    try:
        return reader(config, processor)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise StartupError(
            f"config.json and preprocessor_config.json do not say how the model sees images: {error!r}"
        ) from None


def even(length: int) -> int:
    return length + length % 2


def whole_tiles(length: int, tile: int) -> int:
    return math.ceil(length / tile) * tile
