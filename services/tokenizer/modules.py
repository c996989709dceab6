"""Prompts with modules: where the modules stand, and the segments that the prompt becomes.

What stands before the modules sees nothing of them; each module sees that, and itself; what follows
sees all. An argument stands in the room that its module keeps for it, and sees what of the module is
before it.
"""

from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from services.tokenizer.special_tokens import texts_of
from shared.model.arrays import Array
from shared.model.segments import MAX_SEGMENTS, Segment
from shared.process.errors import Invalid
from shared.wire.messages import GenerateRequest, ModulePart

PARAM = "prompt_modules"
LONG_TEXT = 16  # characters for each token that there is room for; four are usual
# in a conversation, where the modules stand: templates copy it like any word
PLACE = "PenstockPromptModulesStandHere"


def with_place(request: GenerateRequest) -> GenerateRequest:
    """The request, with PLACE at the beginning of the first user's message, if it has modules.
    Raises Invalid."""
    if not request.modules or request.messages is None:
        return request
    place = next((number for number, message in enumerate(request.messages) if message.role == "user"), None)
    if place is None:
        raise Invalid("prompt modules stand in the first message of the user: there is none", param=PARAM)
    if any(PLACE in text for part in (request.messages, request.chat) for text in texts_of(part)):
        raise Invalid(f"a conversation with prompt modules can't hold the word {PLACE}", param="messages")
    message = replace(request.messages[place], content=PLACE + request.messages[place].content)
    return replace(request, messages=(*request.messages[:place], message, *request.messages[place + 1 :]))


def split(text: str) -> tuple[str, str]:
    """A rendered conversation before and behind PLACE, of the text's own class. Raises Invalid."""
    before, *behind = text.split(PLACE)
    if len(behind) != 1:
        raise Invalid(
            "the chat template does not put the first message of the user into the prompt once: it takes no prompt "
            "modules",
            param=PARAM,
        )
    return type(text)(before), type(text)(behind[0])


def join(
    request: GenerateRequest, before: Array, behind: Array, encode: Callable[[str], Array]
) -> tuple[Array, tuple[Segment, ...]]:
    """The tokens and the segments of a prompt with modules. before, behind: the tokens around these,
    [n] int32; encode: an argument to its tokens. Raises Invalid."""
    if not len(behind):
        raise Invalid(
            "nothing follows the prompt modules", param="messages" if request.messages is not None else "prompt"
        )
    tokens: list[Array] = []
    segments: list[Segment] = []

    def add(token_ids: Array, position: int, sees: tuple[int, ...]) -> int:
        tokens.append(token_ids)
        segments.append(Segment(len(token_ids), position, sees))
        return len(segments) - 1

    trunk = (add(before, 0, ()),) if len(before) else ()
    # their order in the request says nothing: so the same modules are the same prompt
    for module in sorted(request.modules, key=lambda each: (each.parts[0].position, each.name)):
        own = trunk
        for part in module.parts:
            if not part.parameter:
                own = (*own, add(part.token_ids, len(before) + part.position, own))
            elif part.argument and len(argument := encoded(part, encode)):
                add(argument, len(before) + part.position, own)
    if len(segments) >= MAX_SEGMENTS:
        raise Invalid(
            f"the prompt modules have {len(segments)} parts, and at most {MAX_SEGMENTS - 1} go into one prompt",
            param=PARAM,
        )
    add(behind, len(before) + max(module.end for module in request.modules), tuple(range(len(segments))))
    return np.concatenate(tokens), tuple(segments)


def encoded(part: ModulePart, encode: Callable[[str], Array]) -> Array:
    """An argument's tokens. Raises Invalid for too many."""
    if len(part.argument) > LONG_TEXT * part.max_tokens:
        raise Invalid(
            f"the argument {part.parameter} is far longer than the {part.max_tokens} tokens that its module has room "
            "for",
            param=PARAM,
        )
    token_ids = encode(part.argument)
    if len(token_ids) > part.max_tokens:
        raise Invalid(
            f"the argument {part.parameter} has {len(token_ids)} tokens, and its module has room for {part.max_tokens}",
            param=PARAM,
        )
    return token_ids
