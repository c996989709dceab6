"""Errors of one request alone, as its client is told."""

from shared.process.errors import Invalid
from shared.wire.messages import RequestError


def error_of(error: BaseException) -> RequestError:
    """A request's own mistake by its status and field; anything else is ours (500)."""
    if isinstance(error, Invalid):
        return RequestError(str(error), error.status, error.param, error.code)
    return RequestError(str(error) or repr(error))
