r"""Patterns of JSON schemas, read as ECMA 262 reads them and written for the grammars' library.

Where ECMA 262 and Python's `re` differ, what is written matches only texts that both match: `\d` is
0 to 9, `.` no line separator, and `[[:alpha:]]` a class of seven letters, with a bracket behind it.

The library lets `"` and `\` through, escaped, where a class without them has all control characters:
such a class is written without U+0000.
"""

import re

from shared.model.letters import LAST_LETTER, Ranges, classed, escaped

MAX_DEPTH = 64  # groups

SPACE: Ranges = (
    (9, 13),
    (32, 32),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
)
DIGIT: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
# For each escape the letters that every engine takes for it, and those that some engine does
SURE: dict[str, Ranges] = {"d": DIGIT, "w": WORD, "s": SPACE}
PERHAPS_WORD: Ranges = (*WORD, (0x80, LAST_LETTER))  # the exact class takes the engine too long
PERHAPS_SPACE: Ranges = (*SPACE, (28, 31), (0x85, 0x85), (0xFEFF, 0xFEFF))
PERHAPS: dict[str, str] = {"d": r"\p{Nd}", "w": classed(PERHAPS_WORD), "s": classed(PERHAPS_SPACE)}
NO_DOT: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
EVERYTHING = r"[\s\S]"

QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]{1,6}(?:,[0-9]{0,6})?\})")
GROUP = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")
PROPERTY = re.compile(r"[pP]\{[A-Za-z_]{1,40}(?:=[A-Za-z_]{1,40})?\}")
NUMERIC = re.compile(
    r"u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|u\{0*([0-9a-fA-F]{1,6})\}|c([A-Za-z])|0(?![0-9])"
)
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


class UnsupportedPattern(ValueError):
    """The pattern is none, engines read it differently, or the library can't match it."""


def written(pattern: str) -> str | None:
    """The pattern in the library's syntax; None if it can't be written."""
    try:
        return PatternReader(pattern).written()
    except UnsupportedPattern:
        return None


class PatternReader:
    """Reads one pattern, and writes it as it goes. The methods raise UnsupportedPattern."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.depth = 0

    def written(self) -> str:
        made = self.alternatives()
        if self.at < len(self.pattern):
            raise UnsupportedPattern
        return made

    def next(self, text: str) -> bool:
        """Go on behind the text if it is next."""
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def take(self) -> str:
        """The next letter."""
        if self.at >= len(self.pattern):
            raise UnsupportedPattern
        self.at += 1
        return self.pattern[self.at - 1]

    def alternatives(self) -> str:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnsupportedPattern
        made = [self.sequence()]
        while self.next("|"):
            made.append(self.sequence())
        self.depth -= 1
        return "|".join(made)

    def sequence(self) -> str:
        made = ""
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            if QUANTIFIER.match(self.pattern, self.at):  # of nothing, or of another quantifier
                raise UnsupportedPattern
            made += self.take() if self.pattern[self.at] in "^$" else self.atom() + self.quantifier()
        return made

    def quantifier(self) -> str:
        """A quantifier, whose laziness changes nothing."""
        match = QUANTIFIER.match(self.pattern, self.at)
        if match is None:
            if self.pattern.startswith("{,", self.at):  # a quantifier in Python alone
                raise UnsupportedPattern
            return ""
        self.at = match.end()
        self.next("?")
        return match[0]

    def atom(self) -> str:
        if self.next("("):
            return self.group()
        if self.next("["):
            return self.letters()
        if self.next("."):
            return negative([classed(NO_DOT)])
        if self.next("\\"):
            if self.pattern[self.at : self.at + 1].lower() in (*SURE, "p"):
                return f"[{self.item()[0]}]"
            return letter(self.code())
        return letter(ord(self.take()))

    def group(self) -> str:
        """A group, behind its bracket."""
        if (kind := GROUP.match(self.pattern, self.at)) is not None:
            self.at = kind.end()
        elif self.next("?"):
            raise UnsupportedPattern
        inner = self.alternatives()
        if not self.next(")"):
            raise UnsupportedPattern
        return f"(?:{inner})"

    def letters(self) -> str:
        """A class, behind its bracket."""
        is_negative = self.next("^")
        if self.pattern.startswith("]", self.at):
            raise UnsupportedPattern
        items, ranges, kinds, hides = list[str](), list[tuple[int, int]](), set[str](), False
        while not self.next("]"):
            kind = self.pattern[self.at + 1 : self.at + 2] if self.pattern.startswith("\\", self.at) else ""
            if kind and kind.lower() in (*SURE, "p"):
                self.at += 1
                item, may_hide = self.item(is_negative=is_negative)
                items.append(item)
                kinds.add(kind)
                hides |= may_hide
                continue
            low = high = self.end_of_range()
            if self.pattern.startswith("-", self.at) and not self.pattern.startswith(
                ("-]", "-\\d", "-\\w", "-\\s", "-\\D", "-\\W", "-\\S"), self.at
            ):
                self.at += 1
                high = self.end_of_range()
            if high < low:
                raise UnsupportedPattern
            ranges.append((low, high))
        if any(each.swapcase() in kinds for each in kinds):
            if is_negative:
                raise UnsupportedPattern
            return EVERYTHING
        if is_negative:
            return negative(
                [*items, classed(tuple(ranges))],
                hides=hides or any(low <= ord(each) <= high for low, high in ranges for each in '"\\'),
            )
        made = "".join(items) + classed(tuple((max(low, 1), high) for low, high in ranges if high > 0))
        if not made:
            raise UnsupportedPattern
        return f"[{made}]"

    def item(self, *, is_negative: bool = False) -> tuple[str, bool]:
        """An escape that stands for many letters, in a class: those that are sure, or, in a negative
        class, those that are possible; and whether a quotation mark may be among them."""
        kind = self.pattern[self.at]
        if kind in "pP":
            match = PROPERTY.match(self.pattern, self.at)
            if match is None:
                raise UnsupportedPattern
            self.at = match.end()
            return (
                f"\\{match[0]}" if is_negative or kind == "p" else negative([f"\\p{match[0][1:]}"], hides=True)
            ), True
        self.at += 1
        wide = PERHAPS[kind.lower()]
        if kind.islower():
            return (wide if is_negative else classed(SURE[kind])), False
        return negative([classed(SURE[kind.lower()]) if is_negative else wide]), True

    def end_of_range(self) -> int:
        if self.next("\\b"):
            return 8
        return self.code() if self.next("\\") else ord(self.take())

    def code(self) -> int:
        """The letter that an escape stands for."""
        if (match := NUMERIC.match(self.pattern, self.at)) is not None:
            self.at = match.end()
            high, low, *others, control = match.groups()
            if high is not None:
                return 0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00
            if control is not None:
                return ord(control.upper()) - 64
            code = next((int(each, 16) for each in others if each is not None), 0)
            if 0xD800 <= code <= 0xDFFF or code > LAST_LETTER:
                raise UnsupportedPattern
            return code
        kind = self.take()
        if kind not in CONTROLS and kind.isalnum():
            raise UnsupportedPattern
        return CONTROLS.get(kind, ord(kind))


def letter(code: int) -> str:
    """A letter outside of a class."""
    if code == 0:  # next to a class it would be a class with all control characters
        raise UnsupportedPattern
    return escaped(code)


def negative(items: list[str], *, hides: bool = False) -> str:
    """A negative class. hides: whether a quotation mark or a backslash may be among the items."""
    return f"[^{''.join(items)}{escaped(0) if hides else ''}]"
