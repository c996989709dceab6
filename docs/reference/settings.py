"""The page of settings: flags, defaults and bounds as shared/process/settings.py has them."""

import re
import types
import typing
from pathlib import Path
from typing import Any, Literal

import annotated_types
from pydantic import ByteSize, SecretStr
from pydantic.fields import FieldInfo

from docs.reference.markdown import HEAD, code, paragraph, sentence, table
from shared.process import settings
from shared.process.stage_settings import StageSettings

INTRODUCTION = """A flag is also an environment variable: `--max-num-seqs` is `PENSTOCK_MAX_NUM_SEQS`. A flag
overrides the variable. `penstock up` and
`penstock serve STAGE` take the flags below; each section says which of them. A size is a number of bytes, or a
number with a unit: `4GiB`, `512MB`. A
switch has two flags: `--prefix-caching` and `--no-prefix-caching`."""

OTHERS = """Some variables have no flag. `PENSTOCK_KERNELS` names the instruction set of the native kernels
([kernels](../understand/kernels.md)).
`OTEL_EXPORTER_OTLP_ENDPOINT` and OpenTelemetry's other variables turn traces on ([observe](../operate/observe.md)).
`TRITON_CACHE_DIR` is the folder of
compiled kernels for GPUs."""


def page() -> str:
    parts = ["# Settings\n", HEAD, paragraph(INTRODUCTION), "\n", paragraph(OTHERS)]
    for group in groups(StageSettings):
        own = {
            name: field
            for name, field in group.model_fields.items()
            if name in vars(group).get("__annotations__", {}) and name not in ("command", "examples")
        }
        if own:
            takers = [each.command for each in commands() if issubclass(each, group)]
            text = sentence((group.__doc__ or "").strip())
            whose = "every command" if len(takers) == len(commands()) else ", ".join(code(taker) for taker in takers)
            parts += [f"\n## {title(group)}\n\n", paragraph(f"{text} Taken by {whose}."), "\n", fields(own)]
    return "".join(parts)


def commands() -> list[type[StageSettings]]:
    """The classes that a command takes as they are."""
    return [group for group in groups(StageSettings) if "command" in vars(group) and group is not StageSettings]


def groups(group: type[StageSettings]) -> list[type[StageSettings]]:
    """The classes of settings in the order of their definition, each once."""
    found = [group]
    for child in group.__subclasses__():
        found += [each for each in groups(child) if each not in found]
    return sorted(dict.fromkeys(found), key=place_of)


def place_of(group: type[StageSettings]) -> int:
    """Where its section stands: in the order of shared/process/settings.py, and a class of another
    file before the first that takes it."""
    known = [each for each in vars(settings).values() if isinstance(each, type) and issubclass(each, StageSettings)]
    own = [
        2 * number
        for number, each in enumerate(known)
        if each.__module__ == settings.__name__ and issubclass(each, group)
    ]
    return own[0] - (group.__module__ != settings.__name__)


def title(group: type[StageSettings]) -> str:
    """GatewaySettings: Gateway."""
    return re.sub(r"Settings$", "", group.__name__)


def fields(own: dict[str, FieldInfo]) -> str:
    rows = [
        [code(f"--{name.replace('_', '-')}"), default_of(field), bounds_of(field), sentence(field.description or "")]
        for name, field in own.items()
    ]
    return table(["flag", "default", "values", "what it does"], rows)


def default_of(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is None or value in ("", []):
        return ""
    if isinstance(value, ByteSize):
        return code(value.human_readable().replace(".0", ""))
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return code(f"{value:g}")
    return code(str(value).replace(str(Path.home()), "~"))


def bounds_of(field: FieldInfo) -> str:
    """The values that the field takes, in words."""
    kind = field.annotation
    choices = [each for part in arms(kind) if typing.get_origin(part) is Literal for each in typing.get_args(part)]
    if choices:
        return ", ".join(code(str(each)) for each in choices)
    said = bounds(field.metadata)
    names = {
        bool: "switch",
        int: "whole number",
        float: "number",
        ByteSize: "size",
        Path: "path",
        str: "text",
        SecretStr: "text",
    }
    found = next(
        (names[part] for part in arms(kind) if part in names),
        "several texts" if list in [typing.get_origin(part) or part for part in arms(kind)] else "",
    )
    return ", ".join(each for each in (found, said) if each)


def arms(kind: Any) -> list[Any]:
    """The members of a union, without None; else the type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [each for each in typing.get_args(kind) if each is not type(None)]
    return [kind]


def bounds(metadata: typing.Iterable[Any]) -> str:
    """Pydantic's constraints in words: from 1 to 8, above 0, …"""
    said = []
    for each in metadata:
        match each:
            case annotated_types.Ge(ge=low):
                said.append(f"from {low:,}")
            case annotated_types.Gt(gt=low):
                said.append(f"above {low:,}")
            case annotated_types.Le(le=high):
                said.append(f"to {high:,}")
            case annotated_types.Lt(lt=high):
                said.append(f"below {high:,}")
            case annotated_types.MultipleOf(multiple_of=unit):
                said.append(f"a multiple of {unit}")
            case annotated_types.MinLen(min_length=low) if low > 1:
                said.append(f"at least {low:,} long")
            case annotated_types.MaxLen(max_length=high):
                said.append(f"at most {high:,} long")
            case _ if getattr(each, "pattern", None):
                said.append(f"matches `{each.pattern}`")
    return " ".join(said)
