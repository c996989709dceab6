"""Objects without properties that their schema does not name."""

from typing import Any

MAX_DEPTH = 64
COMPOSED = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties", "dependencies", "dependentRequired",
    "dependentSchemas", "allOf", "anyOf", "oneOf", "not", "$ref", "$dynamicRef", "if",
}  # fmt: skip


def closed(schema: dict[str, Any], levels: int = MAX_DEPTH) -> dict[str, Any]:
    """The schema without properties that it does not name: one that does not say takes any, but
    whoever lists them means these, and a model may go on for ever.

    Where schemas are put together (allOf, $ref and the like), one of them can't say so alone: they
    stay as they are. So does what lies deeper than the levels.
    """
    made, properties, required = dict(schema), schema.get("properties"), schema.get("required", [])
    if isinstance(properties, dict) and isinstance(required, list) and set(map(str, required)) <= properties.keys() and not COMPOSED & schema.keys():
        made["properties"] = {name: closed(each, levels - 1) if isinstance(each, dict) and levels else each for name, each in properties.items()}
        made["additionalProperties"] = False
    if isinstance(schema.get("items"), dict) and levels:
        made["items"] = closed(schema["items"], levels - 1)
    return made
