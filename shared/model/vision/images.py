"""Images in a prompt: which of its tokens stand for them, and what names those.

In a prompt on the wire a placeholder is the model's image token. In compute, and for the names of
blocks, it is a number below 0 that follows from the image and from the placeholder's place in it: so
two prompts share a block only if their images are the same, too.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.model.arrays import Array
from shared.model.wire_struct import WireStruct
from shared.process.errors import Invalid

MAX_IMAGES = 64  # of a prompt
FIRST_NAME = -16  # numbers above it, below 0, have other meanings in the place of a token


class Image(WireStruct, frozen=True):
    """An image in a conversation. Its file is in Redis, under its digest."""

    digest: str  # of the file
    width: int  # pixels, upright
    height: int
    num_bytes: int
    is_low: bool = False  # a small one is enough

    @property
    def key(self) -> str:
        """The name of its embeddings: all that they depend on, apart from the model."""
        return f"{self.digest}/low" if self.is_low else self.digest


class PromptImage(WireStruct, frozen=True):
    """An image in a prompt."""

    image: Image
    num_tokens: int  # that stand for it: the next so many image tokens
    num_rows: int = 0  # of these, where positions are of two dimensions
    num_columns: int = 0


@dataclass(frozen=True, slots=True)
class ImageRun:
    """Consecutive tokens of a prompt that stand for a part of one image."""

    start: int  # of the first, in the prompt
    count: int
    key: str  # of the image
    row: int  # of its embeddings, the first

    @property
    def end(self) -> int:
        """The place behind the last."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt's tokens with names in the places of its images."""

    token_ids: Array  # [n] int64
    runs: tuple[ImageRun, ...]
    positions: Array | None = None  # [3, n] int64, in time, down and across, where images have rows and columns
    position_shift: int = 0  # how far positions behind the prompt are from places in it


def place_images(token_ids: Array, images: Sequence[PromptImage], placeholder_id: int) -> PlacedPrompt:
    """token_ids: [n], with the model's image token in the places. Raises Invalid if these are not as
    many as the images take."""
    indices = np.flatnonzero(token_ids == placeholder_id) if images else np.zeros(0, np.int64)
    if len(indices) != sum(image.num_tokens for image in images):
        raise Invalid("the prompt has not as many places as its images take", param="messages")
    placed, runs, at = token_ids.astype(np.int64), list[ImageRun](), 0
    for image in images:
        places = indices[at : at + image.num_tokens]
        placed[places] = names_of(image.image.key, image.num_tokens)
        for run in np.split(np.arange(len(places)), np.flatnonzero(np.diff(places) != 1) + 1):
            runs.append(ImageRun(int(places[run[0]]), len(run), image.image.key, int(run[0])))
        at += image.num_tokens
    if not any(image.num_columns for image in images):
        return PlacedPrompt(placed, tuple(runs))
    if any(image.num_rows * image.num_columns != image.num_tokens for image in images) or len(runs) != len(images):
        raise Invalid("an image of the prompt has not as many places as it has rows and columns", param="messages")
    return PlacedPrompt(placed, tuple(runs), *image_positions(len(placed), images, runs))


def names_of(key: str, count: int) -> Array:
    """The names of an image's tokens: [count] int64, below 0."""
    digest = hashlib.shake_128(key.encode()).digest(8 * count)
    return FIRST_NAME - (np.frombuffer(digest, np.uint64) >> np.uint64(2)).astype(np.int64)


def image_positions(num_tokens: int, images: Sequence[PromptImage], runs: Sequence[ImageRun]) -> tuple[Array, int]:
    """Positions of a prompt's tokens where images have rows and columns: [3, n] int64, in time, down
    and across; and how far positions behind the prompt are from places in it (Wang et al. 2024,
    "Qwen2-VL", section 2.1)."""
    positions, place, position = np.zeros((3, num_tokens), np.int64), 0, 0
    for image, run in zip(images, runs, strict=True):
        text = run.start - place
        positions[:, place : run.start] = position + np.arange(text)
        position += text
        rows, columns = np.divmod(np.arange(run.count), image.num_columns)
        positions[:, run.start : run.end] = position + np.stack([np.zeros_like(rows), rows, columns])
        position += max(image.num_rows, image.num_columns)
        place = run.end
    positions[:, place:] = position + np.arange(num_tokens - place)
    return positions, position - place
