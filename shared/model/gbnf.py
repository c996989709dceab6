"""llama.cpp's grammars (GBNF), read: rules of letters, tokens, other rules, sequences, choices and
repetitions."""

import re
from dataclasses import dataclass

from shared.model.letters import LAST_LETTER, Ranges, gaps, joined
from shared.process.errors import Invalid

MAX_DEPTH = 64  # brackets in brackets
MAX_TIMES = 100_000

NAME = re.compile(r"[A-Za-z0-9_-]+")
SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
NEXT_OPTION = re.compile(
    rf"{SPACE_AND_LINES.pattern}\|{SPACE_AND_LINES.pattern}"
)  # llama.cpp takes no new line before it
LINE_END = re.compile(r"\r\n|\r|\n")
ESCAPE = re.compile(r'\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([trn\\"\[\]-]))')
TIMES = re.compile(r"\{\s*([0-9]{1,9})\s*(?:(,)\s*([0-9]{1,9})?\s*)?\}")
TOKEN = re.compile(r"(!?)<(?:\[([0-9]{1,9})\]|([^<>\s\[\]]{1,64}))>")
REPETITIONS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
LETTERS = {"t": "\t", "r": "\r", "n": "\n"}

# They are told from one another by identity: each is one place of the grammar


@dataclass(frozen=True, slots=True, eq=False)
class Letters:
    """One letter out of ranges, in order and apart."""

    ranges: Ranges


@dataclass(frozen=True, slots=True, eq=False)
class SpecialToken:
    """A token by its id or its text, or any other than that."""

    token_id: int | None
    text: str
    is_other: bool


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Concatenation:
    """All nodes, one after the other."""

    nodes: tuple["Node", ...]


@dataclass(frozen=True, slots=True, eq=False)
class Alternation:
    """A choice between nodes."""

    nodes: tuple["Node", ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repetition:
    node: "Node"
    low: int
    high: int | None


Node = Letters | SpecialToken | Reference | Concatenation | Alternation | Repetition


def read_gbnf(text: str) -> dict[str, Node]:
    """The rules by name, `root` among them. Raises Invalid, which names the line and the column."""
    return GbnfReader(text).rules()


class GbnfReader:
    """Reads one grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.references: list[tuple[str, int]] = []  # and where they stand

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self.skip(SPACE_AND_LINES)
        while self.at < len(self.text):
            name = self.matched(NAME, "the name of a rule")[0]
            self.skip(SPACE)
            if not self.next("::="):
                raise self.error(f"expected ::= behind the rule's name {name}")
            self.skip(SPACE_AND_LINES)
            rules[name] = self.options(is_nested=False)
            if self.at < len(self.text) and not LINE_END.match(self.text, self.at):
                raise self.error(f"the rule {name} can't go on with {self.text[self.at]!r}")
            self.skip(SPACE_AND_LINES)
        for name, at in self.references:
            if name not in rules:
                raise self.error(f"there is no rule {name}", at)
        if "root" not in rules:
            raise Invalid("there is no rule root, with which an answer begins")
        return rules

    def error(self, problem: str, at: int | None = None) -> Invalid:
        before = self.text[: self.at if at is None else at]
        line_ends = list(LINE_END.finditer(before))
        return Invalid(
            f"line {len(line_ends) + 1}, column {len(before) - (line_ends[-1].end() if line_ends else 0) + 1}: "
            f"{problem}"
        )

    def skip(self, space: re.Pattern[str]) -> None:
        match = space.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def next(self, text: str) -> bool:
        """Go on behind the text if it is next."""
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def matched(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise self.error(f"expected {expected}")
        self.at = match.end()
        return match

    def options(self, *, is_nested: bool) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"brackets are nested more than {MAX_DEPTH} levels deep")
        made = [self.parts(is_nested=is_nested)]
        while (option := NEXT_OPTION.match(self.text, self.at)) is not None:
            self.at = option.end()
            made.append(self.parts(is_nested=is_nested))
        self.depth -= 1
        return made[0] if len(made) == 1 else Alternation(tuple(made))

    def parts(self, *, is_nested: bool) -> Node:
        made: list[Node] = []
        space = SPACE_AND_LINES if is_nested else SPACE
        while self.at < len(self.text):
            begin = self.at
            if (times := self.times()) is not None:
                if not made:
                    raise self.error("there is nothing before it that could be repeated", begin)
                made[-1] = Repetition(made[-1], *times)
            elif (node := self.item()) is not None:
                made.append(node)
            else:
                break
            self.skip(space)
        return made[0] if len(made) == 1 else Concatenation(tuple(made))

    def item(self) -> Node | None:
        if self.next('"'):
            return self.literal()
        if self.next("["):
            return self.letters()
        if self.next("."):
            return Letters(((0, LAST_LETTER),))
        if self.next("("):
            self.skip(SPACE_AND_LINES)
            inner = self.options(is_nested=True)
            if not self.next(")"):
                raise self.error("expected )" if self.at < len(self.text) else "the grammar ends, and ) is missing")
            return inner
        if self.text[self.at] in "<!":
            negation, token_id, text = self.matched(TOKEN, "a token: <[ID]> or <text>").groups()
            return SpecialToken(int(token_id) if token_id is not None else None, f"<{text}>", bool(negation))
        if (name := NAME.match(self.text, self.at)) is not None:
            self.references.append((name[0], self.at))
            self.at = name.end()
            return Reference(name[0])
        return None

    def times(self) -> tuple[int, int | None] | None:
        """How often what stands before is repeated; None: no repetition is next."""
        letter = self.text[self.at]
        if letter in REPETITIONS:
            self.at += 1
            return REPETITIONS[letter]
        if letter != "{":
            return None
        begin = self.at
        first, comma, last = self.matched(TIMES, "a repetition: {n}, {n,} or {n,m}").groups()
        low, high = int(first), int(last) if last is not None else None if comma else int(first)
        if high is not None and high < low:
            raise self.error(f"the repetition's end {high} is before its beginning {low}", begin)
        if max(low, high or 0) > MAX_TIMES:
            raise self.error(f"at most {MAX_TIMES} repetitions are possible", begin)
        return low, high

    def literal(self) -> Node:
        begin, made = self.at - 1, []
        while not self.next('"'):
            made.append(self.letter("the text", begin))
        nodes = tuple(Letters(((each, each),)) for each in made)
        return nodes[0] if len(nodes) == 1 else Concatenation(nodes)

    def letters(self) -> Node:
        """A class of letters, behind its bracket."""
        begin, is_negative, ranges = self.at - 1, self.next("^"), []
        while not self.next("]"):
            low = high = self.letter("the class", begin)
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                high = self.letter("the class", begin)
            if high < low:
                raise self.error("a range of letters ends before it begins")
            ranges.append((low, high))
        made = joined(ranges)
        if is_negative:
            made = tuple(gaps(made))
        if not made:
            raise self.error("no letter is in this class", begin)
        return Letters(made)

    def letter(self, of: str, begin: int) -> int:
        if self.at >= len(self.text):
            raise self.error(f"{of} that begins here has no end", begin)
        if self.text[self.at] != "\\":
            self.at += 1
            return ord(self.text[self.at - 1])
        of_two, of_four, of_eight, short = self.matched(
            ESCAPE, r"an escape: \n, \r, \t, \\, \", \[, \], \-, \xHH, \uHHHH or \UHHHHHHHH"
        ).groups()
        if short is not None:
            return ord(LETTERS.get(short, short))
        code = int(of_two or of_four or of_eight, 16)
        if code > LAST_LETTER or 0xD800 <= code <= 0xDFFF:
            raise self.error(f"there is no letter {code:X}")
        return code
