"""A chat's chunks as Ollama's lines, for any chunks."""

from typing import Any

import ollama
import orjson
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.ollama.lines import OllamaLines
from services.requests.answers.translate import is_broken_off
from services.requests.record import make_record
from tests.unit.test_anthropic_messages import last_arguments, said
from tests.unit.test_response_events import USAGE, chats


@given(chats, st.sampled_from(["stop", "length", "tool_calls"]))
def test_lines_add_up_to_the_whole_answer(chat: list[Any], end: str) -> None:
    made = OllamaLines(make_record("ollama", "m", "m"), is_chat=True)
    lines = made.opening(None)
    for delta in chat:
        lines += made.chunk({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    lines += made.chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": end}]}) + made.closing(USAGE)
    sent = [ollama.ChatResponse.model_validate(orjson.loads(made.encode(line))) for line in lines]
    whole = ollama.ChatResponse.model_validate(made.whole())
    assert [line.done for line in sent] == [False] * (len(sent) - 1) + [True]
    assert "".join(line.message.content or "" for line in sent) == whole.message.content == said(chat, "content")
    assert "".join(line.message.thinking or "" for line in sent) == (whole.message.thinking or "") == said(chat, "reasoning_content")
    names = [call["function"]["name"] for delta in chat for call in delta.get("tool_calls", ()) if "id" in call]
    if end == "length" and names and is_broken_off(last_arguments(chat)):
        del names[-1]
    assert [call.function.name for call in whole.message.tool_calls or ()] == names
    assert [call.function.name for line in sent[:-1] for call in line.message.tool_calls or ()] == names
    assert whole.done_reason == ("length" if end == "length" else "stop") and whole.eval_count == 4


def test_a_call_that_was_cut_off_is_left_out() -> None:
    made = OllamaLines(make_record("ollama", "m", "m"), is_chat=True)
    for call, text in (("f", '{"a": 1}'), ("g", '{"a": ')):
        for delta in ({"id": f"call_{call}", "function": {"name": call, "arguments": ""}}, {"function": {"arguments": text}}):
            made.chunk({"choices": [{"delta": {"tool_calls": [delta]}, "finish_reason": None}]})
    made.chunk({"choices": [{"delta": {}, "finish_reason": "length"}]})
    made.closing(USAGE)
    assert [call["function"]["name"] for call in made.whole()["message"]["tool_calls"]] == ["f"]
