"""Images in messages."""

from dataclasses import dataclass

from shared.model.vision.images import Image


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A part of a message with images: a text, or an image."""

    text: str = ""
    image: Image | None = None


@dataclass(frozen=True, slots=True)
class EncodeImage:
    """Asks an encoder for the embeddings of an image."""

    response_id: str  # of which the image's file is
    image: Image
