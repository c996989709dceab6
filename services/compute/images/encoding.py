"""ImageEncoding: sequences whose images are not embeddings yet, and the embeddings of those that
run.

A sequence with images comes to the scheduler when it has all of them. Embeddings are made between
steps, one call of the encoder at a time; while others run, it takes as much time as their steps, and
no more. Embeddings stay while a sequence has them, and then until their room is needed.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.compute.images.reader import PixelProcess, PixelReader
from services.compute.images.remote import RemoteEncoder
from services.compute.images.tower import VisionTower
from services.compute.sequence import Sequence
from shared.model.vision.images import PromptImage
from shared.model.vision.shape import VisionFamily
from shared.process.errors import Invalid
from shared.wire.messages import RequestError
from shared.wire.stage import Stage

READ_AHEAD = 2  # images whose pixels are read or wait to be encoded


@dataclass(slots=True)
class PendingImages:
    """A sequence that waits for its images."""

    sequence: Sequence
    response_id: str
    images: tuple[PromptImage, ...]

    @property
    def order(self) -> tuple[int, float]:
        return self.sequence.request.priority, self.sequence.request.arrived_at


@dataclass(slots=True)
class Encoding:
    """An image on its way from pixels to embeddings."""

    key: str
    calls: Iterator[dict[str, Any]]
    parts: list[Tensor] = field(default_factory=list)


class ImageEncoding:
    def __init__(
        self, tower: VisionTower, folder: Path, family: VisionFamily, max_bytes: int, token_bytes: int
    ) -> None:
        """folder: of the model's files; max_bytes: of embeddings, but for one sequence alone;
        token_bytes: of one token's."""
        self.tower = tower
        self.folder = folder
        self.family = family
        self.max_bytes = max_bytes
        self.token_bytes = token_bytes
        self.reader: PixelReader | None = None  # until `start`
        self.remote: RemoteEncoder | None = None  # the same
        self.opening: dict[int, PendingImages] = {}  # by handle
        self.num_encoded = 0  # images
        self.num_found = 0  # that had been encoded before
        self.seconds = 0.0  # of the encoder
        self._embeddings: OrderedDict[str, Tensor] = OrderedDict()  # by key, the last used last
        # by handle, of a sequence that is open or has begun to open: the bytes of its embeddings by key
        self._held: dict[int, dict[str, int]] = {}
        self._asked: dict[str, int] = {}  # keys whose pixels are being read, and for whom
        self._encoding: Encoding | None = None
        self._errors: dict[str, Invalid] = {}  # by key, of those that could not be read
        self._next_at = 0.0  # when the encoder's turn is

    def start(self, stage: Stage) -> None:
        self.reader = PixelReader(PixelProcess(stage.transport, self.folder, self.family))
        self.remote = RemoteEncoder(stage, self.tower.fingerprint)

    @property
    def embeddings(self) -> Mapping[str, Tensor]:
        """Embeddings by key, [tokens, hidden]: of every sequence that was opened and not forgotten, at least."""
        return self._embeddings

    def has(self, sequence: Sequence, images: tuple[PromptImage, ...]) -> bool:
        """Whether the sequence has all of them, from now on or already."""
        if not all(image.image.key in self._embeddings for image in images):
            return False
        if sequence.handle not in self._held:
            self._hold(sequence.handle, images)
        return True

    def figures(self) -> dict[str, float]:
        """Figures for the registry, by the names of Load's fields."""
        return {
            "images_encoded": self.num_encoded,
            "images_found": self.num_found,
            "image_encoder_s": self.seconds,
            "images_waiting": len(self.opening),
        }

    def open(self, sequence: Sequence, response_id: str, images: tuple[PromptImage, ...]) -> None:
        """`step` says when the sequence has its images."""
        self.opening[sequence.handle] = PendingImages(sequence, response_id, images)

    def forget(self, handle: int) -> None:
        """The sequence is gone. Unknown handles are passed over."""
        gone = self.opening.pop(handle, None)
        self._held.pop(handle, None)
        for key in {image.image.key for image in gone.images} if gone is not None else ():
            if not self._wanted(key):
                if self.remote is not None:
                    self.remote.drop(key)
                if self._encoding is not None and self._encoding.key == key:
                    self._encoding = None
        self._errors = {key: error for key, error in self._errors.items() if self._wanted(key)}

    def expired(self, now: float) -> list[Sequence]:
        """The sequences whose deadline has passed."""
        return [
            each.sequence
            for each in self.opening.values()
            if each.sequence.request.deadline is not None and each.sequence.request.deadline < now
        ]

    def step(self, *, is_busy: bool) -> list[tuple[Sequence, RequestError | None]]:
        """Go on. Returns the sequences that have all their images now, and, with an error, those that
        will not: they are to be forgotten. is_busy: other sequences run, whose tokens wait meanwhile."""
        if not self.opening:
            return []
        self._take_pixels()
        self._take_remote()
        self._ask()
        if self._encoding is not None and (not is_busy or time.monotonic() >= self._next_at):
            self._encode(self._encoding)
        return self._finish()

    def _take_pixels(self) -> None:
        """Take pixels that have been read, one image at a time."""
        assert self.reader is not None
        while self._encoding is None and not self.reader.done.empty():
            pixels = self.reader.done.get()
            handle = self._asked.pop(pixels.key)
            if isinstance(pixels.inputs, Invalid):
                if handle in self.opening:  # else its file has gone with it, and others have their own
                    self._errors[pixels.key] = pixels.inputs
            elif self._wanted(pixels.key):
                self._encoding = Encoding(pixels.key, iter(self.tower.calls(pixels.inputs)))

    def _take_remote(self) -> None:
        """Take what encoders have made."""
        assert self.remote is not None
        for key, (response_id, found) in self.remote.take().items():
            if not isinstance(found, Invalid):
                self._embeddings[key] = found.to(self.tower.device)
            elif found.code != "image_gone" or any(each.response_id == response_id for each in self.opening.values()):
                self._errors[key] = found  # else its file has gone with it, and others have their own

    def _ask(self) -> None:
        """Ask for the images of those whose turn it is, as far as their embeddings have room: an
        encoder, if there is one, else for pixels."""
        assert self.reader is not None and self.remote is not None
        is_full = False
        for each in sorted(self.opening.values(), key=lambda each: each.order):
            missing = {image.image.key: image.image for image in each.images if image.image.key not in self._embeddings}
            if each.sequence.handle not in self._held:
                # room is reserved for the first sequence that waits for some
                is_full = is_full or (bool(missing) and not self._has_room(each))
                if missing and is_full:
                    continue
                self._hold(each.sequence.handle, each.images)
            for key, image in missing.items():
                if (
                    key in self._errors
                    or key in self._asked
                    or key in self.remote
                    or (self._encoding is not None and self._encoding.key == key)
                ):
                    continue
                if self.remote.is_there and key not in self.remote.given_up:
                    if self.remote.num_free:
                        self.remote.ask(each.response_id, image)
                elif len(self._asked) + (self._encoding is not None) < READ_AHEAD:
                    self._asked[key] = each.sequence.handle
                    self.reader.ask(each.response_id, image)

    def _hold(self, handle: int, images: tuple[PromptImage, ...]) -> None:
        self._held[handle] = {image.image.key: image.num_tokens * self.token_bytes for image in images}
        self.num_found += sum(key in self._embeddings for key in self._held[handle])

    def _encode(self, encoding: Encoding) -> None:
        """One call of the encoder."""
        took = 0.0
        try:
            embeddings, took = self.tower.timed(next(encoding.calls))
            encoding.parts.append(embeddings)
        except StopIteration:
            self._embeddings[encoding.key] = torch.cat(encoding.parts)
            self._encoding = None
            self.num_encoded += 1
            if self.remote is not None:
                self.remote.drop(encoding.key)
        except Exception as error:  # what the library's modules raise for the image's own shape
            self._errors[encoding.key] = Invalid(f"the image can't be encoded: {error}", status=500)
            self._encoding = None
        self.seconds += took
        self._next_at = time.monotonic() + took

    def _finish(self) -> list[tuple[Sequence, RequestError | None]]:
        ended: list[tuple[Sequence, RequestError | None]] = []
        for handle, each in list(self.opening.items()):
            keys = [image.image.key for image in each.images]
            error = next((self._errors[key] for key in keys if key in self._errors), None) or self._mismatch(each)
            if error is not None:
                ended.append((each.sequence, RequestError(str(error), error.status, error.param, error.code)))
            elif handle in self._held and all(key in self._embeddings for key in keys):
                for key in keys:
                    self._embeddings.move_to_end(key)
                ended.append((each.sequence, None))
                del self.opening[handle]
        return ended

    def _mismatch(self, opening: PendingImages) -> Invalid | None:
        """An image that became another number of tokens than the prompt has places."""
        for image in opening.images:
            found = self._embeddings.get(image.image.key)
            if found is not None and len(found) != image.num_tokens:
                return Invalid(
                    f"an image became {len(found)} tokens, and the prompt has {image.num_tokens} places for it",
                    status=500,
                )
        return None

    def _wanted(self, key: str) -> bool:
        return any(image.image.key == key for each in self.opening.values() for image in each.images)

    def _has_room(self, opening: PendingImages) -> bool:
        """Whether its embeddings fit in addition to those that other sequences hold, made or not, after
        embeddings that none holds were dropped. One sequence alone has room."""
        held = {key: size for sizes in self._held.values() for key, size in sizes.items()}
        needed = held | {image.image.key: image.num_tokens * self.token_bytes for image in opening.images}
        if held and sum(needed.values()) > self.max_bytes:
            return False
        unheld = {key: each.nbytes for key, each in self._embeddings.items() if key not in needed}
        num_bytes = sum(needed.values()) + sum(unheld.values())
        for key, size in unheld.items():
            if num_bytes <= self.max_bytes:
                break
            del self._embeddings[key]
            num_bytes -= size
        return True
