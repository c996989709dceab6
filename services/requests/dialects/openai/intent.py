"""Intent: what a body asks for, as one checked value. prepare.py makes the pipeline's requests of it,
whichever API the body came by, and asks the body nothing more."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.requests.dialects.openai.messages import Message
from services.requests.dialects.openai.tools import Calling
from services.requests.store.modules.schemas import UsedModules
from services.requests.store.record import ResponseRecord
from shared.model.constraint import Constraint
from shared.wire.messages import ChatOptions, GenerateRequest


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """A beam search instead of a draw."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True)
class ChatIntent:
    """The parts of an intent that only a chat has."""

    messages: Sequence[Message]
    calling: Calling
    may_think: bool
    options_without_thought: ChatOptions  # of an answer that begins with a call


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A checked body, whichever API it came by."""

    record: ResponseRecord  # a draft, without the facts that depend on the model
    requests: tuple[GenerateRequest, ...]  # drafts, one for each prompt: without ids, model and messages
    given: frozenset[str]  # sampling parameters that the client set, so that the model maker's defaults don't count
    seed: int | None  # of the first choice; None: a random one
    constraint: Constraint | None
    deadline_s: float | None
    modules: UsedModules | None
    beams: BeamOptions | None
    stream: bool
    has_positions: bool  # in a stream
    has_timings: bool
    user: str | None
    num_answers: int  # to each prompt
    suffix: str = ""  # of a completion: the text after the gap that the answer fills
    chat: ChatIntent | None = None

    @property
    def model(self) -> str:
        """The model's name as the client called it."""
        return self.record.model
