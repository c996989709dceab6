"""Prepared: a request on its way to token ids."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from services.tokenizer.chat_template import Slow
from services.tokenizer.modules import split
from shared.model.arrays import Array
from shared.model.segments import Segment
from shared.model.vision.images import PromptImage
from shared.process.errors import Invalid
from shared.process.telemetry import get_logger
from shared.wire.messages import GenerateRequest

log = get_logger("penstock.tokenizer")


@dataclass(slots=True)
class Prepared:
    """A request with its text, then with its token ids, or with the reason why it has none."""

    request: GenerateRequest
    text: str | None = None  # to be encoded; None: the request brought token ids
    token_ids: Array = field(default_factory=lambda: np.zeros(0, np.int32))  # [n] int32
    segments: tuple[Segment, ...] = ()  # of the tokens, if the prompt has modules
    images: tuple[PromptImage, ...] = ()  # in the prompt, in their order
    error: Invalid | None = None  # it ends with this
    is_slow: bool = False  # its chat template takes long: it is to be rendered beside the loop

    @classmethod
    def of(cls, request: GenerateRequest) -> "Prepared":
        """Begin with the text or the token ids that the request brought."""
        return cls(request, request.prompt) if request.prompt_token_ids is None else cls(request, request.prompt, request.prompt_token_ids)

    def take(self, rendered: str | Invalid | Slow) -> None:
        """The outcome of a chat template."""
        if isinstance(rendered, Slow):
            self.is_slow = True
        elif isinstance(rendered, Invalid):
            self.error = rendered
        else:
            self.text = rendered


@contextmanager
def alone(prepared: Prepared) -> Iterator[None]:
    """Make of whatever is raised inside the error of this request, and of no other of its batch."""
    try:
        yield
    except Invalid as error:
        prepared.error = error
    except Exception as error:  # nothing that a client sends may end the process
        log.error("a request could not be encoded", request_id=prepared.request.request_id, error=error)
        prepared.error = Invalid(f"this request can't be encoded: {type(error).__name__}", status=500)


def head_of(prepared: Prepared) -> Prepared | None:
    """The part of a conversation that stands before its modules, if it has some; `prepared` keeps what
    is behind them."""
    if not prepared.request.modules or prepared.request.messages is None or prepared.text is None or prepared.error is not None:
        return None
    try:
        before, prepared.text = split(prepared.text)
    except Invalid as error:
        prepared.error = error
        return None
    return Prepared(prepared.request, before)
