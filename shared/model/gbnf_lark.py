"""llama.cpp's grammars in Lark's syntax, as llguidance reads it.

llguidance cuts a text into lexemes, each as long as any that may stand there can be, and only then
looks at rules. So a lexeme may be more than a letter only where a longer one can't take away what
must follow it. What of a grammar is regular becomes one lexeme (lexemes make masks cheap), and where
that could go wrong it is taken apart, down to its letters.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.model.gbnf import Alternation, Concatenation, Letters, Node, Reference, Repetition, SpecialToken, read_gbnf
from shared.model.letters import Ranges, classed, meet
from shared.process.errors import Invalid

MAX_LETTERS = 400  # of one lexeme, where what repeats counts once
MAX_STEPS = 200_000  # of comparing lexemes; where they do not suffice, each letter is a lexeme
EMPTY = '""'


def gbnf_to_lark(text: str, special_tokens: Mapping[str, int] | None) -> str:
    """special_tokens: by text; None where no vocabulary is known. Raises Invalid for what is no
    grammar of llama.cpp's."""
    rules = read_gbnf(text)
    regular = Regular(rules)
    lexing = Lexing({name: regular.in_runs(node) for name, node in rules.items()})
    try:
        while found := lexing.too_long():
            lexing.apart |= found
    except TooMuch:
        lexing.is_of_letters = True
    return Writer(lexing, special_tokens).lark()


class TooMuch(Exception):
    """It takes more steps than a grammar gets."""


class Regular:
    """How many letters the parts of a grammar have, as far as they are regular."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self.rules = rules
        self._sizes: dict[Node, int] = {}

    def size(self, node: Node) -> int:
        """More than MAX_LETTERS where it is not regular, or too large for a lexeme."""
        if isinstance(node, Letters):
            return 1
        if node not in self._sizes:
            self._sizes[node] = MAX_LETTERS + 1  # where it refers to itself
            self._sizes[node] = min(self._size(node), MAX_LETTERS + 1)
        return self._sizes[node]

    def _size(self, node: Node) -> int:
        match node:
            case Reference(name):
                return self.size(self.rules[name])
            case Repetition(inner, _, _):
                return self.size(inner)
            case Concatenation(nodes) | Alternation(nodes):
                return sum(map(self.size, nodes))
        return MAX_LETTERS + 1  # a token

    def in_runs(self, node: Node) -> Node:
        """The node, in which adjacent regular parts are one."""
        match node:
            case Concatenation(nodes) if self.size(node) > MAX_LETTERS:
                runs: list[list[Node]] = []
                size = 0
                for each in map(self.in_runs, nodes):
                    size += self.size(each)
                    if not runs or size > MAX_LETTERS:
                        runs.append([])
                        size = self.size(each)
                    runs[-1].append(each)
                return Concatenation(tuple(run[0] if len(run) == 1 else Concatenation(tuple(run)) for run in runs))
            case Alternation(nodes):
                return Alternation(tuple(map(self.in_runs, nodes)))
            case Repetition(inner, low, high):
                return Repetition(self.in_runs(inner), low, high)
        return node


@dataclass(frozen=True, slots=True)
class Automaton:
    """A regular part as places, each of a letter. Repetitions are read as if they had no bounds: it
    allows no less than the part."""

    letters: tuple[Ranges, ...]  # by place
    first: frozenset[int]
    last: frozenset[int]
    next: tuple[frozenset[int], ...]  # by place
    is_nullable: bool


@dataclass(frozen=True, slots=True)
class Ends:
    """The lexemes that a part may begin and end with, and whether it may be empty."""

    is_nullable: bool
    first: frozenset[Node]
    last: frozenset[Node]


NOTHING: frozenset[Node] = frozenset()


class Lexing:
    """Decides which parts become lexemes. apart: what is regular, but no lexeme."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self.rules = rules
        self.regular = Regular(rules)
        self.apart: set[Node] = set()
        self.is_of_letters = False
        self._automata: dict[Node, Automaton] = {}
        self._compared: dict[tuple[Node, Node], tuple[Ranges, bool]] = {}
        self._ends: dict[str, Ends] = {}
        self._next: dict[Node, frozenset[Node]] = {}
        self._num_steps = 0

    def is_lexeme(self, node: Node) -> bool:
        if self.is_of_letters:
            return isinstance(node, Letters)
        return node not in self.apart and self.regular.size(node) <= MAX_LETTERS

    def too_long(self) -> set[Node]:
        """The lexemes that could take away what must follow another. Raises TooMuch."""
        self._follow()
        nodes: set[Node] = set()
        begins = self._ends["root"].first
        self._step(len(begins) ** 2)
        ahead = [(one, other) for one in begins for other in begins]
        seen = set(ahead)
        while ahead:
            one, other = ahead.pop()
            self._step()
            longer, have_text_in_common = self._compare(one, other)
            self._step(len(self._next[one]) if longer else 0)
            if longer and any(
                meet(longer, self._automaton(each).letters[place])
                for each in self._next[one]
                for place in self._first(each)
            ):
                nodes.add(other)
            if have_text_in_common:
                self._step(len(self._next[one]) * len(self._next[other]))
                pairs = {(a, b) for a in self._next[one] for b in self._next[other]} - seen
                seen |= pairs
                ahead += pairs
        return nodes

    def _step(self, count: int = 1) -> None:
        self._num_steps += count
        if self._num_steps > MAX_STEPS:
            raise TooMuch

    def _first(self, lexeme: Node) -> frozenset[int]:
        return frozenset() if isinstance(lexeme, SpecialToken) else self._automaton(lexeme).first

    def _compare(self, one: Node, other: Node) -> tuple[Ranges, bool]:
        """The letters with which the other may go on where the one is at its end, and whether a
        text can be both."""
        if isinstance(one, SpecialToken) or isinstance(other, SpecialToken):
            return (), one is other or any(isinstance(each, SpecialToken) and each.is_other for each in (one, other))
        if (one, other) not in self._compared:
            a, b = self._automaton(one), self._automaton(other)
            self._step(len(a.first) * len(b.first))
            ahead = [(i, j) for i in a.first for j in b.first if meet(a.letters[i], b.letters[j])]
            seen = set(ahead)
            longer: set[int] = set()
            is_common = False
            while ahead:
                i, j = ahead.pop()
                if i in a.last:
                    longer |= b.next[j]
                    is_common |= j in b.last
                self._step(len(a.next[i]) * len(b.next[j]) + 1)
                pairs = {(k, m) for k in a.next[i] for m in b.next[j] if meet(a.letters[k], b.letters[m])} - seen
                seen |= pairs
                ahead += pairs
            self._compared[one, other] = tuple(letter for place in longer for letter in b.letters[place]), is_common
        return self._compared[one, other]

    def _follow(self) -> None:
        """Work out which lexemes may follow which."""
        self._ends, changed = {}, True
        while changed:  # rules refer to one another
            before = dict(self._ends)
            links: dict[Node, set[Node]] = defaultdict(set)
            reached, ahead = {"root"}, ["root"]
            while ahead:
                name = ahead.pop()
                references: set[str] = set()
                self._ends[name] = self._ends_of(self.rules[name], links, references)
                ahead += references - reached
                reached |= references
            changed = before != self._ends
        self._next = defaultdict(frozenset, {one: frozenset(others) for one, others in links.items()})

    def _ends_of(self, node: Node, links: dict[Node, set[Node]], references: set[str]) -> Ends:
        self._step()
        if self.is_lexeme(node):
            own = self._automaton(node)
            itself = frozenset([node]) if own.first else NOTHING
            return Ends(own.is_nullable, itself, itself)
        match node:
            case Reference(name):
                references.add(name)
                return self._ends.get(name, Ends(False, NOTHING, NOTHING))
            case Repetition(inner, low, high):
                ends = self._ends_of(inner, links, references) if high != 0 else Ends(True, NOTHING, NOTHING)
                if high is None or high > 1:
                    self._link(ends.last, ends.first, links)
                return Ends(ends.is_nullable or low == 0, ends.first, ends.last)
            case Concatenation(nodes):
                all_ends = Ends(True, NOTHING, NOTHING)
                for each in nodes:
                    ends = self._ends_of(each, links, references)
                    self._link(all_ends.last, ends.first, links)
                    self._step(len(all_ends.first) + len(all_ends.last))
                    first = all_ends.first | ends.first if all_ends.is_nullable else all_ends.first
                    last = all_ends.last | ends.last if ends.is_nullable else ends.last
                    all_ends = Ends(all_ends.is_nullable and ends.is_nullable, first, last)
                return all_ends
            case Alternation(nodes):
                some = [self._ends_of(each, links, references) for each in nodes]
                first, last = (
                    NOTHING.union(*(each.first for each in some)),
                    NOTHING.union(*(each.last for each in some)),
                )
                return Ends(any(each.is_nullable for each in some), first, last)
        return Ends(False, frozenset([node]), frozenset([node]))  # a token

    def _link(self, some: frozenset[Node], others: frozenset[Node], links: dict[Node, set[Node]]) -> None:
        self._step(len(some) * len(others))
        for each in some:
            links[each] |= others

    def _automaton(self, node: Node) -> Automaton:
        if node not in self._automata:
            self._automata[node] = PositionAutomaton(self.rules).automaton(node)
        return self._automata[node]


@dataclass(frozen=True, slots=True)
class Span:
    """Where a part begins and ends, by place, and whether it may be empty."""

    is_nullable: bool
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()


class PositionAutomaton:
    """The places of one regular part."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self.rules = rules
        self.letters: list[Ranges] = []
        self.next: list[set[int]] = []

    def automaton(self, node: Node) -> Automaton:
        span = self.span(node)
        return Automaton(tuple(self.letters), span.first, span.last, tuple(map(frozenset, self.next)), span.is_nullable)

    def span(self, node: Node) -> Span:
        match node:
            case Letters(ranges):
                self.letters.append(ranges)
                self.next.append(set())
                place = frozenset([len(self.letters) - 1])
                return Span(False, place, place)
            case Reference(name):
                return self.span(self.rules[name])
            case Repetition(inner, low, high):
                return self.repeated(self.span(inner), low, high) if high != 0 else Span(True)
            case Alternation(nodes):
                some = [self.span(each) for each in nodes]
                return Span(
                    any(each.is_nullable for each in some),
                    union(each.first for each in some),
                    union(each.last for each in some),
                )
            case Concatenation(nodes):
                made = Span(True)
                for each in nodes:
                    made = self.joined(made, self.span(each))
                return made
        raise AssertionError(node)

    def repeated(self, span: Span, low: int, high: int | None) -> Span:
        if high is None or high > 1:
            self.link(span, span)
        return Span(span.is_nullable or low == 0, span.first, span.last)

    def joined(self, one: Span, other: Span) -> Span:
        self.link(one, other)
        first = one.first | other.first if one.is_nullable else one.first
        last = one.last | other.last if other.is_nullable else other.last
        return Span(one.is_nullable and other.is_nullable, first, last)

    def link(self, one: Span, other: Span) -> None:
        for place in one.last:
            self.next[place] |= other.first


def union(some: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset[int]().union(*some)


class Writer:
    """Writes the grammar: a rule for each that is no lexeme, and a terminal for each lexeme."""

    def __init__(self, lexing: Lexing, special_tokens: Mapping[str, int] | None) -> None:
        self.lexing = lexing
        self.special_tokens = special_tokens
        self.rules: dict[str, str] = {}  # names here, by the client's
        self.terminals: dict[str, str] = {}  # names, by expression
        self.ahead: list[str] = []

    def lark(self) -> str:
        lines = [f"start: {self.rule('root')}"]
        while self.ahead:
            name = self.ahead.pop()
            lines.append(f"{self.rules[name]}: {self.written(self.lexing.rules[name])}")
        lines += [f"{name}: {expression}" for expression, name in self.terminals.items()]
        return "%llguidance {}\n" + "".join(f"{line}\n" for line in lines)

    def rule(self, name: str) -> str:
        if name not in self.rules:
            self.rules[name] = f"r{len(self.rules)}"
            self.ahead.append(name)
        return self.rules[name]

    def written(self, node: Node) -> str:
        if self.lexing.is_lexeme(node):
            return self.lexeme(node)
        match node:
            case Reference(name):
                return self.rule(name)
            case Repetition(inner, low, high):
                return f"({self.written(inner)}){times(low, high)}" if high != 0 else EMPTY
            case Concatenation(nodes):
                return f"({' '.join(map(self.written, nodes))})" if nodes else EMPTY
            case Alternation(nodes):
                return f"({' | '.join(map(self.written, nodes))})"
            case SpecialToken():
                return self.token(node)
        raise AssertionError(node)

    def lexeme(self, node: Node) -> str:
        """A terminal; no lexeme is empty."""
        own = PositionAutomaton(self.lexing.rules).automaton(node) if not isinstance(node, Letters) else None
        if own is not None and not own.first:
            return EMPTY
        is_nullable = own is not None and own.is_nullable
        expression = f"/{expressed(node, self.lexing.rules)}/" + (r" & /[\s\S]+/" if is_nullable else "")
        name = self.terminals.setdefault(expression, f"T{len(self.terminals)}")
        return f"{name}?" if is_nullable else name

    def token(self, token: SpecialToken) -> str:
        if token.token_id is None and self.special_tokens is None:
            return "<[^0]>" if token.is_other else token.text  # that it may stand here is all that is to be known
        token_id = (
            token.token_id
            if self.special_tokens is None or token.token_id is not None
            else self.special_tokens.get(token.text)
        )
        if token_id is None:
            raise Invalid(f"the model has no special token {token.text}")
        return f"<[{'^' if token.is_other else ''}{token_id}]>"


def times(low: int, high: int | None) -> str:
    return {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high), f"{{{low},{'' if high is None else high}}}")


def expressed(node: Node, rules: Mapping[str, Node]) -> str:
    """A regular part as a regular expression."""
    match node:
        case Letters(ranges):
            return f"[{classed(ranges)}]"
        case Reference(name):
            return expressed(rules[name], rules)
        case Repetition(inner, low, high):
            return f"(?:{expressed(inner, rules)}){times(low, high)}" if high != 0 else ""
        case Alternation(nodes):
            return f"(?:{'|'.join(expressed(each, rules) for each in nodes)})"
        case Concatenation(nodes):
            return "".join(expressed(each, rules) for each in nodes)
    raise AssertionError(node)
