"""Classes of letters, as ranges of code points, and how regular expressions write them."""

from collections.abc import Iterable, Iterator

LAST_LETTER = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in order, and apart."""
    made: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return tuple(made)


def gaps(ranges: Ranges) -> Iterator[tuple[int, int]]:
    """All letters but these, which are in order and apart."""
    begin = 0
    for low, high in ranges:
        if low > begin:
            yield begin, low - 1
        begin = high + 1
    if begin <= LAST_LETTER:
        yield begin, LAST_LETTER


def meet(one: Ranges, other: Ranges) -> bool:
    """Whether a letter is in both."""
    return any(low <= end and begin <= high for low, high in one for begin, end in other)


def classed(ranges: Ranges) -> str:
    """The inside of a class."""
    return "".join(escaped(low) if low == high else f"{escaped(low)}-{escaped(high)}" for low, high in ranges)


def escaped(code: int) -> str:
    """A letter, as both Rust's regular expressions and Python's read it."""
    letter = chr(code)
    if letter.isascii() and (letter.isalnum() or letter == "_"):
        return letter
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
