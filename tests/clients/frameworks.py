"""Frameworks and packages that speak OpenAI's API, each with the lines of docs/start/clients.md.
One function a client; it raises if something is wrong.
"""

from typing import Any, Literal

from pydantic import BaseModel

from tests.clients.documented import names_of

MODEL = "penstock-demo"
QUESTION = "What is Penstock?"
ANSWER = "Penstock is a server for large language models."


class Forecast(BaseModel):
    """The weather to come."""

    place: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def langchain(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = names_of("LangChain", url, MODEL)["model"].model_copy(
        update={"temperature": 0, "max_tokens": 120, "seed": 1}
    )
    reply = model.invoke(QUESTION)
    assert reply.text.startswith(ANSWER) and reply.usage_metadata["output_tokens"] == 37, reply
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == reply.text
    tools = model.bind_tools([Forecast], tool_choice="any", parallel_tool_calls=False)
    called = tools.invoke(QUESTION)
    [call] = called.tool_calls
    assert call["name"] == "Forecast" and Forecast(**call["args"]), called
    chunks = list(tools.stream(QUESTION))
    assert sum(chunks[1:], chunks[0]).tool_calls[0]["args"] == call["args"]
    after = model.bind_tools([Forecast]).invoke(
        [HumanMessage(QUESTION), called, ToolMessage("rain", tool_call_id=call["id"])]
    )
    assert after.response_metadata["finish_reason"] in ("stop", "length")
    assert isinstance(model.with_structured_output(Forecast, method="function_calling").invoke(QUESTION), Forecast)


def llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    model = names_of("LlamaIndex", url, MODEL)["model"].model_copy(update={"temperature": 0, "max_tokens": 120})
    message = ChatMessage(role="user", content=QUESTION)
    whole = model.chat([message]).message.content
    assert whole.startswith(ANSWER), whole
    assert "".join(chunk.delta or "" for chunk in model.stream_chat([message])) == whole

    def forecast(days: Literal[1, 2]) -> str:
        """The weather to come."""
        return f"rain for {days} days"

    tool = FunctionTool.from_defaults(forecast)
    reply = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    [call] = model.get_tool_calls_from_response(reply)
    assert call.tool_name == "forecast" and call.tool_kwargs["days"] in (1, 2), call


def instructor(url: str) -> None:
    import instructor as library

    names = names_of("instructor", url, MODEL)
    for client in (names["client"], library.from_openai(names["plain"], mode=library.Mode.TOOLS_STRICT)):
        messages = [{"role": "user", "content": QUESTION}]
        found = client.chat.completions.create(
            model=MODEL, messages=messages, response_model=Forecast, temperature=0, max_tokens=120
        )
        assert isinstance(found, Forecast), client.mode


def litellm(url: str) -> None:
    import litellm as library

    messages = [{"role": "user", "content": QUESTION}]
    tool = {
        "type": "function",
        "function": {
            "name": "forecast",
            "parameters": {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]},
        },
    }
    shown = names_of("litellm", url, MODEL)["options"]
    for name in (shown["model"], f"hosted_vllm/{MODEL}"):
        options: dict[str, Any] = shown | {"model": name, "temperature": 0}
        whole = library.completion(messages=messages, **options)
        assert whole.choices[0].message.content.startswith(ANSWER), whole
        chunks = list(
            library.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **options)
        )
        assert (
            "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            == whole.choices[0].message.content
        )
        assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [37], name
        called = library.completion(messages=messages, tools=[tool], tool_choice="required", max_tokens=100, **options)
        assert called.choices[0].message.tool_calls[0].function.name == "forecast", called
        library.completion(
            messages=[*messages, called.choices[0].message.model_dump(), {"role": "user", "content": "And?"}],
            max_tokens=3,
            **options,
        )


def httpx_sse(url: str) -> None:
    names = names_of("httpx-sse", url, MODEL)
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    events = list(names["begin"](body))
    assert events[-1].data == "[DONE]" and events[10].id, events
    rest = list(names["resume"](events[0].json()["id"], events[10]))
    assert [event.data for event in rest] == [event.data for event in events[11:]]
