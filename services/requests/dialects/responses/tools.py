"""The tools of a response as those of the chat inside, and back: functions, custom tools, and
namespaces, which are groups of both.

In the chat a tool of a namespace has one name, made of both: the template and the model know no
groups. The tool is found again in the request's tools, which a stored response keeps: so every reader
of the log makes the same items.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from services.requests.bodies.fields import kind_of, shortened
from services.requests.bodies.ignored import pass_over
from services.requests.dialects.openai.tools import pass_over_hosted
from shared.process.errors import Invalid

Json = dict[str, Any]

JOINT = "__"  # between a namespace and a name
MAX_NAME = 64  # characters, of what models have seen
DIGEST = 8  # characters of what stands for the end of a longer one
OWN = ("function", "custom")
GROUP_FIELDS = ("type", "name", "description", "tools")


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool by its own names."""

    name: str
    namespace: str | None


@dataclass(frozen=True, slots=True)
class ChatTools:
    tools: list[Json]
    places: list[str]  # of each, where it stands in the request


def chat_name(name: str, namespace: str | None) -> str:
    """The name in the chat of a tool of a namespace, if it is in one."""
    if not namespace:
        return name
    joined = f"{namespace}{'' if namespace.endswith(JOINT) else JOINT}{name}"
    if len(joined) <= MAX_NAME:
        return joined
    return joined[: MAX_NAME - DIGEST - 1] + "_" + hashlib.blake2b(joined.encode(), digest_size=DIGEST // 2).hexdigest()


def chat_tools(tools: list[Json]) -> ChatTools:
    """The tools that the client runs; those that a server would run are passed over. Raises
    Invalid."""
    found = ChatTools([], [])
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if tool.get("type") != "namespace":
            _add(found, tool, place, None)
            continue
        members, name = tool.get("tools"), tool.get("name")
        if not isinstance(name, str) or not isinstance(members, list):
            raise Invalid(f"{place}: a namespace has a name and tools", param=place)
        pass_over(
            *(
                f"{place}.{shortened(key)}"
                for key, value in tool.items()
                if key not in GROUP_FIELDS and value is not None
            )
        )
        for index, member in enumerate(members):
            if not isinstance(member, dict):
                raise Invalid(
                    f"{place}.tools[{index}]: expected a tool, got {kind_of(member)}", param=f"{place}.tools[{index}]"
                )
            _add(found, member, f"{place}.tools[{index}]", name)
    return found


def _add(found: ChatTools, tool: Json, place: str, namespace: str | None) -> None:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise Invalid(f"{place}.type: expected a text, got {kind_of(kind)}", param=f"{place}.type")
    if kind not in OWN:
        return pass_over_hosted({place: kind})
    own = {key: each for key, each in tool.items() if key != "type" and each is not None}
    if namespace and isinstance(own.get("name"), str):
        own["name"] = chat_name(own["name"], namespace)
    # which lies flat here
    if kind == "custom" and isinstance(own.get("format"), dict) and own["format"].get("type") == "grammar":
        own["format"] = {
            "type": "grammar",
            "grammar": {key: each for key, each in own["format"].items() if key != "type"},
        }
    found.tools.append({"type": kind, kind: own})
    found.places.append(place)


def chat_choice(choice: str | Json | None) -> str | Json | None:
    """Raises Invalid."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = (
            [_chat_named(each) if isinstance(each, dict) else each for each in tools]
            if isinstance(tools, list)
            else tools
        )
        return {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": choice.get("mode"),
                "tools": without_hosted(named) if isinstance(named, list) else named,
            },
        }
    if choice.get("type") not in OWN:
        raise Invalid(
            f"tool_choice: this server runs no tools of its own, such as {shortened(choice.get('type'))}",
            param="tool_choice",
        )
    return _chat_named(choice)


def without_hosted(named: list[Any]) -> list[Any]:
    pass_over(
        *(
            f"tool_choice.tools[{number}]"
            for number, each in enumerate(named)
            if isinstance(each, dict) and each.get("type") not in OWN
        )
    )
    return [each for each in named if not isinstance(each, dict) or each.get("type") in OWN]


def _chat_named(choice: Json) -> Json:
    kind, name, namespace = choice.get("type"), choice.get("name"), choice.get("namespace")
    if kind not in OWN:
        return choice
    known = isinstance(name, str) and isinstance(namespace, str)
    return {"type": kind, "function": {"name": chat_name(str(name), str(namespace)) if known else name}}


def names_of(tools: list[Json]) -> dict[str, ToolName]:
    """The tools of namespaces by their names in the chat."""
    groups = [tool for tool in tools if tool.get("type") == "namespace" and isinstance(tool.get("name"), str)]
    return {
        chat_name(member["name"], group["name"]): ToolName(member["name"], group["name"])
        for group in groups
        for member in group.get("tools") or ()
        if isinstance(member, dict) and isinstance(member.get("name"), str)
    }
