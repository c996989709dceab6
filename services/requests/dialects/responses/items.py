"""The items of a response's input and output, and the chat messages that they are for the model.

An item is kept as a client may send it and read it again: a message with parts, a function call,
its output, or a reasoning. Each is checked in time linear in its length, and the first that is
wrong is named.
"""

from collections.abc import Callable
from typing import Any

import orjson

from services.requests.bodies.content import read_image
from services.requests.bodies.fields import MAX_PARTS, at, kind_of, shortened, text_in
from services.requests.bodies.ignored import tell, tell_others
from services.requests.dialects.responses.tools import chat_name

Json = dict[str, Any]

MAX_ITEMS = 4096
ROLES = ("user", "assistant", "system", "developer")
PART_OF = {"user": "input_text", "system": "input_text", "developer": "input_text", "assistant": "output_text"}
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
IMAGE_FIELDS = ("image_url", "file_id", "detail")
# Of what we send in items, the fields that say nothing to the model
MESSAGE_FIELDS = {"type", "id", "role", "content", "status", "phase"}
CALL_FIELDS = {
    "type", "id", "call_id", "name", "arguments", "status", "namespace", "caller", "async", "parsed_arguments",
}  # fmt: skip
CUSTOM_FIELDS = {"type", "id", "call_id", "name", "input", "status", "namespace", "caller", "async"}
SHELL_FIELDS = {"type", "id", "call_id", "action", "status"}
OUTPUT_FIELDS = {"type", "id", "call_id", "output", "status", "name"}
REASONING_FIELDS = {"type", "id", "summary", "content", "encrypted_content", "status"}
OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
CALLS = ("function_call", "custom_tool_call", "local_shell_call")
# Of tools that others' servers run, and what others' clients keep: there is nothing for the model
# in them
FOREIGN = {
    "additional_tools", "code_interpreter_call", "compaction", "compaction_trigger", "context_compaction",
    "file_search_call", "ghost_snapshot", "image_generation_call", "mcp_approval_request", "mcp_approval_response",
    "mcp_call", "mcp_list_tools", "tool_search_call", "tool_search_output", "web_search_call",
}  # fmt: skip
REFERENCE_FIELDS = {"type", "id"}

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
}

INPUT_SCHEMA = {
    "description": (
        "a text, or items: messages, function calls, their outputs, reasoning, references to items of stored responses"
    ),
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}],
}


def read_input(value: Any) -> list[Json]:
    """A response's input as items. Raises PydanticCustomError at the first that is wrong."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    if not isinstance(value, list):
        raise at("", f"expected a text or a list of items, got {kind_of(value)}")
    if not value:
        raise at("", "it is empty")
    if len(value) > MAX_ITEMS:
        raise at("", f"at most {MAX_ITEMS} items, got {len(value)}")
    return [read_item(each, f"[{index}]") for index, each in enumerate(value)]


def read_item(value: Any, path: str) -> Json:
    if not isinstance(value, dict):
        raise at(path, f"expected an item, got {kind_of(value)}")
    value = {key: each for key, each in value.items() if each is not None}
    kind = value.get("type", "message")
    if kind in FOREIGN:
        tell(f"input{path}")
        return dict(value)
    if kind not in READERS:
        raise at(f"{path}.type", f"only {', '.join(READERS)} are understood, got {shortened(kind)}")
    fields, read = READERS[kind]
    tell_others(value, fields, f"input{path}")
    return read(value, path)


def _read_call(value: Json, path: str) -> Json:
    field = "arguments" if value["type"] == "function_call" else "input"
    return {key: text_in(value, key, path) for key in ("type", "call_id", "name", field)} | _optional(
        value, ("id", "namespace"), path
    )


def _read_shell_call(value: Json, path: str) -> Json:
    """Read a call whose id is the item's, in OpenAI's older form."""
    if not isinstance(value.get("action"), dict):
        raise at(f"{path}.action", f"expected an object, got {kind_of(value.get('action'))}")
    call_id = text_in(value, "call_id" if "call_id" in value else "id", path)
    return {"type": value["type"], "call_id": call_id, "action": value["action"]} | _optional(value, ("id",), path)


def _read_reference(value: Json, path: str) -> Json:
    return {"type": value["type"], "id": text_in(value, "id", path)}


def _read_output(value: Json, path: str) -> Json:
    """A tool's answer, a text or parts with images."""
    output = value.get("output")
    text = (
        content_of(_read_parts(output, "input_text", f"{path}.output"))
        if isinstance(output, list)
        else text_in(value, "output", path)
    )
    named = "id" if value["type"] == "local_shell_call_output" and "call_id" not in value else "call_id"
    return {"type": value["type"], "call_id": text_in(value, named, path), "output": text} | _optional(
        value, ("id",), path
    )


def _read_message(value: Json, path: str) -> Json:
    role = value.get("role")
    if role not in ROLES:
        raise at(f"{path}.role", f"expected one of {', '.join(ROLES)}, got {shortened(role)}")
    content = value.get("content")
    parts = (
        [{"type": PART_OF[role], "text": content}]
        if isinstance(content, str)
        else _read_parts(content, PART_OF[role], f"{path}.content")
    )
    if role == "assistant":
        parts = [part if part["type"] == "refusal" else part | {"annotations": [], "logprobs": []} for part in parts]
    return {"type": "message", "role": role, "content": parts} | _optional(value, ("id",), path)


def _read_parts(value: Any, kind: str, path: str) -> list[Json]:
    """Parts of text, as parts of one kind; a refusal stays one, and so does an image."""
    if not isinstance(value, list):
        raise at(path, f"expected a text or a list of parts, got {kind_of(value)}")
    if len(value) > MAX_PARTS:
        raise at(path, f"at most {MAX_PARTS} parts, got {len(value)}")
    parts = []
    for index, part in enumerate(value):
        own = part.get("type") if isinstance(part, dict) else None
        if own == "input_image" and kind == "input_text":
            read_image(part, f"{path}[{index}]")
            parts.append({"type": own} | {name: part[name] for name in IMAGE_FIELDS if part.get(name) is not None})
            continue
        if own not in TEXT_PARTS:
            raise at(
                f"{path}[{index}].type",
                "only text and images are understood, got "
                f"{shortened(own) if isinstance(part, dict) else kind_of(part)}",
            )
        field = "refusal" if own == "refusal" else "text"
        parts.append({"type": own if own == "refusal" else kind, field: text_in(part, field, f"{path}[{index}]")})
    return parts


def _read_reasoning(value: Json, path: str) -> Json:
    content = value.get("content", [])
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        raise at(f"{path}.content", "expected a list of parts of type reasoning_text")
    parts = [{"type": "reasoning_text", "text": part["text"]} for part in content]
    return {"type": "reasoning", "summary": [], "content": parts} | _optional(value, ("id",), path)


def _optional(value: Json, keys: tuple[str, ...], path: str) -> Json:
    return {key: text_in(value, key, path) for key in keys if key in value}


READERS: dict[str, tuple[set[str], Callable[[Json, str], Json]]] = {
    "message": (MESSAGE_FIELDS, _read_message),
    "function_call": (CALL_FIELDS, _read_call),
    "custom_tool_call": (CUSTOM_FIELDS, _read_call),
    "local_shell_call": (SHELL_FIELDS, _read_shell_call),
    **dict.fromkeys(OUTPUTS, (OUTPUT_FIELDS, _read_output)),
    "reasoning": (REASONING_FIELDS, _read_reasoning),
    "item_reference": (REFERENCE_FIELDS, _read_reference),
}


def with_ids(items: list[Json], response_id: str) -> list[Json]:
    """The items of a response's own input, each with an id."""
    key = response_id.rpartition("_")[2]
    return [
        {"id": f"{PREFIXES.get(item['type'], 'item')}_{key}_in{index}", "status": "completed", **item}
        for index, item in enumerate(items)
    ]


def messages_of(items: list[Json]) -> tuple[list[Json], list[int]]:
    """The messages of a chat that these items are, and of each the number of the item at which it
    begins.

    What the assistant thought, said and called in one go is one message.
    """
    messages: list[Json] = []
    begins: list[int] = []
    for number, item in enumerate(items):
        if item["type"] in FOREIGN or (item["type"] == "reasoning" and not item["content"]):
            continue
        if item["type"] in OUTPUTS:
            message = {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}
        elif item["type"] == "message" and item["role"] != "assistant":
            message = {"role": item["role"], "content": content_of(item["content"])}
        elif messages and messages[-1]["role"] == "assistant" and not _has(item, messages[-1]):
            _extend(messages[-1], item)
            continue
        else:
            message = {"role": "assistant", "content": ""}
            _extend(message, item)
        messages.append(message)
        begins.append(number)
    return messages, begins


def _has(item: Json, message: Json) -> bool:
    """Whether an assistant's message must end before this item of the assistant's: it thinks again,
    or says more."""
    if item["type"] in CALLS:
        return False
    thinks_again = item["type"] == "reasoning" and "reasoning_content" in message
    return bool(message["content"] or "tool_calls" in message or thinks_again)


def _extend(message: Json, item: Json) -> None:
    if item["type"] in CALLS:
        message.setdefault("tool_calls", []).append({"id": item["call_id"], **_called(item)})
    elif item["type"] == "reasoning":
        message["reasoning_content"] = "".join(part["text"] for part in item["content"])
    else:
        message["content"] = text_of(item)


def _called(item: Json) -> Json:
    """A call as one of the chat's."""
    if item["type"] == "local_shell_call":
        return {
            "type": "function",
            "function": {"name": "local_shell", "arguments": orjson.dumps(item["action"]).decode()},
        }
    name = chat_name(item["name"], item.get("namespace"))
    if item["type"] == "custom_tool_call":
        return {"type": "custom", "custom": {"name": name, "input": item["input"]}}
    return {"type": "function", "function": {"name": name, "arguments": item["arguments"]}}


def content_of(parts: list[Json]) -> str | list[Json]:
    """A chat's content of parts; where there are texts only, one text."""
    if not any(part["type"] == "input_image" for part in parts):
        return "".join(part["text"] for part in parts)
    return [part if part["type"] == "input_image" else {"type": "text", "text": part["text"]} for part in parts]


def text_of(item: Json) -> str:
    return "".join(part.get("text", part.get("refusal", "")) for part in item["content"])
