"""Grammars in llama.cpp's form: whether a text is one, by rules alone, and what llama.cpp's own tests say of theirs."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from shared.model.constraint import Constraint
from shared.model.gbnf import Alternation, Concatenation, Letters, Node, Reference, Repetition, read_gbnf
from shared.model.grammar import ByteVocabulary, Vocabulary, check_grammar, compile_grammar
from shared.process.errors import Invalid

CASE = re.compile(
    r'(?:test_grammar)\(\s*"([^"]*)",(?:\s|//[^\n]*)*R"""\((.*?)\)""",(?:\s|//[^\n]*)*\{(.*?)\n        '
    r"\},(?:\s|//[^\n]*)*\{(.*?)\n        \}\s*\)",
    re.DOTALL,
)
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
BUILT = re.compile(r'(?:assert\((!?)test_build_grammar_fails\(|verify_(parsing|failure)\()R"""\((.*?)\)"""', re.DOTALL)


@cache
def of_bytes() -> Vocabulary:
    """A token for each byte."""
    return Vocabulary(ByteVocabulary(()).tokenizer(), {}, 257, (256,))


def accepts(grammar: str, texts: list[str]) -> list[bool]:
    """Whether compute would let each text be an answer. Raises Invalid."""
    beginning = compile_grammar(Constraint("gbnf", grammar), of_bytes())
    made = []
    for text in texts:
        matcher = beginning.deep_copy()
        made.append(bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()))
    return made


def matches(grammar: str, text: str) -> bool:
    """Whether the text is of the grammar, found out slowly: which parts of it each rule is."""
    found, before = Derivation(read_gbnf(grammar), text), -1
    while before != (before := sum(map(len, found.spans.values()))):  # until no rule is found to end elsewhere, too
        for name, node in found.rules.items():
            for begin in range(len(text) + 1):
                found.spans.setdefault((name, begin), set()).update(found.ends(node, begin))
    return len(text) in found.ends(found.rules["root"], 0)


@dataclass(slots=True)
class Derivation:
    """spans: where each rule may end, by its name and where it begins, as far as that is known."""

    rules: dict[str, Node]
    text: str
    spans: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    def ends(self, node: Node, begin: int) -> set[int]:
        match node:
            case Letters(ranges):
                is_one = begin < len(self.text) and any(low <= ord(self.text[begin]) <= high for low, high in ranges)
                return {begin + 1} if is_one else set()
            case Reference(name):
                return self.spans.get((name, begin), set())
            case Alternation(nodes):
                return set().union(*(self.ends(each, begin) for each in nodes))
            case Concatenation(nodes):
                found = {begin}
                for each in nodes:
                    found = self.all_ends(each, found)
                return found
            case Repetition(inner, least, most):
                return self.repeated(inner, begin, least, most if most is not None else least + len(self.text) + 1)
        raise AssertionError(node)

    def all_ends(self, node: Node, begins: set[int]) -> set[int]:
        return {end for begin in begins for end in self.ends(node, begin)}

    def repeated(self, node: Node, begin: int, least: int, most: int) -> set[int]:
        reached, found = {begin}, {begin} if least == 0 else set[int]()
        for number in range(1, most + 1):
            reached = self.all_ends(node, reached)
            found |= reached if number >= least else set()
        return found


@dataclass(frozen=True, slots=True)
class Case:
    """A test of llama.cpp's: what its grammar accepts, and what it refuses."""

    name: str
    grammar: str
    good: list[str]
    bad: list[str]


def cases_of(folder: Path) -> Iterator[Case]:
    """The tests of grammars in tests/test-grammar-integration.cpp that name no token."""
    for name, grammar, good, bad in CASE.findall(
        (folder / "tests" / "test-grammar-integration.cpp").read_text(encoding="utf-8")
    ):
        if "token(" not in good + bad:
            yield Case(name, grammar, texts_of(good), texts_of(bad))


def texts_of(code: str) -> list[str]:
    raw = re.findall(r'R"""\((.*?)\)"""', code, re.DOTALL)
    rest = re.sub(r"//[^\n]*", "", re.sub(r'R"""\(.*?\)"""', "", code, flags=re.DOTALL)) if raw else code
    rest = re.sub(r"\n\s*//[^\n]*", "\n", rest)
    return raw + [
        re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[1]), "".join(parts)) for parts in literals_of(rest)
    ]


def literals_of(code: str) -> Iterator[list[str]]:
    """The texts of a list; those with only white space between them are one."""
    last = None
    parts: list[str] = []
    for found in LITERAL.finditer(code):
        if last is not None and code[last : found.start()].strip():
            yield parts
            parts = []
        parts.append(found[1])
        last = found.end()
    if parts:
        yield parts


def grammars_of(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Name, grammar, and whether llama.cpp takes it: of its folder grammars/, and its parser's tests."""
    for file in sorted((folder / "grammars").glob("*.gbnf")):
        yield file.name, file.read_text(encoding="utf-8"), True
    for name in ("test-grammar-parser.cpp", "test-grammar-integration.cpp"):
        code = (folder / "tests" / name).read_text(encoding="utf-8")
        for number, (negation, kind, grammar) in enumerate(BUILT.findall(code)):
            yield f"{name} {number}", grammar, kind == "parsing" or bool(negation)
    for case in cases_of(folder):
        yield case.name, case.grammar, True


def refusal(grammar: str) -> str:
    """Why the gateway refuses a grammar; empty: it takes it."""
    try:
        check_grammar(Constraint("gbnf", grammar))
    except Invalid as error:
        return str(error)
    return ""


def drawn(rng: random.Random, num_rules: int = 3, depth: int = 3) -> str:
    """A grammar by chance, over the letters a to c."""
    names = ["root", *(f"rule-{number}" for number in range(1, num_rules))]

    def node(left: int) -> str:
        kind = rng.random()
        if left == 0 or kind < 0.35:
            return rng.choice(['"a"', '"ab"', '"b"', '"c"', '"abc"', "[ab]", "[^a]", "[b-c]", '""', ".", *names[1:]])
        if kind < 0.6:
            return f"{group(left - 1)}{rng.choice(['*', '+', '?', '{0}', '{2}', '{1,2}', '{1,}'])}"
        if kind < 0.8:
            return f"{group(left - 1)} {group(left - 1)}"
        return f"({node(left - 1)} | {node(left - 1)})"

    def group(left: int) -> str:
        return f"({node(left)})"

    return "\n".join(f"{name} ::= {node(depth)}" for name in names)
