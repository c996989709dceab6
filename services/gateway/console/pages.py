"""The playground's files, as they are, and the headers that hold its pages to them: what a model
writes may be hostile, and must not run or call home."""

import math
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from shared.model.sampling_params import PARAMETERS, Parameter

FOLDER = Path(__file__).with_name("playground")

# Trusted types: the browser refuses innerHTML and its like in any script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri "
    "'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again by their ETags: a page and its modules are of one version
}


class Pages(StaticFiles):
    """Files with HEADERS."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def add_playground(app: FastAPI) -> None:
    """`/` is the page, its files are below `/playground/`; one of them is written from the sampling
    parameters' declarations."""
    app.add_api_route("/", index, include_in_schema=False)
    app.add_api_route("/playground/modules/sampling.js", sampling_module, include_in_schema=False)
    app.mount("/playground", Pages(directory=FOLDER))


async def index() -> FileResponse:
    """The playground."""
    return FileResponse(FOLDER / "index.html", headers=HEADERS)


async def sampling_module() -> Response:
    """The sampling parameters that the playground's settings have, as a module of the page."""
    fields = [setting_of(parameter) for parameter in PARAMETERS if parameter.control is not None]
    return Response(
        b"export const SAMPLING = " + orjson.dumps(fields) + b";\n", media_type="text/javascript", headers=HEADERS
    )


def setting_of(parameter: Parameter) -> dict[str, Any]:
    """A field of the playground's settings, as parameters.js describes its own."""
    control = parameter.control
    assert control is not None
    kinds = {float: "number", int: "integer", bool: "flag", tuple[str, ...]: "lines"}
    setting = {
        "name": parameter.name,
        "label": control.label,
        "hint": control.hint,
        "section": control.section,
        "kind": "json" if control.is_json else kinds.get(parameter.value_type, "json"),
        "fallback": parameter.default if isinstance(parameter.default, int | float) else None,
    }
    lowest, highest = parameter.accepted or (-math.inf, math.inf)
    setting |= {name: bound for name, bound in (("least", lowest), ("most", highest)) if math.isfinite(bound)}
    if control.slider is not None:
        setting |= dict(zip(("min", "max", "step"), control.slider, strict=True))
    return setting
