"""The page of the API's fields: each body that a client may send, as the gateway's schemas have it."""

import math
from typing import Any

from fastapi import FastAPI
from pydantic.fields import FieldInfo

from docs.reference.markdown import HEAD, code, paragraph, sentence, table
from docs.reference.settings import bounds
from services.gateway.app import add_routes
from services.gateway.bodies import BODIES
from services.gateway.http.docs import REF
from services.requests.bodies.body import ANYTHING, Body
from services.requests.dialects.llamacpp.schemas import DEFAULTS as LLAMA_DEFAULTS
from services.requests.dialects.llamacpp.schemas import LlamaBody
from services.requests.dialects.openai.schemas import ChatCompletionBody
from shared.model.sampling_params import Parameter

INTRODUCTION = """Each section is a JSON object: a body, with the endpoints that take it, or an object that stands
in one. A field without a default may be
left out, unless it is required. Where a model's makers say defaults for sampling, theirs go before those given here
([sampling](../use/sampling.md)),
except in the bodies of llama.cpp's API."""

FATES = """An object may have other fields. Those under *Taken* change nothing here, with the values in brackets.
Those under *Refused* would change the
answer, and are not supported: 400, `unknown_parameter`. All others are passed over, and the header
`X-Penstock-Ignored` names them
([what becomes of a field](../use/requests.md#what-becomes-of-a-field))."""

JSON_NAMES = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean", "object": "object"}
LARGE = 1e6  # bounds from here on are beyond any model


def page() -> str:
    app = FastAPI()
    add_routes(app)
    parts = [
        "# Fields of the API\n\n",
        HEAD,
        paragraph(INTRODUCTION),
        "\n",
        paragraph(FATES),
        "\n## Endpoints\n\n",
        paths_of(app),
    ]
    shown: set[type[Body]] = set()
    for body in BODIES:
        for each in (body, *inner_bodies(body)):
            if each not in shown:
                parts += section(each)
                shown.add(each)
    return "".join(parts)


def paths_of(app: FastAPI) -> str:
    """Every route, with the body that it takes."""
    rows = []
    for path, methods in app.openapi()["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            schema = content.get("schema", {})
            bodies = [
                each["$ref"].removeprefix(REF.format(model=""))
                for each in schema.get("oneOf", [schema])
                if "$ref" in each
            ]
            rows.append(
                [code(f"{method.upper()} {path}"), " or ".join(f"[{body}](#{body.lower()})" for body in bodies)]
            )
    return table(["endpoint", "body"], rows)


def section(body: type[Body]) -> list[str]:
    parts = [f"\n## {body.__name__}\n\n"]
    if "__doc__" in vars(body) and body.__doc__:
        parts += [paragraph(sentence(body.__doc__.strip())), "\n"]
    parts.append(
        table(["field", "type", "default", "bounds", "what it does"], [row(body, name) for name in body.model_fields])
    )
    others = {name: each for name, each in sorted(body.neutral.items()) if name not in body.model_fields}
    taken = [code(name) + values(each) for name, each in others.items() if each]
    refused = [code(name) for name, each in others.items() if each is not ANYTHING]
    parts += ["\n", paragraph(f"*Taken*: {', '.join(taken)}.")] if taken else []
    parts += ["\n", paragraph(f"*Refused*, with any other value: {', '.join(refused)}.")] if refused else []
    return parts


def row(body: type[Body], name: str) -> list[str]:
    field = body.model_fields[name]
    default = (
        "required" if field.is_required() else default_text(body, name, field.get_default(call_default_factory=True))
    )
    return [code(name), type_text(body, name), default, bounds_text(body, name), sentence(field.description or "")]


def declared(body: type[Body], name: str) -> Parameter | None:
    """The sampling parameter that a field is."""
    also = (each for each in body.sampling_parameters.values() if each.also == name)
    return body.sampling_parameters.get(name) or next(also, None)


def of_chat(found: Parameter | None, name: str) -> FieldInfo:
    """A chat's field of the same name, to which an API passes it on; without bounds if there is none."""
    return ChatCompletionBody.model_fields.get(found.name if found is not None else name, FieldInfo())


def default_text(body: type[Body], name: str, value: Any) -> str:
    """The schema's default; of a sampling parameter that the schema leaves open, its API's own, else the sampler's."""
    found = declared(body, name)
    if value is None and found is not None and name in body.sampling_parameters and found.name != "seed":
        own = LLAMA_DEFAULTS if issubclass(body, LlamaBody) else {}
        value = own.get(name, found.default)
    if value is None or value in ("", [], {}, ()):
        return ""
    if isinstance(value, tuple):
        return ", ".join(code(repr(each)[1:-1]) for each in value)
    return code(spelled(value))


def spelled(value: Any) -> str:
    """As JSON spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def bounds_text(body: type[Body], name: str) -> str:
    """The schema's bounds; of a sampling parameter that the schema leaves open, the sampler's."""
    found = declared(body, name)
    metadata = body.model_fields[name].metadata or of_chat(found, name).metadata
    is_flag = body.model_fields[name].annotation in (bool, bool | None)
    if (own := bounds(metadata)) or found is None or found.accepted is None or is_flag:
        return own
    low, high = found.accepted
    limits = [f"from {low:g}"] * (low > -math.inf) + [f"to {high:g}"] * (high < LARGE)
    return " ".join(limits)


def type_text(body: type[Body], name: str) -> str:
    """JSON's name of the type, or the values that there are."""
    found = declared(body, name)
    if found is not None and body.model_fields[name].annotation is Any:  # an API that passes it on to a chat
        body, name = ChatCompletionBody, found.name
    schema = body.model_json_schema(mode="validation")["properties"][name]
    return ", ".join(dict.fromkeys(names_of(schema)))


def names_of(schema: dict[str, Any]) -> list[str]:
    if "$ref" in schema:
        return [code(schema["$ref"].rpartition("/")[2])]
    if "enum" in schema or "const" in schema:
        return [code(str(each)) for each in schema.get("enum", [schema.get("const")])]
    if arms := schema.get("anyOf") or schema.get("oneOf"):
        return [name for arm in arms if arm.get("type") != "null" for name in names_of(arm)]
    if schema.get("type") == "array":
        items = names_of(schema.get("items", {}))
        return ["list" if items == ["any"] else f"list of {' or '.join(dict.fromkeys(items))}"]
    return [JSON_NAMES.get(schema.get("type", ""), "any")]


def inner_bodies(body: type[Body]) -> list[type[Body]]:
    """The objects that stand in a body's fields, and in theirs."""
    found: list[type[Body]] = []
    for field in body.model_fields.values():
        for inner in bodies_in(field.annotation):
            found += [each for each in (inner, *inner_bodies(inner)) if each not in found]
    return found


def bodies_in(kind: Any) -> list[type[Body]]:
    """The bodies that a type's annotation names."""
    if isinstance(kind, type) and issubclass(kind, Body):
        return [kind]
    return [each for part in getattr(kind, "__args__", ()) for each in bodies_in(part)]


def values(allowed: tuple[Any, ...]) -> str:
    """The values of a field that ask for nothing, in brackets; empty if all do."""
    return "" if allowed is ANYTHING else f" ({', '.join(code(spelled(each)) for each in allowed)})"
