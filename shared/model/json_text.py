"""JSON that others write, clients and models: how deep and how long it may be, and one way each to
read and to write it, so that whatever is read can be written again, everywhere."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

# levels of a value: what reads and writes JSON in a stage goes deeper, also where a function calls
# itself for each
MAX_DEPTH = 128
MAX_DIGITS = 4300  # of a number: Python reads no longer integer
SURROGATE = re.compile("[\ud800-\udfff]")


class TooDeep(ValueError):
    """A value is nested deeper than it may be."""


def check_depth(value: Any, max_depth: int = MAX_DEPTH) -> None:
    """Raises TooDeep. In time linear in the value's size."""
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        if (depth := depth + 1) > max_depth:
            raise TooDeep(f"nested deeper than {max_depth} levels")
        level = [
            item
            for each in level
            for item in (each.values() if type(each) is dict else each)
            if type(item) is dict or type(item) is list
        ]


def check_text(text: str) -> None:
    """Raises TooDeep for a text that is JSON and is nested too deep. Another may be anything."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    try:
        read_json(text)
    except TooDeep:
        raise
    except ValueError:
        return


def finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError("a number is too large")
    return value


def read_json(text: str, *, strict: bool = True, parse_float: Callable[[str], float] = finite) -> Any:
    """The value that a text is JSON of. Raises ValueError for what is no JSON, for what is nested
    too deep, and for numbers that Python can't hold. strict, parse_float: as of json.loads; `float`
    makes infinity of a number that is too large."""
    try:
        value = json.loads(text, strict=strict, parse_constant=_refused, parse_float=parse_float)
    except RecursionError:
        raise TooDeep(f"nested deeper than {MAX_DEPTH} levels") from None
    check_depth(value)
    return value


def write_json(value: Any) -> str:
    """Characters stay as they are, unless one is half of a pair, which can't be sent. Raises
    ValueError for what no JSON can say, and for what is nested too deep."""
    check_depth(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value, allow_nan=False) if SURROGATE.search(text) else text


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")
