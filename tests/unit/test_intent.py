"""A body of any API becomes one Intent: the same conversation is the same intent, whichever API it comes by."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.requests.dialects.anthropic.chat import chat_of as chat_of_message
from services.requests.dialects.anthropic.schemas import MessagesBody
from services.requests.dialects.openai.intent import BeamOptions, Intent
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody
from services.requests.dialects.responses.chat import chat_of as chat_of_response
from services.requests.dialects.responses.schemas import ResponseBody
from shared.process.errors import Invalid

HELLO = [{"role": "user", "content": "Hello"}]
SAMPLED = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 3}


def of_chat(**fields: Any) -> Intent:
    return ChatCompletionBody.model_validate({"model": "m", "messages": HELLO} | fields).intent()


def of_completion(**fields: Any) -> Intent:
    return CompletionBody.model_validate({"model": "m", "prompt": "Hello"} | fields).intent()


def of_message(**fields: Any) -> Intent:
    return chat_of_message(MessagesBody.model_validate({"model": "m", "messages": HELLO} | fields)).intent()


def of_response(max_tokens: int, **fields: Any) -> Intent:
    body = ResponseBody.model_validate({"model": "m", "input": "Hello", "max_output_tokens": max_tokens} | fields)
    return chat_of_response(body, []).intent()


@pytest.mark.parametrize("intent_of", [of_message, of_response])
def test_the_same_conversation_is_the_same_intent(intent_of: Callable[..., Intent]) -> None:
    here, chat = intent_of(max_tokens=9, **SAMPLED), of_chat(max_tokens=9, **SAMPLED)
    assert replace(here, chat=None, given=chat.given) == replace(chat, chat=None)
    assert here.given >= SAMPLED.keys()
    assert here.chat is not None and chat.chat is not None
    assert [each.to_wire() for each in here.chat.messages] == [each.to_wire() for each in chat.chat.messages]


def test_each_prompt_is_a_draft() -> None:
    made = of_completion(
        prompt=[[1, 2], [3]],
        n=2,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True, "resume_within_s": 5},
    )
    assert [np.asarray(each.prompt_token_ids).tolist() for each in made.requests] == [[1, 2], [3]]
    assert (made.record.num_prompts, made.record.n, made.record.has_usage, made.record.resume_within_s) == (
        2,
        2,
        True,
        5.0,
    )
    assert made.beams is None and made.chat is None and made.stream


def test_the_best_are_chosen_and_beams_are_searched() -> None:
    best = of_completion(n=2, best_of=5)
    assert (best.record.n, best.record.num_best, best.record.hides_logprobs, best.requests[0].params.logprobs) == (
        5,
        2,
        True,
        0,
    )
    beams = of_completion(n=2, best_of=5, use_beam_search=True, early_stopping=True)
    assert (beams.record.n, beams.record.num_best, beams.num_answers, beams.beams) == (
        1,
        None,
        2,
        BeamOptions(5, 1.0, True),
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
        ({"use_beam_search": True, "echo": True}, "echo"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_a_body_that_can_t_be_done_is_no_intent(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Invalid) as refused:
        of_completion(**fields)
    assert refused.value.param == param


def test_a_forced_call_leaves_no_room_for_a_thought() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    forced, free = of_chat(tools=tools, tool_choice="required"), of_chat(tools=tools)
    assert forced.chat is not None and '"enable_thinking":false' in forced.chat.options_without_thought.template_kwargs
    assert free.chat is not None and free.chat.options_without_thought == free.requests[0].chat
    assert forced.constraint is not None and free.constraint is None
