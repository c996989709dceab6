"""Whose a request is."""

from fastapi import Request


def owner_of(request: Request) -> str:
    """The tenant whose key the request carries; without keys, everything is one owner's."""
    return str(request.scope.get("state", {}).get("tenant", ""))
