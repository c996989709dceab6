"""The scripted model says the next turn of its script, through the whole pipeline."""

from typing import Any

from tests.clients.conftest import SECRET
from tests.clients.scripted.pipeline import MODEL
from tests.deployment import Deployment

TOOL: Any = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}}


def ask(scripted: Deployment, messages: list[Any], **options: Any) -> Any:
    return scripted.client().chat.completions.create(model=MODEL, messages=messages, **options).choices[0].message


def test_the_script_calls_a_tool_and_quotes_its_answer(scripted: Deployment) -> None:
    messages: list[Any] = [{"role": "user", "content": "Read the file, please."}]
    called = ask(scripted, messages, tools=[TOOL])
    [call] = called.tool_calls
    assert (call.function.name, call.function.arguments) == ("read", '{"path": "a.txt"}')
    messages += [called, {"role": "tool", "tool_call_id": call.id, "content": f"The file: {SECRET}"}]
    assert ask(scripted, messages, tools=[TOOL]).content == f"It says {SECRET}."


def test_a_tool_that_is_not_offered_is_not_called(scripted: Deployment) -> None:
    answer = ask(scripted, [{"role": "user", "content": "A title for this: Read the file, please."}])
    assert (answer.content, answer.tool_calls) == ("Understood.", None)


def test_sampling_changes_nothing_of_what_the_script_says(scripted: Deployment) -> None:
    answer = ask(scripted, [{"role": "user", "content": "Hello"}], temperature=2.0, seed=7)
    assert answer.content == "Understood."


def test_an_answer_is_cut_at_max_tokens(scripted: Deployment) -> None:
    choice = scripted.client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=2).choices[0]
    assert choice.finish_reason == "length" and "Understood.".startswith(choice.message.content or "-")
