"""ImageShape: what an image becomes in a prompt."""

from dataclasses import dataclass
from typing import Any, Protocol

from shared.process.errors import Invalid

Config = dict[str, Any]  # a parsed config.json, or preprocessor_config.json


@dataclass(frozen=True, slots=True)
class ImageShape:
    """The text that stands in a prompt in the place of an image."""

    text: str  # with num_tokens placeholders
    num_tokens: int
    # of the placeholders, where the model's positions are of two dimensions; else 0
    num_rows: int = 0
    num_columns: int = 0


class VisionFamily(Protocol):
    """How a family of models sees images."""

    @property
    def placeholder(self) -> str:
        """The token that an embedding of the image stands for."""
        ...

    @property
    def marker(self) -> str:
        """The text that the chat template writes for an image."""
        ...

    @property
    def num_whole(self) -> int:
        """The tokens of an image where they see each other, those behind them, too, so that they are
        computed together; else 0."""
        ...

    def shape(self, width: int, height: int, *, is_low: bool) -> ImageShape:
        """Compute what an image of so many pixels becomes. is_low: a small one is enough. Raises Invalid."""
        ...

    def processing(self, *, is_low: bool) -> dict[str, Any]:
        """The options of the library's image processor, so that pixels become as many tokens."""
        ...


def too_narrow(width: int, height: int, max_ratio: int) -> Invalid:
    return Invalid(
        f"an image of {width} x {height} pixels is too narrow for this model: one side is at most {max_ratio} times "
        "the other"
    )
