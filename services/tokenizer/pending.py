"""PendingPrompt: a request on its way to token ids, and the places of its images."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from services.tokenizer.chat_template import Slow
from services.tokenizer.modules import split
from shared.model.arrays import Array
from shared.model.context_length import context_far_exceeded
from shared.model.segments import Segment
from shared.model.vision.images import MAX_IMAGES, Image, PromptImage
from shared.model.vision.shape import VisionFamily
from shared.process.errors import Invalid
from shared.process.telemetry import get_logger
from shared.wire.messages import ChatMessage, GenerateRequest

log = get_logger("penstock.tokenizer")

PARAM = "messages"


@dataclass(slots=True)
class PendingPrompt:
    """A request with its text, later its token ids, or the reason why it has none."""

    request: GenerateRequest
    text: str | None = None  # to be encoded; None: the request brought token ids
    token_ids: Array = field(default_factory=lambda: np.zeros(0, np.int32))  # [n] int32
    segments: tuple[Segment, ...] = ()  # of the tokens, if the prompt has modules
    images: tuple[PromptImage, ...] = ()  # in the prompt, in their order
    error: Invalid | None = None  # it ends with this
    is_slow: bool = False  # its chat template takes long: render it outside the loop

    @classmethod
    def of(cls, request: GenerateRequest) -> "PendingPrompt":
        """Begin with the text or the token ids that the request brought."""
        return (
            cls(request, request.prompt)
            if request.prompt_token_ids is None
            else cls(request, request.prompt, request.prompt_token_ids)
        )

    def take(self, rendered: str | Invalid | Slow) -> None:
        """The outcome of a chat template."""
        if isinstance(rendered, Slow):
            self.is_slow = True
        elif isinstance(rendered, Invalid):
            self.error = rendered
        else:
            self.text = rendered


@contextmanager
def alone(prepared: PendingPrompt) -> Iterator[None]:
    """Make any exception that is raised inside the error of this request, not of its batch."""
    try:
        yield
    except Invalid as error:
        prepared.error = error
    except Exception as error:  # nothing that a client sends may end the process
        log.error("a request could not be encoded", request_id=prepared.request.request_id, error=error)
        prepared.error = Invalid(f"this request can't be encoded: {type(error).__name__}", status=500)


def head_of(prepared: PendingPrompt) -> PendingPrompt | None:
    """The part of a conversation that stands before its modules, if it has some; `prepared` keeps what
    is behind them."""
    if (
        not prepared.request.modules
        or prepared.request.messages is None
        or prepared.text is None
        or prepared.error is not None
    ):
        return None
    try:
        before, prepared.text = split(prepared.text)
    except Invalid as error:
        prepared.error = error
        return None
    return PendingPrompt(prepared.request, before)


def images_of(messages: Sequence[ChatMessage] | None) -> list[Image]:
    return [part.image for message in messages or () for part in message.parts if part.image is not None]


def check_images(messages: Sequence[ChatMessage] | None, vision: VisionFamily | None, *, has_modules: bool) -> None:
    """Raises Invalid for images that the model does not see."""
    images = images_of(messages)
    if images and vision is None:
        raise Invalid("this model reads text only: images can't be understood", param=PARAM, code="model_not_supported")
    if len(images) > MAX_IMAGES:
        raise Invalid(f"at most {MAX_IMAGES} images in one request, got {len(images)}", param=PARAM)
    if images and has_modules:
        raise Invalid("a prompt with modules takes no images", param="prompt_modules")


def expand_images(prepared: PendingPrompt, vision: VisionFamily | None, max_tokens: int | None) -> None:
    """Put the tokens of each image into the rendered text, in place of what the template wrote for
    it. max_tokens: of the model's context; None: any number. Raises Invalid."""
    if vision is not None and prepared.text is not None and (images := images_of(prepared.request.messages)):
        _expand(prepared, prepared.text, images, vision, max_tokens)


def _expand(
    prepared: PendingPrompt, text: str, images: Sequence[Image], vision: VisionFamily, max_tokens: int | None
) -> None:
    before, *behind = text.split(vision.marker)
    if len(behind) != len(images):
        raise Invalid(
            f"the chat has {len(images)} images, and its rendered text {len(behind)} places for them",
            param=PARAM,
            code="chat_template_error",
        )
    shapes = [vision.shape(image.width, image.height, is_low=image.is_low) for image in images]
    num_tokens = sum(shape.num_tokens for shape in shapes)
    if max_tokens is not None and num_tokens > max_tokens:  # before a text is made of so many
        raise context_far_exceeded(PARAM, max_tokens, num_tokens)
    prepared.text = type(text)(before + "".join(shape.text + part for shape, part in zip(shapes, behind, strict=True)))
    prepared.images = tuple(
        PromptImage(image, shape.num_tokens, shape.num_rows, shape.num_columns)
        for image, shape in zip(images, shapes, strict=True)
    )


def check_places(token_ids: Array, images: Sequence[PromptImage], image_token_id: int) -> None:
    """Check that a prompt with images has as many places as they take. Raises Invalid."""
    if images and int(np.count_nonzero(token_ids == image_token_id)) != sum(image.num_tokens for image in images):
        raise Invalid("a conversation with images can't spell the model's image token, nor be truncated", param=PARAM)
