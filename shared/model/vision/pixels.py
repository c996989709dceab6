"""An image's file to pixels, within bounds. Used in helper processes only: what a file makes a
decoder do is the file's own affair."""

import io
import warnings
from typing import Any

from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError

from shared.process.errors import Invalid

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 50_000_000  # of an image; a camera's has half of that
MAX_BYTES = 20 << 20  # of its file
Pillow.MAX_IMAGE_PIXELS = None  # ours is the bound, and is checked before anything is decoded


def load_decoders() -> None:
    """Before the first image: they would be imported in each of a helper's children."""
    Pillow.init()


def open_image(data: bytes) -> Any:
    """The first frame as a PIL image, upright, in RGB, on white where it is transparent. Raises Invalid."""
    if len(data) > MAX_BYTES:
        raise Invalid(f"an image's file has at most {MAX_BYTES >> 20} MiB, this one {len(data) / (1 << 20):.1f}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Pillow.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise Invalid(
                    f"an image has at most {MAX_PIXELS // 1_000_000} megapixels, this one is {image.width} x "
                    f"{image.height}"
                )
            image.load()
            return on_white(ImageOps.exif_transpose(image))
    except UnidentifiedImageError:
        raise Invalid(f"no image that can be read: {', '.join(FORMATS)} are") from None
    except Invalid:
        raise
    except MemoryError:
        raise Invalid("the image takes too much memory") from None
    except Exception as error:  # decoders raise what they like
        raise Invalid(
            f"the image can't be read: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}"
        ) from None


def on_white(image: Any) -> Any:
    """The image in RGB."""
    if image.mode.startswith("I;16") or image.mode == "I":  # of 16 bits
        image = image.point(lambda value: value / 257).convert("L")
    if "A" in image.getbands() or "transparency" in image.info:
        whole = image.convert("RGBA")
        ground = Pillow.new("RGBA", whole.size, (255, 255, 255, 255))
        ground.alpha_composite(whole)
        image = ground
    return image.convert("RGB")
