"""Messages of Anthropic's API, which are lists of blocks, as messages of a chat. Checked in time
linear in their length; the first wrong block is named."""

from itertools import groupby
from typing import Any

import orjson

from services.requests.bodies.fields import MAX_PARTS, at, kind_of, shortened, text_in
from services.requests.bodies.ignored import tell_others

Json = dict[str, Any]

MAX_MESSAGES = 4096
ROLES = ("user", "assistant", "system")
BLOCKS = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
    "tool_result": ("text", "image"),
}
# Of each kind, what may stand in it. cache_control asks for what is done anyway: prefixes are
# cached
FIELDS = {
    "text": {"text", "citations", "cache_control"},
    "image": {"source", "cache_control"},
    "tool_use": {"id", "name", "input", "cache_control", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error", "cache_control"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
}

MESSAGES_SCHEMA = {
    "description": (
        "a conversation: user and assistant, contents as text or as blocks of text, image, tool_use, tool_result, "
        "thinking"
    ),
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "properties": {"role": {"enum": list(ROLES)}, "content": {}},
        "required": ["role", "content"],
    },
}
SYSTEM_SCHEMA = {
    "description": "a text, or blocks of type text",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
}


def read_system(value: Any) -> str | None:
    """The system prompt as one text."""
    return value if value is None else "\n".join(block["text"] for block in _read_blocks(value, "system", ""))


def read_messages(value: Any) -> list[tuple[int, Json]]:
    """The chat's messages, each with the number of the message that it comes from: an answer of a
    tool is a message of its own there, and messages of one role that follow each other are one turn."""
    if not isinstance(value, list):
        raise at("", f"expected a list of messages, got {kind_of(value)}")
    if not 0 < len(value) <= MAX_MESSAGES:
        raise at("", f"expected 1 to {MAX_MESSAGES} messages, got {len(value)}")
    found = [(number, each) for number, message in enumerate(value) for each in _read_message(message, f"[{number}]")]
    turns: list[tuple[int, Json]] = []
    for role, group in groupby(found, key=lambda each: each[1]["role"]):
        same = list(group)
        turns += [(same[0][0], _as_one([message for _, message in same]))] if role in ("user", "assistant") else same
    return turns


def _as_one(messages: list[Json]) -> Json:
    """Messages of one role, with an empty line between their texts."""
    if len(messages) == 1:
        return messages[0]
    contents = [message["content"] for message in messages if message["content"]]
    one: Json = {
        "role": messages[0]["role"],
        "content": "\n\n".join(each for each in contents if isinstance(each, str)),
    }
    if not all(isinstance(each, str) for each in contents):
        lists = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents]
        one["content"] = [
            part
            for number, each in enumerate(lists)
            for part in ([{"type": "text", "text": "\n\n"}, *each] if number else each)
        ]
    if thoughts := [message["reasoning_content"] for message in messages if "reasoning_content" in message]:
        one["reasoning_content"] = "\n\n".join(thoughts)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return one | {"tool_calls": calls} if calls else one


def _read_message(value: Any, path: str) -> list[Json]:
    if not isinstance(value, dict):
        raise at(path, f"expected a message, got {kind_of(value)}")
    tell_others(value, ("role", "content"), f"messages{path}")
    role = value.get("role")
    if role not in ROLES:
        raise at(f"{path}.role", f"expected one of {', '.join(ROLES)}, got {shortened(role)}")
    blocks = _read_blocks(value.get("content"), role, f"{path}.content")
    if role == "assistant":
        return [_assistant(blocks, "".join(block["text"] for block in blocks if block["type"] == "text"))]
    results = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"]}
        for block in blocks
        if block["type"] == "tool_result"
    ]
    own = [block for block in blocks if block["type"] != "tool_result"]
    return results + ([{"role": role, "content": content_of(own)}] if own or not results else [])


def content_of(blocks: list[Json]) -> str | list[Json]:
    """A chat's content of blocks of text and images; where there are texts only, one text."""
    if all(block["type"] == "text" for block in blocks):
        return "".join(block["text"] for block in blocks)
    return [
        block if block["type"] == "text" else {"type": "image_url", "image_url": {"url": block["url"]}}
        for block in blocks
    ]


def _assistant(blocks: list[Json], text: str) -> Json:
    message: Json = {"role": "assistant", "content": text}
    if thought := "".join(block["thinking"] for block in blocks if block["type"] == "thinking"):
        message["reasoning_content"] = thought
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": orjson.dumps(block["input"]).decode()},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return message | {"tool_calls": calls} if calls else message


def _read_blocks(value: Any, role: str, path: str) -> list[Json]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise at(path, f"expected a text or a list of blocks, got {kind_of(value)}")
    if len(value) > MAX_PARTS:
        raise at(path, f"at most {MAX_PARTS} blocks, got {len(value)}")
    return [_read_block(block, role, f"{path}[{number}]") for number, block in enumerate(value)]


def _read_block(value: Any, role: str, path: str) -> Json:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in BLOCKS[role]:
        raise at(
            f"{path}.type",
            f"of the {role}'s blocks, only {', '.join(BLOCKS[role])} are understood, got {shortened(kind)}",
        )
    tell_others(value, {"type", *FIELDS[kind]}, f"messages{path}" if ".content" in path else f"system{path}")
    if kind == "tool_result":
        content = value.get("content", "")
        blocks = _read_blocks(content if content is not None else "", "tool_result", f"{path}.content")
        return {"type": kind, "tool_use_id": text_in(value, "tool_use_id", path), "content": content_of(blocks)}
    if kind == "image":
        return {"type": kind, "url": _read_source(value.get("source"), f"{path}.source")}
    if kind == "tool_use":
        if not isinstance(value.get("input"), dict):
            raise at(f"{path}.input", f"expected an object, got {kind_of(value.get('input'))}")
        return {
            "type": kind,
            "id": text_in(value, "id", path),
            "name": text_in(value, "name", path),
            "input": value["input"],
        }
    field = "data" if kind == "redacted_thinking" else kind
    return {"type": kind, field: text_in(value, field, path)}


def _read_source(value: Any, path: str) -> str:
    """An image's source, as a URL: that of the image itself, or of where it is."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "url":
        return text_in(value, "url", path)
    if kind == "base64":
        return f"data:{text_in(value, 'media_type', path)};base64,{text_in(value, 'data', path)}"
    raise at(f"{path}.type", f"expected base64 or url, got {shortened(kind)}")
