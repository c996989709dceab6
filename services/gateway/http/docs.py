"""The bodies in the API's description: routes read them themselves, so FastAPI does not see
them."""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from services.requests.bodies.body import Body

REF = "#/components/schemas/{model}"


def takes(*kinds: type[Body]) -> dict[str, Any]:
    """A route's `openapi_extra`: its body, which is one of these."""
    [schema, *others] = [{"$ref": REF.format(model=kind.__name__)} for kind in kinds]
    either = {"oneOf": [schema, *others]} if others else schema
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": either}}}}


def describe_bodies(app: FastAPI, bodies: Iterable[type[Body]]) -> None:
    """Add the bodies' schemas to what /docs and /openapi.json show."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, schemas = models_json_schema([(model, "validation") for model in bodies], ref_template=REF)
            make().setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it
