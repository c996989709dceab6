"""Which pages may use the gateway. A gateway without keys is reached by every page of the browsers
on its machine: that they can't read the answer does not keep them from asking.

By default these may, because no page of the web has such an origin:

- desktop applications that are pages, whose schemes no browser loads from the web. Whoever can put
  such an application on a machine can run a program there, which may ask anyway
- pages of other ports of the user's machine, where a key is needed, or only this machine's programs
  reach the gateway

Extensions of browsers are not among them: with the right to this address, they are marked `none`.
"""

import re

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.auth import is_public
from services.gateway.http.errors import error_response
from services.gateway.http.middleware import RequestLayer
from shared.process.settings import GatewaySettings, is_loopback

OF_APPLICATIONS = r"(?:app|capacitor|ionic|tauri|vscode-file|vscode-webview)://[^/]*|https?://tauri\.localhost"
OF_THIS_MACHINE = r"https?://(?:localhost|127\.\d+\.\d+\.\d+|\[::1\])(?::\d+)?"


class Origins(CORSMiddleware):
    """Starlette's answers to browsers, which allow this machine's network to refused origins, too."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if "access-control-allow-origin" not in response.headers:
            del response.headers["access-control-allow-private-network"]
        return response


def let_in_by_default(settings: GatewaySettings, *, has_keys: bool) -> str:
    """The origins, as a regular expression."""
    return f"{OF_APPLICATIONS}|{OF_THIS_MACHINE}" if has_keys or is_loopback(settings.host) else OF_APPLICATIONS


class SameOrigin(RequestLayer):
    """403 for what a page of another origin sends, unless it is let in by default, or the operator
    named its origin.

    Programs send neither header. A browser says `none` of what its user, or an extension with the
    right to, began.
    """

    def __init__(self, app: ASGIApp, named: list[str], by_default: str) -> None:
        super().__init__(app)
        self.named = frozenset(named)
        self.by_default = re.compile(by_default)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["method"] in ("GET", "HEAD") and is_public(scope["path"])
        if is_open or self.lets_in(Headers(scope=scope), scope["scheme"]):
            return await self.app(scope, receive, send)
        message = (
            "A page of another origin may not use this gateway: start it with --allow-origin and the page's origin."
        )
        await error_response(scope, 403, message, None, "origin_not_allowed")(scope, receive, send)

    def lets_in(self, headers: Headers, scheme: str) -> bool:
        """scheme: that of the connection. A proxy that ends TLS says the client's in a header that
        no page can send without asking first."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if "*" in self.named or origin in self.named or site in ("same-origin", "none"):
            return True
        if origin is None:
            return site is None
        scheme = headers.get("x-forwarded-proto", scheme).partition(",")[0].strip()
        return origin == f"{scheme}://{headers.get('host', '')}" or self.by_default.fullmatch(origin) is not None
