"""Patterns of JSON schemas, read as ECMA 262 reads them and written for the grammars' library.

Where ECMA 262 and Python's `re` differ, what is written matches only texts that both match: `\\d` is
0 to 9, `.` no line separator, and `[[:alpha:]]` a class of seven letters, with a bracket behind it.

The library lets `"` and `\\` through, escaped, where a class without them has all control characters:
such a class is written without U+0000.
"""

import re
from collections.abc import Iterable

from shared.model.letters import LAST_LETTER, Ranges, classed, escaped

MAX_DEPTH = 64  # groups

SPACE: Ranges = ((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000))
DIGIT: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
# Of each escape the letters that every engine takes for it, and those that some engine does
SURE: dict[str, Ranges] = {"d": DIGIT, "w": WORD, "s": SPACE}
PERHAPS_WORD: Ranges = (*WORD, (0x80, LAST_LETTER))  # the exact class takes the engine too long
PERHAPS_SPACE: Ranges = (*SPACE, (28, 31), (0x85, 0x85), (0xFEFF, 0xFEFF))
PERHAPS: dict[str, str] = {"d": r"\p{Nd}", "w": classed(PERHAPS_WORD), "s": classed(PERHAPS_SPACE)}
NO_DOT: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
FOLDED = {"k": "\u212a", "s": "\u017f"}  # further letters of the same fold
EVERYTHING = r"[\s\S]"

QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]{1,6}(?:,[0-9]{0,6})?\})")
GROUP = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")
FLAGS = re.compile(r"\(\?([is]+)\)")
PROPERTY = re.compile(r"[pP]\{[A-Za-z_]{1,40}(?:=[A-Za-z_]{1,40})?\}")
NUMERIC = re.compile(
    r"u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|u\{0*([0-9a-fA-F]{1,6})\}|c([A-Za-z])|0(?![0-9])"
)
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


class Unsaid(ValueError):
    """A pattern that is none, that engines read differently, or that the library has no word for."""


def written(pattern: str) -> str | None:
    """The pattern in the library's words; None: it can't be said."""
    try:
        return PatternReader(pattern).written()
    except Unsaid:
        return None


class PatternReader:
    """Reads one pattern, and writes it as it goes."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.depth = 0
        flags = FLAGS.match(pattern)
        self.flags = flags[1] if flags is not None else ""
        self.at = flags.end() if flags is not None else 0

    def written(self) -> str:
        """Raises Unsaid."""
        made = self.alternatives()
        if self.at < len(self.pattern):
            raise Unsaid
        return made

    def next(self, text: str) -> bool:
        """Go on behind the text if it is next."""
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def alternatives(self) -> str:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unsaid
        made = [self.sequence()]
        while self.next("|"):
            made.append(self.sequence())
        self.depth -= 1
        return "|".join(made)

    def sequence(self) -> str:
        made = ""
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            if self.pattern[self.at] in "^$":
                made += self.pattern[self.at]
                self.at += 1
                if QUANTIFIER.match(self.pattern, self.at):
                    raise Unsaid
                continue
            made += self.atom() + self.quantifier()
        return made

    def quantifier(self) -> str:
        """A quantifier, of which the laziness changes nothing."""
        found = QUANTIFIER.match(self.pattern, self.at)
        if found is None:
            if self.pattern.startswith("{,", self.at):  # a quantifier in Python alone
                raise Unsaid
            return ""
        self.at = found.end()
        self.next("?")
        if QUANTIFIER.match(self.pattern, self.at):
            raise Unsaid
        return found[0]

    def atom(self) -> str:
        if QUANTIFIER.match(self.pattern, self.at):
            raise Unsaid
        if self.next("("):
            return self.group()
        if self.next("["):
            return self.letters()
        if self.next("."):
            return EVERYTHING if "s" in self.flags else negative([classed(NO_DOT)])
        if self.next("\\"):
            return self.escape()
        self.at += 1
        return self.letter(ord(self.pattern[self.at - 1]))

    def group(self) -> str:
        """A group, behind its bracket."""
        if (kind := GROUP.match(self.pattern, self.at)) is not None:
            self.at = kind.end()
        elif self.next("?"):
            raise Unsaid
        inner = self.alternatives()
        if not self.next(")"):
            raise Unsaid
        return f"(?:{inner})"

    def letter(self, code: int) -> str:
        if code == 0:  # beside a class it would be a class with all control characters
            raise Unsaid
        return f"[{folded(((code, code),))}]" if "i" in self.flags and chr(code).isalpha() else escaped(code)

    def escape(self) -> str:
        """Read what stands behind a backslash, outside of a class."""
        kind = self.pattern[self.at : self.at + 1]
        if kind.lower() in SURE or kind in ("p", "P"):
            item, _ = self.item()
            return f"[{item}]"
        return self.letter(self.code())

    def letters(self) -> str:
        """A class, behind its bracket."""
        is_negative = self.next("^")
        if self.pattern.startswith("]", self.at):
            raise Unsaid
        items, ranges, kinds, hides = [], [], set(), False
        while not self.next("]"):
            if self.at >= len(self.pattern):
                raise Unsaid
            kind = self.pattern[self.at + 1 : self.at + 2] if self.pattern[self.at] == "\\" else ""
            if kind and (kind.lower() in SURE or kind in "pP"):
                self.at += 1
                item, may_hide = self.item(is_negative=is_negative)
                items.append(item)
                kinds.add(kind)
                hides |= may_hide
                continue
            low = self.end_of_range()
            high = low
            if self.pattern.startswith("-", self.at) and not self.pattern.startswith(("-]", "-\\d", "-\\w", "-\\s", "-\\D", "-\\W", "-\\S"), self.at):
                self.at += 1
                high = self.end_of_range()
            if high < low:
                raise Unsaid
            ranges.append((low, high))
        if any(each.swapcase() in kinds for each in kinds):
            if is_negative:
                raise Unsaid
            return EVERYTHING
        return self.negative_class(items, ranges, hides) if is_negative else self.positive_class(items, ranges)

    def positive_class(self, items: list[str], ranges: Iterable[tuple[int, int]]) -> str:
        own = tuple((max(low, 1), high) for low, high in ranges if high > 0)
        made = "".join(items) + (folded(own) if "i" in self.flags else classed(own))
        if not made:
            raise Unsaid
        return f"[{made}]"

    def negative_class(self, items: list[str], ranges: list[tuple[int, int]], hides: bool) -> str:
        if "i" in self.flags and any(high > 127 for _, high in ranges):
            raise Unsaid
        hides |= any(low <= ord(each) <= high for low, high in ranges for each in '"\\')
        return negative([*items, folded(tuple(ranges)) if "i" in self.flags else classed(tuple(ranges))], hides=hides)

    def item(self, *, is_negative: bool = False) -> tuple[str, bool]:
        """An escape that stands for many letters, in a class: what is sure of it, or, in a negative
        class, what is possible; and whether a quotation mark may be among it."""
        kind = self.pattern[self.at]
        if kind in "pP":
            found = PROPERTY.match(self.pattern, self.at)
            if found is None or "i" in self.flags:
                raise Unsaid
            self.at = found.end()
            return (f"\\{found[0]}" if is_negative or kind == "p" else negative([f"\\p{found[0][1:]}"], hides=True)), True
        self.at += 1
        wide = PERHAPS[kind.lower()]
        if kind.islower():
            return (wide if is_negative else classed(SURE[kind])), False
        return negative([classed(SURE[kind.lower()]) if is_negative else wide]), True

    def end_of_range(self) -> int:
        if self.at >= len(self.pattern):
            raise Unsaid
        if self.next("\\b"):
            return 8
        if self.next("\\"):
            return self.code()
        self.at += 1
        return ord(self.pattern[self.at - 1])

    def code(self) -> int:
        """The letter that an escape stands for."""
        if (found := NUMERIC.match(self.pattern, self.at)) is not None:
            self.at = found.end()
            high, low, *others, control = found.groups()
            if high is not None:
                return 0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00
            if control is not None:
                return ord(control.upper()) - 64
            code = next((int(each, 16) for each in others if each is not None), 0)
            if 0xD800 <= code <= 0xDFFF or code > LAST_LETTER:
                raise Unsaid
            return code
        kind = self.pattern[self.at : self.at + 1]
        self.at += 1
        if kind in CONTROLS:
            return CONTROLS[kind]
        if not kind or kind.isalnum():
            raise Unsaid
        return ord(kind)


def negative(items: list[str], *, hides: bool = False) -> str:
    """hides: whether a quotation mark or a backslash may be among the items."""
    return f"[^{''.join(items)}{escaped(0) if hides else ''}]"


def folded(ranges: Ranges) -> str:
    """The letters of a class in both cases."""
    made = list(ranges)
    for low, high in ranges:
        letters = [chr(code) for code in range(max(low, 65), min(high, 122) + 1) if chr(code).isalpha()]
        made += [(ord(each.swapcase()),) * 2 for each in letters]
        made += [(ord(FOLDED[each.lower()]),) * 2 for each in letters if each.lower() in FOLDED]
    return classed(tuple(sorted(set(made))))
