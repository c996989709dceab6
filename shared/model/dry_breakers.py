"""DRY's sequence breakers, in tokens: the tokenizer spells them, compute looks for them.

A breaker begins in the middle of a token and may end in a later one: it is a token, and those that
must follow it.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from shared.process.errors import Invalid

# by a token, what must follow it; nothing: the token itself holds a breaker
Breakers = dict[int, list[tuple[int, ...]]]


def pack_breakers(breakers: Iterable[tuple[int, ...]]) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Pack each breaker as its length, the token and those after it."""
    return np.array([each for tokens in breakers for each in (len(tokens), *tokens)], np.int32)


def unpack_breakers(packed: "np.ndarray[Any, np.dtype[np.int32]]") -> Breakers:
    """Raises Invalid."""
    breakers: Breakers = defaultdict(list)
    values, at = packed.tolist(), 0
    while at < len(values):
        tokens = values[at + 1 : at + 1 + values[at]]
        if values[at] < 1 or len(tokens) < values[at]:
            raise Invalid("breakers that are cut off")
        breakers[tokens[0]].append(tuple(tokens[1:]))
        at += 1 + values[at]
    return dict(breakers)
