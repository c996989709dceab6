"""Errors, in three kinds. The `except` clauses of a service loop are its whole failure policy.

PenstockError
├── Rejected      come again: the server is full or a stage is missing (429, 503, with Retry-After)
├── Invalid       never valid: the request or the message is wrong (400, or the dead-letter stream)
├── Recoverable   try again: Redis is away, a replica has gone
├── Lost          Redis does not hold any more what it held: the request ends with a clear error
└── StartupError  this process can't run as configured: one line, exit code 2
    └── Unready   the same, but another start may go well: exit code 1
"""

import re

# The operating system's number and path, and Redis' address, around an error's words
NUMBER = re.compile(r"^(\w+: )?\[Errno -?\d+\] |^Error -?\d+ connecting to \S+ ")
PATHS = re.compile(r": '[^']*'( -> '[^']*')?$")


def words_of(error: BaseException) -> str:
    """Say what went wrong, in one line of words: without the number, and without the path, which the
    sentence around it names. Behind a colon the next line belongs to it."""
    text, *others = str(error).strip().splitlines() or [""]
    while text.endswith(":") and others:
        text = f"{text} {others.pop(0).strip()}"
    return (PATHS.sub("", NUMBER.sub("", text)) if NUMBER.match(text) else text) or type(error).__name__


class PenstockError(Exception):
    """The root of the tree."""


class Rejected(PenstockError):
    """The request is fine, the moment is not."""

    def __init__(self, message: str, *, status: int, retry_after_s: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.code = code or ("server_full" if status == 429 else "stage_missing")


class Invalid(PenstockError):
    """Input that can't be right, however often it is sent. `param` names the field of the API at
    fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class Recoverable(PenstockError):
    """A failure after which the same call may succeed later."""


class Lost(PenstockError):
    """A token log with a gap, or one that can't be read: continuing would mean other tokens."""


class StartupError(PenstockError):
    """The process can't start: a missing model, an unreachable Redis, a setting out of range."""

    exit_code = 2


class Unready(StartupError):
    """The process can't start yet: others that it needs are not there."""

    exit_code = 1
