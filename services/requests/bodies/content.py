"""The content of a message: a text, or parts, some of which may be images."""

import base64
import binascii
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from services.requests.bodies.fields import MAX_PARTS, OF_PARTS, at, kind_of, shortened, text_of
from services.requests.bodies.ignored import tell_others
from shared.model.vision.images import MAX_IMAGES

IMAGES = ("image_url", "input_image")
DETAILS = ("auto", "low", "high", "original", None)
MAX_URL = 8192  # characters of one that is not the image itself

CONTENT_SCHEMA = {
    "description": "a text, or parts: texts, which are joined, and images of models that see",
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "maxItems": MAX_PARTS,
            "items": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                    {
                        "type": "object",
                        "properties": {
                            "type": {"const": "image_url"},
                            "image_url": {
                                "type": "object",
                                "properties": {"url": {"type": "string"}, "detail": {"enum": ["auto", "low", "high"]}},
                                "required": ["url"],
                            },
                        },
                        "required": ["type", "image_url"],
                    },
                ]
            },
        },
        {"type": "null"},
    ],
}


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image as a client gave it: its file, or where that is."""

    place: str  # in the content
    data: bytes = b""
    url: str = ""
    file_id: str = ""
    is_low: bool = False  # a small one is enough


class Content(str):
    """The texts of a message's content, joined; with images, and what stands between them."""

    parts: tuple[str | GivenImage, ...]

    def __new__(cls, parts: tuple[str | GivenImage, ...]) -> "Content":
        found = super().__new__(cls, "".join(part for part in parts if isinstance(part, str)))
        found.parts = parts
        return found

    def __getnewargs__(self) -> Any:
        return (self.parts,)

    @property
    def images(self) -> list[GivenImage]:
        return [part for part in self.parts if isinstance(part, GivenImage)]


def read_content(value: Any) -> str | None:
    """A message's content; with images it is Content."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise at("", f"expected a text or a list of parts, got {kind_of(value)}")
    if len(value) > MAX_PARTS:
        raise at("", f"at most {MAX_PARTS} parts, got {len(value)}")
    parts: list[str | GivenImage] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise at(f"[{index}]", f"expected a part of type text or image_url, got {kind_of(part)}")
        parts.append(read_image(part, f"[{index}]") if part.get("type") in IMAGES else text_of(part, f"[{index}]"))
    if (count := sum(isinstance(part, GivenImage) for part in parts)) > MAX_IMAGES:
        raise at("", f"at most {MAX_IMAGES} images in one request, got {count}")
    return Content(tuple(parts)) if count else "".join(part for part in parts if isinstance(part, str))


def read_image(part: dict[str, Any], path: str) -> GivenImage:
    """A part of type image_url, or of type input_image."""
    given = part.get("image_url")
    tell_others(part, {"type", "image_url", "file_id", "detail", *OF_PARTS}, f"content{path}")
    if isinstance(given, dict):
        tell_others(given, {"url", "file_id", "detail"}, f"content{path}.image_url")
    fields = {**part, **given} if isinstance(given, dict) else {**part, "url": given}
    place = f"{path}.image_url" if given is not None else path
    if (detail := fields.get("detail")) not in DETAILS:
        raise at(f"{path}.detail", f"expected auto, low or high, got {shortened(detail)}")
    file_id, url = fields.get("file_id"), fields.get("url")
    if (file_id is None) == (url is None):
        raise at(place, "expected a url, or a file_id, one of them")
    given_text = url if file_id is None else file_id
    if not isinstance(given_text, str):
        raise at(place, f"expected a text, got {kind_of(given_text)}")
    is_low = detail == "low"
    if file_id is not None:
        return GivenImage(place, file_id=file_id, is_low=is_low)
    if given_text[:5].lower() == "data:":
        return GivenImage(place, data=read_data_url(given_text, place), is_low=is_low)
    if len(given_text) > MAX_URL:
        raise at(
            place,
            "an image in base64 begins with data:image/png;base64, (or jpeg, webp, gif); another URL has at most "
            f"{MAX_URL} characters",
        )
    return GivenImage(place, url=given_text, is_low=is_low)


def read_data_url(url: str, place: str) -> bytes:
    """The bytes of a data URL, which must be in base64."""
    head, comma, encoded = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise at(place, "a data URL of an image is data:image/png;base64,... (or jpeg, webp, gif)")
    return read_base64(unquote(encoded) if "%" in encoded else encoded, place)


def read_base64(encoded: str, place: str) -> bytes:
    """The bytes of an image's file. There may be line breaks, as `base64` writes them."""
    try:
        data = base64.b64decode("".join(encoded.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise at(place, f"the image is not valid base64: {error}") from None
    if not data:
        raise at(place, "the image is empty")
    return data
