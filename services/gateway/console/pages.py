"""The playground's files, as they are, and the headers that hold its pages to them: what a model
writes may be hostile, and must not run or call home."""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).with_name("playground")

# Trusted types: the browser refuses innerHTML and its like, whoever writes it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
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
    """`/` is the page, its files are below `/playground/`."""
    app.add_api_route("/", index, include_in_schema=False)
    app.mount("/playground", Pages(directory=FOLDER))


async def index() -> FileResponse:
    """The playground."""
    return FileResponse(FOLDER / "index.html", headers=HEADERS)
