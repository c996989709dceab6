"""Ignored: what a request asked for and did not get, named in one header of its answer,
X-Penstock-Ignored. With --strict-fields it is refused instead.

The names are collected where they are found, however deep: `pass_over` adds to the innermost
`collecting`. The outermost one is the request's, made by the middleware here, which writes the
header; what is found after the answer has begun is in no header. Plain ASGI, so that streams pass
untouched.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from shared.process.errors import Invalid

HEADER = "X-Penstock-Ignored"
MAX_NAMES = 32  # of one request; it may have a million
MAX_NAME = 64  # characters
MAX_REFUSED = 8  # names in one error
UNSAFE = re.compile(
    r"[^ -+\--~]"
)  # what is not printable ASCII, and the comma; a space stands between a schema and its keyword


@dataclass(slots=True)
class Names:
    """Names of fields that were passed over, in the order in which they were found."""

    is_strict: bool = False
    names: dict[str, None] = field(default_factory=dict)  # one more than are told: there are more
    are_below: bool = False  # an object in this one has names of its own

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def add(self, name: str) -> None:
        if len(self.names) <= MAX_NAMES:
            self.names[name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."] = None

    def header(self) -> str:
        """ASCII, and less than 4 kB."""
        named = [UNSAFE.sub("?", name) for name in self.names]
        return ", ".join(named if len(named) <= MAX_NAMES else [*named[:MAX_NAMES], "..."])


COLLECTED: ContextVar[Names | None] = ContextVar("ignored", default=None)


def tell(*names: str) -> None:
    """Name what is not done as it was asked, by its path in the body:
    messages[0].content[1].cache_control."""
    if (collected := COLLECTED.get()) is not None:
        for name in names:
            collected.add(name)


def tell_below() -> None:
    """Say that an object in the present one has names of its own."""
    if (collected := COLLECTED.get()) is not None:
        collected.are_below = True


def pass_over(*names: str) -> None:
    """Name fields that are passed over. Raises Invalid with --strict-fields."""
    collected = COLLECTED.get()
    if names and collected is not None and collected.is_strict:
        raise refusal(names)
    tell(*names)


def tell_others(value: Mapping[str, Any], known: Container[str], path: str) -> None:
    """Name the fields of an object that are none of those known. A package sends back every field
    that it knows, null where nothing was said."""
    tell(
        *islice(
            (f"{path}.{key[:MAX_NAME]}" for key, each in value.items() if key not in known and each is not None),
            MAX_NAMES + 1,
        )
    )


def refusal(names: Iterable[str]) -> Invalid:
    named = [name[:MAX_NAME] for name in names][:MAX_REFUSED]
    return Invalid(
        "; ".join(f"unknown or unsupported field: {name}" for name in named), param=named[0], code="unknown_parameter"
    )


@contextmanager
def collecting(*, is_strict: bool = False) -> Iterator[Names]:
    """Collect the names that are passed over inside."""
    names = Names(is_strict)
    token = COLLECTED.set(names)
    try:
        yield names
    finally:
        COLLECTED.reset(token)


@contextmanager
def renamed(rename: Callable[[str], str]) -> Iterator[None]:
    """Rename what is passed over inside. Raises Invalid, as pass_over does."""
    with collecting() as names:
        yield
    pass_over(*map(rename, names))
