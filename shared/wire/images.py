"""Images in messages."""

from shared.model.vision.images import Image
from shared.model.wire_struct import WireStruct


class ContentPart(WireStruct, frozen=True):
    """A part of a message with images: a text, or an image."""

    text: str = ""
    image: Image | None = None


class EncodeImage(WireStruct, frozen=True):
    """Asks an encoder for the embeddings of an image."""

    response_id: str  # of which the image's file is
    image: Image
