"""Patterns by chance, and whether the answers that a grammar allows for them match, by Python's
engine and, where it is installed, ECMA 262's.
"""

import json
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from services.requests.text.schemas.prepare import prepare
from services.requests.workers.grammars.answer_worker import problems_of
from shared.model.constraint import Constraint
from shared.model.grammar import compile_grammar
from shared.process.errors import Invalid
from tests.grammars.generate import vocabulary
from tests.grammars.walk import walk_from

LETTERS = [
    *'ab"\\/-]^[.{}x0 _é\n',
    '\\"',
    "\\\\",
    r"\d",
    r"\w",
    r"\s",
    r"\D",
    r"\W",
    r"\S",
    r"\.",
    r"\/",
    r"\-",
    r"\]",
    r"\[",
    r"\n",
    r"\t",
    r"\x22",
    r"\u0022",
    r"\x5c",
    r"\x00",
    r"\x1f",
    r"\u2028",
]
IN_CLASSES = [
    "a-z",
    "0-9",
    '"',
    r"\\",
    r"\"",
    " -~",
    r"\x00-\x1f",
    r"\x00-!",
    r"\w",
    r"\d",
    r"\s",
    r"\S",
    r"\D",
    r"\W",
    r"\]",
    "-",
    ".",
    "&&",
    "[",
    r"\r\n",
    "é",
    "^",
    r"\x7f",
]
TIMES = [*[""] * 5, "*", "+", "?", "{2}", "{1,3}", "{0,2}", "*?", "{2,}"]
WALKS = 12


def drawn(rng: random.Random) -> str:
    """A pattern that Python reads."""
    while True:
        pattern = placed(options(rng, 2), rng)
        with warnings.catch_warnings(action="ignore"):
            try:
                re.compile(pattern)
            except re.error:
                continue
        return pattern


def placed(inner: str, rng: random.Random) -> str:
    kinds = [f"^(?:{inner})$"] * 6 + [f"^{inner}", f"{inner}$", f"(^{inner}|b)c$", inner]
    return rng.choice(kinds)


def options(rng: random.Random, depth: int) -> str:
    return "|".join(
        "".join(part(rng, depth) for _ in range(rng.randint(1, 3))) for _ in range(rng.choice([1, 1, 1, 2]))
    )


def part(rng: random.Random, depth: int) -> str:
    chance = rng.random()
    if chance < 0.4:
        letters = f"[{'^' * (rng.random() < 0.6)}{''.join(rng.choice(IN_CLASSES) for _ in range(rng.randint(1, 4)))}]"
        return letters + rng.choice(TIMES)
    if chance < 0.6 and depth:  # repeated without a bound, Python's engine might never end
        return f"{rng.choice(['(', '(?:'])}{options(rng, depth - 1)}){rng.choice(['', '?', '{2}'])}"
    return ("." if chance < 0.7 else rng.choice(LETTERS)) + rng.choice(TIMES)


# Where a pattern may stand
PLACES: dict[str, Callable[[str], Any]] = {
    "pattern": lambda pattern: {"type": "string", "pattern": pattern},
    "pattern and lengths": lambda pattern: {"type": "string", "pattern": pattern, "minLength": 1, "maxLength": 4},
    "patternProperties": lambda pattern: {
        "type": "object",
        "patternProperties": {pattern: {"type": "integer"}},
        "additionalProperties": {"type": "boolean"},
    },
    "propertyNames": lambda pattern: {
        "type": "object",
        "propertyNames": {"pattern": pattern},
        "additionalProperties": {"type": "null"},
    },
    "not": lambda pattern: {"type": "string", "not": {"pattern": pattern}},
}


def of_patterns(count: int, seed: int, counts: Counter[str]) -> list[str]:
    """Answers that break their pattern, though it is enforced."""
    rng, wrong = random.Random(seed), list[str]()
    for _ in range(count):
        pattern, place = drawn(rng), rng.choice([*PLACES])
        schema = PLACES[place](pattern)
        try:
            beginning = compile_grammar(prepare(Constraint("json_schema", json.dumps(schema))).constraint, vocabulary())
        except Invalid:
            counts[f"{place}: refused"] += 1
            continue
        counts[f"{place}: taken"] += 1
        for number in range(WALKS):
            answer = walk_from(beginning, seed=number, max_tokens=60, min_ending=6)
            counts[answer.finish_reason] += 1
            if answer.finish_reason == "stop" and not keeps(
                answer.text, schema, pattern if place.startswith("pattern and") or place == "pattern" else None
            ):
                wrong.append(f"{answer.text!r} for {schema!r}")
    return wrong


def keeps(text: str, schema: Any, pattern: str | None) -> bool:
    """Whether an answer keeps to its schema, and its text to the pattern."""
    with warnings.catch_warnings(action="ignore"):
        return not problems_of(schema, text) and (
            pattern is None or (engine := ecma()) is None or engine(pattern, json.loads(text))
        )


@cache
def ecma() -> Callable[[str, str], bool] | None:
    """ECMA 262's engine, of the package regress; None: it is not installed. What it does not read matches."""
    try:
        import regress
    except ImportError:
        return None

    def matches(pattern: str, text: str) -> bool:
        try:
            return regress.Regex(pattern).find(text) is not None
        except regress.RegressError:
            return True

    return matches
