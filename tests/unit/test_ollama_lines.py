"""Answers as Ollama's lines, for any deltas."""

import ollama
import orjson
from hypothesis import given
from hypothesis import strategies as st

from services.requests.dialects.ollama.lines import OllamaLines
from services.requests.store.record import make_record
from services.requests.text.answers.answer import Delta
from services.requests.text.answers.translate import is_broken_off
from tests.unit.deltas import USAGE, begun, call, chats, last_arguments
from tests.unit.deltas import end as ended


@given(chats, st.sampled_from(["stop", "length", "tool_calls"]))
def test_lines_add_up_to_the_whole_answer(chat: list[Delta], end: str) -> None:
    made = OllamaLines(make_record("ollama", "m", "m"), is_chat=True)
    lines = made.opening(None)
    for delta in chat:
        lines += made.add(delta)
    lines += made.add(ended(end)) + made.closing(USAGE, {})
    sent = [ollama.ChatResponse.model_validate(orjson.loads(made.encode(line))) for line in lines]
    whole = ollama.ChatResponse.model_validate(made.whole())
    assert [line.done for line in sent] == [False] * (len(sent) - 1) + [True]
    assert (
        "".join(line.message.content or "" for line in sent)
        == whole.message.content
        == "".join(delta.content for delta in chat)
    )
    assert (
        "".join(line.message.thinking or "" for line in sent)
        == (whole.message.thinking or "")
        == "".join(delta.reasoning for delta in chat)
    )
    names = [each.name for each in begun(chat)]
    if end == "length" and names and is_broken_off(last_arguments(chat)):
        del names[-1]
    assert [call.function.name for call in whole.message.tool_calls or ()] == names
    assert [call.function.name for line in sent[:-1] for call in line.message.tool_calls or ()] == names
    assert whole.done_reason == ("length" if end == "length" else "stop") and whole.eval_count == 4


def test_a_call_that_was_cut_off_is_left_out() -> None:
    made = OllamaLines(make_record("ollama", "m", "m"), is_chat=True)
    for delta in [*call("f", ['{"a": 1}']), *call("g", ['{"a": ']), ended("length")]:
        made.add(delta)
    made.closing(USAGE, {})
    assert [each["function"]["name"] for each in made.whole()["message"]["tool_calls"]] == ["f"]
