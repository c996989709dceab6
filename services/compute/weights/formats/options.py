"""The fields of a quantization_config, checked as they are read."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shared.process.errors import StartupError

# a checkpoint's regular expressions are bounded before they run: one such as ([a-z.]+)+! takes for ever
# on a layer's name
NAME = 64  # characters of a layer's name, about: so often an open repeat may be tried
MAX_PATHS = 1 << 26  # of four open repeats and a choice; the true number is far lower


def check_pattern(text: str) -> None:
    """Raises ValueError for what is no regular expression, or may take too long."""
    try:
        re.compile(text)
        paths = _paths(re._parser.parse(text))  # type: ignore[attr-defined]
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    if paths > MAX_PATHS:
        raise ValueError("may take for ever: it repeats what repeats, or has too many repeats and choices")


def _paths(node: Any) -> int:
    """The number of ways, at most, in which a matcher may go through a name. node: of re's own
    parse tree; what is no repeat and no choice is gone through in one."""
    if isinstance(node, re._parser.SubPattern):  # type: ignore[attr-defined]
        node = list(node)
    if isinstance(node, tuple) and len(node) == 2 and str(node[0]).endswith("_REPEAT"):
        minimum, maximum, inner = int(node[1][0]), min(int(node[1][1]), NAME), node[1][2]
        return min(max(1, maximum - minimum + 1) * int(_paths(inner) ** maximum), MAX_PATHS + 1)
    if isinstance(node, tuple) and len(node) == 2 and str(node[0]) == "BRANCH":
        return min(sum(_paths(each) for each in node[1][1]), MAX_PATHS + 1)
    paths = 1
    for each in node if isinstance(node, list | tuple) else ():
        paths = min(paths * _paths(each), MAX_PATHS + 1)
    return paths


LARGEST = 2**31 - 1


class Options:
    """An object of config.json. A field that is missing without a default, of another type, or not
    among what is supported raises StartupError."""

    def __init__(self, values: Mapping[str, Any], where: str = "quantization_config") -> None:
        self.values = values
        self.where = where

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of these names that is there: writers differ in them."""
        name, value = self._first(names, default)
        if type(value) is not int or abs(value) > LARGEST:
            raise self._refuse(name, value, "an integer of 32 bits")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        name, value = self._first((name,), default)
        if not isinstance(value, bool):
            raise self._refuse(name, value, "true or false")
        return value

    def choice(self, names: tuple[str, ...], allowed: tuple[str, ...], default: str | None = None) -> str:
        """The value in lower case."""
        name, value = self._first(names, default)
        if not isinstance(value, str) or value.lower() not in allowed:
            raise self._refuse(name, value, " or ".join(allowed))
        return value.lower()

    def bits(self, *names: str, allowed: tuple[int, ...], default: int | None = None) -> int:
        value = self.integer(*names, default=default)
        if value not in allowed:
            raise self._refuse(names[0], value, " or ".join(map(str, allowed)))
        return value

    def group(self, *names: str, default: int | None = None) -> int | None:
        """Inputs that share a scale; None is a whole row, which files write as -1."""
        value = self.integer(*names, default=default)
        if value == -1:
            return None
        if value < 1:
            raise self._refuse(names[0], value, "a positive integer, or -1 for the whole row")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._refuse(name, value, "a list of strings")
        return tuple(value)

    def integers(self, name: str, count: int) -> tuple[int, ...] | None:
        """A field of that many positive integers, or None where there is no such field."""
        value = self.values.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(type(each) is int and 0 < each <= LARGEST for each in value)
        ):
            raise self._refuse(name, value, f"{count} positive integers")
        return tuple(value)

    def section(self, name: str) -> "Options | None":
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._refuse(name, value, "an object")
        return Options(value, f"{self.where}: {name}")

    def sections(self) -> Iterator[tuple[str, "Options"]]:
        for name in self.values:
            section = self.section(name)
            if section is not None:
                yield name, section

    def pattern(self, text: str) -> str:
        """A regular expression that compiles, and ends soon."""
        try:
            check_pattern(text)
        except ValueError as error:
            raise StartupError(f"{self.where}: {text[:80]!r} {error}") from None
        return text

    def _first(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        found = ((name, self.values[name]) for name in names if self.values.get(name) is not None)
        name, value = next(found, (names[0], default))
        if value is None:
            raise StartupError(f"{self.where} has no {names[0]}")
        return name, value

    def _refuse(self, name: str, value: object, expected: str) -> StartupError:
        text = repr(value)
        return StartupError(
            f"{self.where}: {name} {text if len(text) < 80 else text[:76] + '...'} is not supported; it must be "
            f"{expected}"
        )
