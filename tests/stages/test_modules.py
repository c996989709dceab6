"""Prompts with modules at the tokenizer stage: where the modules stand, what sees what, and what is refused."""

import numpy as np
import pytest
from msgspec.structs import replace

from services.tokenizer.encoder import Encoder
from services.tokenizer.modules import PLACE
from shared.model.sampling_params import SamplingParams
from shared.model.segments import Segment
from shared.process.errors import Invalid
from shared.wire.messages import (
    ChatMessage,
    EncodingParams,
    GenerateRequest,
    ModulePart,
    PromptModule,
    TokenizedRequest,
)
from tests.stages.line_of_stages import FILES, MODEL, text_tokenizer

PARAMS = SamplingParams(max_tokens=4)


def part(position: int, *token_ids: int) -> ModulePart:
    return ModulePart(position, np.array(token_ids, np.int32))


LONG, SHORT = PromptModule("long", 3, (part(0, 11, 12, 13),)), PromptModule("short", 5, (part(3, 21, 22),))
TRIP = PromptModule(
    "trip", 14, (part(5, 31), ModulePart(6, np.zeros(0, np.int32), "city", "in Rome", 6), part(12, 32, 33))
)
CHAT = GenerateRequest(
    "r.0",
    None,
    MODEL,
    PARAMS,
    messages=(ChatMessage("system", "Be kind."), ChatMessage("user", "Why?"), ChatMessage("assistant", "So.")),
)


def encode(request: GenerateRequest, max_model_len: int = 512) -> TokenizedRequest:
    [found] = Encoder(text_tokenizer(), FILES).encode([request], max_model_len)
    assert isinstance(found, TokenizedRequest), found
    return found


def refusal(request: GenerateRequest, max_model_len: int = 512) -> Invalid:
    [found] = Encoder(text_tokenizer(), FILES).encode([request], max_model_len)
    assert isinstance(found, Invalid)
    return found


@pytest.mark.parametrize("modules", [(LONG, SHORT), (SHORT, LONG)])
def test_modules_stand_in_the_first_message_of_the_user(modules: tuple[PromptModule, ...]) -> None:
    whole = encode(CHAT).prompt_token_ids.tolist()
    found = encode(replace(CHAT, modules=modules))
    before, long, short, behind = found.segments
    assert whole == [
        *found.prompt_token_ids[: before.num_tokens].tolist(),
        *found.prompt_token_ids[before.num_tokens + 5 :].tolist(),
    ]
    assert found.prompt_token_ids[before.num_tokens :][:5].tolist() == [11, 12, 13, 21, 22], (
        "each has its place, whatever the order"
    )
    assert (before, long, short) == (
        Segment(before.num_tokens, 0),
        Segment(3, before.num_tokens, (0,)),
        Segment(2, before.num_tokens + 3, (0,)),
    )
    assert behind == Segment(len(whole) - before.num_tokens, before.num_tokens + 5, (0, 1, 2))


def test_an_argument_stands_in_its_room_and_sees_its_module_up_to_there() -> None:
    found = encode(replace(CHAT, modules=(LONG, TRIP)))
    argument = text_tokenizer()(["in Rome"], add_special_tokens=False)["input_ids"][0]
    start = found.segments[0].num_tokens
    assert found.segments[1:] == (
        Segment(3, start, (0,)),
        Segment(1, start + 5, (0,)),
        Segment(len(argument), start + 6, (0, 2)),
        Segment(2, start + 12, (0, 2)),
        Segment(found.segments[-1].num_tokens, start + 14, (0, 1, 2, 3, 4)),
    )
    assert found.prompt_token_ids[start:][3 : 6 + len(argument)].tolist() == [31, *argument, 32, 33]
    without = replace(TRIP, parts=(TRIP.parts[0], replace(TRIP.parts[1], argument=""), TRIP.parts[2]))
    assert encode(replace(CHAT, modules=(without,))).segments[1:3] == (
        Segment(1, start + 5, (0,)),
        Segment(2, start + 12, (0, 1)),
    )


def test_a_plain_prompt_has_special_tokens_before_its_modules() -> None:
    request = GenerateRequest("r.0", None, MODEL, PARAMS, prompt="Why not?")
    tokenizer = text_tokenizer()
    whole = tokenizer(["Why not?"])["input_ids"][0]
    found = encode(replace(request, modules=(LONG,)))
    num_before = len(whole) - len(tokenizer(["Why not?"], add_special_tokens=False)["input_ids"][0])
    assert found.prompt_token_ids.tolist() == [*whole[:num_before], 11, 12, 13, *whole[num_before:]]
    assert len(found.segments) == (3 if num_before else 2)
    bare = encode(replace(request, modules=(LONG,), encoding=EncodingParams(add_special_tokens=False)))
    assert bare.segments[0] == Segment(3, 0)


def test_special_tokens_that_an_argument_spells_are_text() -> None:
    tokenizer = text_tokenizer()
    special = tokenizer.all_special_tokens[0]
    spelling = replace(
        TRIP, parts=(TRIP.parts[0], replace(TRIP.parts[1], argument=special, max_tokens=40), TRIP.parts[2])
    )
    found = encode(replace(CHAT, modules=(spelling,)))
    start = found.segments[0].num_tokens
    argument = found.prompt_token_ids[start + 1 : start + 1 + found.segments[2].num_tokens].tolist()
    assert tokenizer.convert_tokens_to_ids(special) not in argument and tokenizer.decode(argument) == special


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"messages": (ChatMessage("system", "Be kind."),)}, "prompt_modules", "there is none"),
        ({"messages": (ChatMessage("user", f"What is {PLACE}?"),)}, "messages", "can't hold the word"),
        ({"messages": None, "prompt": ""}, "prompt", "nothing follows"),
        (
            {"modules": (replace(TRIP, parts=(replace(TRIP.parts[1], max_tokens=1),)),)},
            "prompt_modules",
            "has room for 1",
        ),
        ({"modules": (replace(LONG, end=600),)}, "prompt_modules", "maximum context length"),
    ],
)
def test_what_is_refused(change: dict[str, object], param: str, message: str) -> None:
    found = refusal(replace(CHAT, **{"modules": (LONG,)} | change))
    assert found.param == param and message in str(found)
