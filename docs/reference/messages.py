"""The page of messages, streams and keys: shared/wire/messages.py and shared/wire/streams.py, as tables."""

import ast
import inspect
import re
from typing import Any

from docs.reference.markdown import HEAD, code, paragraph, sentence, table
from shared.model.wire_struct import WireStruct
from shared.wire import messages, streams
from shared.wire.messages import TAGS
from shared.wire.streams import DirectStream, GroupStream

INTRODUCTION = """[The protocol](../understand/protocol.md) says how the stages use these. A message is a msgpack
array `[tag, version, field, …]`, with the
fields in this order. Types are Python's; arrays (`Int32Array` and the like) are raw little-endian bytes.
A field with a default may be missing in an older message."""

STREAMS = """An entry of a *group* stream goes to one replica of the named stage, and stays pending until its work
is done. A *direct* stream has
one reader, which trims it."""

KEYS = "A name in angle brackets is filled in. The arrow goes from the stages that write the key to those that read it."


def page() -> str:
    parts = ["# Messages, streams and keys\n\n", HEAD, paragraph(INTRODUCTION)]
    parts += [
        "\n## Streams\n\n",
        paragraph(STREAMS),
        "\n",
        table(["key", "kind", "message", "from → to"], stream_rows()),
    ]
    parts += ["\n## Keys\n\n", paragraph(KEYS), "\n", table(["key", "what"], key_rows())]
    for kind in message_types():
        tag = f"Tag `{TAGS[kind][0]}`, version {TAGS[kind][1]}. " if kind in TAGS else ""
        parts += [
            f"\n## {kind.__name__}\n\n",
            paragraph(tag + (kind.__doc__ or "")),
            "\n",
            table(["field", "type", "default", "what it is"], field_rows(kind)),
        ]
    return "".join(parts)


def stream_rows() -> list[list[str]]:
    rows = []
    for name, value in vars(streams).items():
        text = comment_of(name) if isinstance(value, DirectStream) else inspect.getdoc(value) or ""
        stream = value if isinstance(value, DirectStream) else made(value) if is_key_maker(value) else None
        if isinstance(stream, GroupStream | DirectStream):
            kind = f"group `{stream.group}`" if isinstance(stream, GroupStream) else "direct"
            rows.append(
                [
                    code(stream.key),
                    kind,
                    f"[{stream.message_type.__name__}](#{stream.message_type.__name__.lower()})",
                    sentence(text),
                ]
            )
    return rows


def key_rows() -> list[list[str]]:
    rows = [
        [code(value), sentence(comment_of(name))]
        for name, value in vars(streams).items()
        if name.isupper() and isinstance(value, str)
    ]
    for name, value in vars(streams).items():
        if is_key_maker(value) and name.endswith("_key"):
            rows.append([code(made(value)), inspect.getdoc(value) or ""])
    return rows


def is_key_maker(value: Any) -> bool:
    return inspect.isfunction(value) and value.__module__ == streams.__name__


def made(function: Any) -> Any:
    """The key that a function of streams.py makes, with its arguments' names in angle brackets."""
    names = [f"<{re.sub('_id$', '', name)}>" for name in inspect.signature(function).parameters]
    return function(*names)


def comment_of(name: str) -> str:
    """The comment behind a constant of streams.py, else the comment lines directly above it."""
    found = re.search(rf"((?:^#.*\n)*)^{name}\b[^#\n]*(?:#\s*(.*))?$", inspect.getsource(streams), re.MULTILINE)
    return (found[2] or " ".join(re.findall(r"^#\s*(.*)$", found[1], re.MULTILINE))) if found else ""


def message_types() -> list[type]:
    """The messages in the order of their definition, with the objects that stand in them."""
    own = [
        each
        for each in vars(messages).values()
        if inspect.isclass(each) and issubclass(each, WireStruct) and each is not WireStruct
    ]
    return sorted(own, key=lambda each: each not in TAGS)


def field_rows(kind: type) -> list[list[str]]:
    source = inspect.getsource(kind)
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    rows = []
    for each in body.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            default = (
                ""
                if each.value is None
                else "empty"
                if "default_factory" in ast.unparse(each.value)
                else ast.unparse(each.value)
            )
            rows.append(
                [
                    code(each.target.id),
                    code(ast.unparse(each.annotation)),
                    default if default == "empty" else code(default),
                    sentence(field_comment(lines, each)),
                ]
            )
    return rows


def field_comment(lines: list[str], field: ast.AnnAssign) -> str:
    """The comment behind a field, else the comment lines directly above it."""
    behind = lines[(field.end_lineno or field.lineno) - 1][field.end_col_offset or 0 :].partition("#")[2].strip()
    above: list[str] = []
    for line in reversed(lines[: field.lineno - 1]):
        if not line.lstrip().startswith("#"):
            break
        above.insert(0, line.strip().lstrip("# "))
    return behind or " ".join(above)
