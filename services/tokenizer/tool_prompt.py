"""Tools for a template that knows of none: told in the conversation's own words, in the form of
Hermes' models, which others have learned too."""

import json
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
    content = around("", first["content"], f"\n\n{text}") if first["role"] == "system" else around(f"{text}\n\n", first["content"], "")
    return [{**first, "content": content}, *messages[1:]]


def around(before: str, content: Any, behind: str) -> Any:
    """A message's content, a text or a list of parts, between two texts."""
    if isinstance(content, str):
        return before + content + behind
    return [*([{"type": "text", "text": before}] if before else []), *content, *([{"type": "text", "text": behind}] if behind else [])]


def joined(one: Any, other: Any) -> Any:
    """Two contents as one, a line each."""
    if isinstance(one, str):
        return around(one + "\n", other, "")
    return [*one, *around("\n", other if isinstance(other, list) else [{"type": "text", "text": other}], "")]


def spell_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with calls as text of the assistant's, and what tools answered as text of
    the user's."""
    spelt: list[dict[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in message["tool_calls"]]
            content = around("", message["content"], "\n" * bool(message["content"]) + "\n".join(calls))
            spelt.append({name: value for name, value in message.items() if name != "tool_calls"} | {"content": content})
        elif message["role"] == "tool":
            answer = around("<tool_response>\n", message["content"], "\n</tool_response>")
            if spelt and spelt[-1].get("is_answer"):
                # several answers are one turn: many templates want turns to alternate
                spelt[-1]["content"] = joined(spelt[-1]["content"], answer)
            else:
                spelt.append({"role": "user", "content": answer, "is_answer": True})
        else:
            spelt.append(message)
    return [{name: value for name, value in message.items() if name != "is_answer"} for message in spelt]
