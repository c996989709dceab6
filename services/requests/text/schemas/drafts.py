"""The drafts of JSON Schema: which one a schema names, and what that changes."""

from typing import Any

from jsonschema_specifications import REGISTRY
from referencing.jsonschema import DRAFT202012, specification_with

SIBLINGS_COUNT = ("2019-09", "2020-12")  # drafts in which the siblings of $ref say something


def uri_of(schema: Any) -> str:
    value = schema.get("$schema") if isinstance(schema, dict) else None
    return value if isinstance(value, str) else ""


def ignores_siblings(schema: Any) -> bool:
    """Whether keywords beside a $ref have no effect."""
    return bool(uri_of(schema)) and not any(each in uri_of(schema) for each in SIBLINGS_COUNT)


def specification_of(schema: Any) -> Any:
    """The specification of the draft that the schema names; by default the newest."""
    uri = uri_of(schema)
    return specification_with(uri if uri.endswith(("#", "schema#")) or "20" in uri else f"{uri}#", default=DRAFT202012)


def resolver_of(schema: Any) -> Any:
    """A registry that finds the targets of references in the schema, and the metaschemas."""
    resource = specification_of(schema).create_resource(schema)
    registry = REGISTRY.with_resource("", resource)
    try:
        return registry.resolver_with_root(resource)
    except Exception:  # an $id that is no URI
        return registry.resolver()
