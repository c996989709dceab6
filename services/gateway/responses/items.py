"""The items of a response's input and output, and the chat messages that they are for the model.

An item is kept as a client may send it and read it again: a message with parts, a function call, its output, or a reasoning. Each is checked in time
linear in its length, and the first that is wrong is named.
"""

from typing import Any

from services.gateway.ignored import tell_others
from services.gateway.openai.fields import MAX_PARTS, at, kind_of, shortened

Json = dict[str, Any]

MAX_ITEMS = 4096
ROLES = ("user", "assistant", "system", "developer")
PART_OF = {"user": "input_text", "system": "input_text", "developer": "input_text", "assistant": "output_text"}
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
# Of what we send in items, the fields that say nothing to the model
MESSAGE_FIELDS = {"type", "id", "role", "content", "status", "phase"}
CALL_FIELDS = {"type", "id", "call_id", "name", "arguments", "status", "namespace", "caller", "async", "parsed_arguments"}
OUTPUT_FIELDS = {"type", "id", "call_id", "output", "status", "name"}
REASONING_FIELDS = {"type", "id", "summary", "content", "encrypted_content", "status"}
REFERENCE_FIELDS = {"type", "id"}

INPUT_SCHEMA = {
    "description": "a text, or items: messages, function calls, their outputs, reasoning, references to items of stored responses",
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
    if kind == "message":
        tell_others(value, MESSAGE_FIELDS, f"input{path}")
        return _read_message(value, path)
    if kind == "function_call":
        tell_others(value, CALL_FIELDS, f"input{path}")
        return {key: _text(value, key, path) for key in ("type", "call_id", "name", "arguments")} | _ids(value, path)
    if kind == "function_call_output":
        tell_others(value, OUTPUT_FIELDS, f"input{path}")
        output = value.get("output")
        text = (
            "".join(part["text"] for part in _read_parts(output, "input_text", f"{path}.output")) if isinstance(output, list) else _text(value, "output", path)
        )
        return {"type": kind, "call_id": _text(value, "call_id", path), "output": text} | _ids(value, path)
    if kind == "reasoning":
        tell_others(value, REASONING_FIELDS, f"input{path}")
        return _read_reasoning(value, path)
    if kind == "item_reference":
        tell_others(value, REFERENCE_FIELDS, f"input{path}")
        return {"type": kind, "id": _text(value, "id", path)}
    raise at(f"{path}.type", f"only message, function_call, function_call_output, reasoning and item_reference are understood, got {shortened(kind)}")


def _read_message(value: Json, path: str) -> Json:
    role = value.get("role")
    if role not in ROLES:
        raise at(f"{path}.role", f"expected one of {', '.join(ROLES)}, got {shortened(role)}")
    content = value.get("content")
    parts = [{"type": PART_OF[role], "text": content}] if isinstance(content, str) else _read_parts(content, PART_OF[role], f"{path}.content")
    if role == "assistant":
        parts = [part if part["type"] == "refusal" else part | {"annotations": []} for part in parts]
    return {"type": "message", "role": role, "content": parts} | _ids(value, path)


def _read_parts(value: Any, kind: str, path: str) -> list[Json]:
    """Parts of text, as parts of one kind; a refusal stays one."""
    if not isinstance(value, list):
        raise at(path, f"expected a text or a list of parts, got {kind_of(value)}")
    if len(value) > MAX_PARTS:
        raise at(path, f"at most {MAX_PARTS} parts, got {len(value)}")
    parts = []
    for index, part in enumerate(value):
        own = part.get("type") if isinstance(part, dict) else None
        if own not in TEXT_PARTS:
            raise at(f"{path}[{index}].type", f"only text is understood, got {shortened(own) if isinstance(part, dict) else kind_of(part)}")
        field = "refusal" if own == "refusal" else "text"
        if not isinstance(part.get(field), str):
            raise at(f"{path}[{index}].{field}", f"expected a text, got {kind_of(part.get(field))}")
        parts.append({"type": own if own == "refusal" else kind, field: part[field]})
    return parts


def _read_reasoning(value: Json, path: str) -> Json:
    content = value.get("content", [])
    if not isinstance(content, list) or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        raise at(f"{path}.content", "expected a list of parts of type reasoning_text")
    item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": part["text"]} for part in content]}
    return item | _ids(value, path)


def _ids(value: Json, path: str) -> Json:
    return {"id": _text(value, "id", path)} if "id" in value else {}


def _text(value: Json, key: str, path: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise at(f"{path}.{key}", f"expected a text, got {kind_of(text)}")
    return text


def with_ids(items: list[Json], response_id: str) -> list[Json]:
    """The items of a response's own input, each with an id."""
    key = response_id.rpartition("_")[2]
    prefixes = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
    return [{"id": f"{prefixes[item['type']]}_{key}_in{index}", "status": "completed", **item} for index, item in enumerate(items)]


def messages_of(items: list[Json]) -> tuple[list[Json], list[int]]:
    """The messages of a chat that these items are, and of each the number of the item at which it begins.

    What the assistant thought, said and called in one go is one message.
    """
    messages: list[Json] = []
    begins: list[int] = []
    for number, item in enumerate(items):
        if item["type"] == "reasoning" and not item["content"]:
            continue
        if item["type"] == "function_call_output":
            message = {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}
        elif item["type"] == "message" and item["role"] != "assistant":
            message = {"role": item["role"], "content": text_of(item)}
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
    """Whether an assistant's message must end before this item of the assistant's: it thinks anew, or says more."""
    if item["type"] == "function_call":
        return False
    return bool(message["content"] or "tool_calls" in message or (item["type"] == "reasoning" and "reasoning_content" in message))


def _extend(message: Json, item: Json) -> None:
    if item["type"] == "function_call":
        call = {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
        message.setdefault("tool_calls", []).append(call)
    elif item["type"] == "reasoning":
        message["reasoning_content"] = "".join(part["text"] for part in item["content"])
    else:
        message["content"] = text_of(item)


def text_of(item: Json) -> str:
    return "".join(part.get("text", part.get("refusal", "")) for part in item["content"])
