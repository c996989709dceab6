"""The modules of a prompt, as a request brings them."""

from shared.model.arrays import Int32Array
from shared.model.wire_struct import WireStruct


class ModulePart(WireStruct, frozen=True):
    """A text of a prompt module, as its tokens, or an argument in it."""

    position: int  # of its first token, from where modules begin
    token_ids: Int32Array  # of an argument none
    parameter: str = ""  # of an argument: its name
    argument: str = ""
    max_tokens: int = 0  # of an argument


class PromptModule(WireStruct, frozen=True):
    """A module that a prompt is put together from."""

    name: str
    end: int  # the position behind it, from where modules begin
    parts: tuple[ModulePart, ...]
