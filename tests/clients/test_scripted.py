"""The scripted model says the next turn of its script, through the whole pipeline."""

from typing import Any

import anthropic
import pytest

from tests.clients.conftest import SECRET
from tests.clients.scripted.pipeline import MODEL
from tests.deployment import Deployment

TOOL: Any = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}


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
    choice = (
        scripted.client()
        .chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=2)
        .choices[0]
    )
    assert choice.finish_reason == "length" and "Understood.".startswith(choice.message.content or "-")


@pytest.mark.parametrize("streams", [False, True])
def test_anthropic_s_tool_runner_sends_the_question_again_with_the_tool_s_answer(
    scripted: Deployment, streams: bool
) -> None:
    """Its default is to send what is new alone, and to leave the conversation to the server, until
    a server says that it keeps none.
    """
    asked: list[str] = []

    @anthropic.beta_tool
    def read(path: str) -> str:
        """Read a file."""
        asked.append(path)
        return f"The file: {SECRET}"

    question: Any = [{"role": "user", "content": "Read the file, please."}]
    with anthropic.Anthropic(base_url=scripted.url(), api_key="none") as client:
        runner: Any = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=100, tools=[read], messages=question, stream=streams
        )
        final = runner.until_done()
    assert asked == ["a.txt"] and final.content[0].text == f"It says {SECRET}."


def test_a_thread_that_is_asked_for_by_itself_is_refused_in_the_package_s_own_words(scripted: Deployment) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
    with anthropic.Anthropic(base_url=scripted.url(), api_key="none") as client:
        for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
            with pytest.raises(anthropic.BadRequestError) as refused:
                client.beta.messages.create(**asked, thread=thread)
            assert refused.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}, (
                refused.value.body
            )
