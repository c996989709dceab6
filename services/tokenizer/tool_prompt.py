"""Tools for a template that knows of none: told in the conversation's own words, in the form of
Hermes' models, which others have learned too."""

import json
from collections.abc import Callable
from typing import Any

EXPLANATION = """You may call functions to answer. They are described between <tools> and </tools>, one a line, as JSON:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and its arguments between <tool_call> and </tool_call>:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""


def explain_tools(messages: list[dict[str, Any]], tools: list[Any]) -> list[dict[str, Any]]:
    """The conversation with the tools in its first message, which is the system's or, where there
    is none, what comes first: some models know no system."""
    if not tools:
        return messages
    text = EXPLANATION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if not messages or messages[0]["role"] not in ("system", "user"):
        return [{"role": "system", "content": text}, *messages]
    first = messages[0]
    content = (
        around("", first["content"], f"\n\n{text}")
        if first["role"] == "system"
        else around(f"{text}\n\n", first["content"], "")
    )
    return [{**first, "content": content}, *messages[1:]]


def around(before: str, content: Any, behind: str) -> Any:
    """A message's content, a text or a list of parts, between two texts."""
    if isinstance(content, str):
        return before + content + behind
    return [
        *([{"type": "text", "text": before}] if before else []),
        *content,
        *([{"type": "text", "text": behind}] if behind else []),
    ]


def spell_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with calls as text of the assistant's, and what tools answered as text of the
    user's: several answers, and what the user says to them, are one turn, for many templates want
    turns to alternate."""
    spelt: list[dict[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [
                f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
                for call in message["tool_calls"]
            ]
            content = around("", message["content"], "\n" * bool(message["content"]) + "\n".join(calls))
            spelt.append(
                {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}
            )
        elif message["role"] == "tool":
            spelt.append(message | {"content": around("<tool_response>\n", message["content"], "\n</tool_response>")})
        else:
            spelt.append(message)
    turns = grouped(spelt, lambda turn, message: turn[0]["role"] == "tool" and message["role"] in ("tool", "user"))
    return [
        {"role": "user", "content": as_one(turn)["content"]} if turn[0]["role"] == "tool" else turn[0] for turn in turns
    ]


def in_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation for a template that wants turns to alternate: messages of one role that follow
    each other are one, and what the user says to a tool's answer is a part of it."""
    return [as_one(turn) for turn in grouped(messages, _goes_on)]


def _goes_on(turn: list[dict[str, Any]], message: dict[str, Any]) -> bool:
    before, role = str(turn[-1]["role"]), str(message["role"])
    return role == before in ("user", "assistant") or (role == "user" and before == "tool")


def grouped(
    messages: list[dict[str, Any]], goes_on: Callable[[list[dict[str, Any]], dict[str, Any]], bool]
) -> list[list[dict[str, Any]]]:
    """The messages in turns. goes_on: whether a message belongs to the turn before it."""
    turns: list[list[dict[str, Any]]] = []
    for message in messages:
        if turns and goes_on(turns[-1], message):
            turns[-1].append(message)
        else:
            turns.append([message])
    return turns


def as_one(turn: list[dict[str, Any]]) -> dict[str, Any]:
    """Messages as the first of them, with the content of all."""
    if len(turn) == 1:
        return turn[0]
    one = {**turn[0], "content": joined([message["content"] for message in turn if message["content"]])}
    if calls := [call for message in turn for call in message.get("tool_calls", ())]:
        one["tool_calls"] = calls
    for name in ("reasoning_content", "reasoning", "thinking"):
        if thoughts := [message[name] for message in turn if message.get(name)]:
            one[name] = "\n".join(thoughts)
    return one


def joined(contents: list[Any]) -> Any:
    """Contents as one, a line each."""
    if all(isinstance(content, str) for content in contents):
        return "\n".join(contents)
    lists = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents]
    return [
        part
        for number, each in enumerate(lists)
        for part in ([{"type": "text", "text": "\n"}, *each] if number else each)
    ]
