"""Regular expressions that come with a checkpoint: bounded before they run, for one such as
([a-z.]+)+! takes for ever on a layer's name."""

import re
from typing import Any

NAME = 64  # characters of a layer's name, about: so often an open repeat may be tried
MOST_PATHS = 1 << 26  # of four open repeats and a choice beside them; the true number is far lower


def check_pattern(text: str) -> None:
    """Raises ValueError for what is no regular expression, or may take too long."""
    try:
        re.compile(text)
        paths = _paths(re._parser.parse(text))  # type: ignore[attr-defined]
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    if paths > MOST_PATHS:
        raise ValueError("may take for ever: it repeats what repeats, or has too many repeats and choices")


def _paths(node: Any) -> int:
    """The number of ways, at most, in which a matcher may go through a name. node: of re's own
    parse tree; what is no repeat and no choice is gone through in one."""
    if isinstance(node, re._parser.SubPattern):  # type: ignore[attr-defined]
        node = list(node)
    if isinstance(node, tuple) and len(node) == 2 and str(node[0]).endswith("_REPEAT"):
        least, most, inner = int(node[1][0]), min(int(node[1][1]), NAME), node[1][2]
        return min(max(1, most - least + 1) * int(_paths(inner) ** most), MOST_PATHS + 1)
    if isinstance(node, tuple) and len(node) == 2 and str(node[0]) == "BRANCH":
        return min(sum(_paths(each) for each in node[1][1]), MOST_PATHS + 1)
    paths = 1
    for each in node if isinstance(node, list | tuple) else ():
        paths = min(paths * _paths(each), MOST_PATHS + 1)
    return paths
