"""The grammars' library, asked what it takes, and regular expressions for what it does not know: dates
of the calendar, all texts but some."""

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from services.requests.text.schemas.expressions import written
from shared.model.constraint import Constraint
from shared.model.grammar import ByteVocabulary, limits_of

UNSATISFIABLE = "Unsatisfiable schema: "  # the library's word
MAX_WORDS = 4000  # characters of the texts that another must not be
MAX_WORD = 200  # characters of one of them

YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"  # 0001 to 9999
DIVISIBLE_BY_4 = "(?:0[48]|[2468][048]|[13579][26])"
LEAP_YEAR = f"(?:[0-9]{{2}}{DIVISIBLE_BY_4}|{DIVISIBLE_BY_4}00)"
DAY = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
DATE = f"(?:{YEAR}-(?:{DAY})|{LEAP_YEAR}-02-29)"
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}[Tt]{TIME}$"}

ANYTHING = r"[\s\S]*"
ONE_CLASS = re.compile(
    r"\^(?:\[(?P<negative>\^?)(?P<letters>(?:[^\]\\]|\\.)+)\]|(?P<escape>\\[sSdDwW]))(?P<times>[+*])\$"
)


@lru_cache(maxsize=4096)
def refusal(text: str) -> str:
    """The library's words against any part of a schema, given as JSON; empty if it takes all."""
    is_error, reasons = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(text), None)
    return " ".join(reasons) or ("refused" if is_error else "")


def is_supported(schema: Mapping[str, Any]) -> bool:
    return not refusal(json.dumps(schema))


def unsupported_keyword(beside: Mapping[str, Any], keywords: dict[str, Any]) -> str | None:
    """The first of the keywords that the library can't enforce beside what is given; None if it can
    enforce them all."""
    for key, some in [*((key, {key: value}) for key, value in keywords.items()), (next(reversed(keywords)), keywords)]:
        if (reason := refusal(json.dumps({**beside, **some}))) and UNSATISFIABLE not in reason:
            return key
    return None


@lru_cache(maxsize=4096)
def has_more(text: str, beginning: str) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
    matcher = LLMatcher(
        ByteVocabulary(()).tokenizer(), grammar, log_level=0, limits=limits_of(Constraint("json_schema", text))
    )
    if matcher.is_error():
        return True
    matcher.consume_tokens(list(beginning.encode()))
    matcher.compute_bitmask()
    return not matcher.get_error().startswith("NoExtension")


def goes_on(schema: Mapping[str, Any], beginning: str) -> bool:
    """Whether an answer that begins so may go on; a schema that is too complex for the library may."""
    return has_more(json.dumps(schema), beginning)


def matches_all(pattern: str) -> bool:
    """Whether a pattern plainly matches every text: it has no anchor, and matches the empty text."""
    try:
        return not {"^", "$"} & set(pattern.replace("[^", "[")) and re.search(pattern, "") is not None
    except (re.error, OverflowError, RecursionError, ValueError):
        return False


def formatted(name: str) -> dict[str, Any] | None:
    """A format as keywords that the library takes; None if it knows no such format."""
    if name in FORMATS:
        return {"pattern": FORMATS[name]}
    return {"format": name} if is_supported({"type": "string", "format": name}) else None


def expressed(pattern: str) -> str | None:
    """The pattern in the library's syntax; None if the library can't match it."""
    made = written(pattern)
    return made if made is not None and is_supported({"type": "string", "pattern": made}) else None


def excluding_texts(texts: Iterable[str]) -> str | None:
    """A pattern of all texts but these, in the library's syntax; None if they are too long."""
    words = set(texts)
    if sum(map(len, words)) > MAX_WORDS or max(map(len, words), default=0) >= MAX_WORD:
        return None
    tree: dict[str, Any] = {}
    for word in sorted(words):
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node["end"] = True
    return written(f"^{_all_but(tree)}$")


def complement(pattern: str) -> str | None:
    """A pattern of the texts that do not match, in the library's syntax, for a pattern that is one class
    of letters, repeated (`^\\s*$`); None for others."""
    if (match := ONE_CLASS.fullmatch(pattern)) is None:
        return None
    of_class = f"[{match['letters']}]" if match["negative"] else f"[^{match['letters']}]"
    others = match["escape"].swapcase() if match["escape"] is not None else of_class
    return expressed(others if match["times"] == "*" else f"^$|{others}")


def are_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the library sees that no text is of both."""
    return UNSATISFIABLE in refusal(json.dumps({"type": "string", "allOf": [one, other]}))


def _all_but(node: Mapping[str, Any]) -> str:
    """The pattern of what may follow at a node of the tree of forbidden texts, of which one ends where
    there is an `end`."""
    letters = [letter for letter in node if letter != "end"]
    alternatives = [] if "end" in node else [""]
    alternatives.append(f"[^{''.join(map(_in_class, letters))}]{ANYTHING}" if letters else f"[\\s\\S]{ANYTHING}")
    alternatives += [re.escape(letter) + _all_but(node[letter]) for letter in letters]
    return f"(?:{'|'.join(alternatives)})"


def _in_class(letter: str) -> str:
    return f"\\{letter}" if letter in "\\]^-[&~" else letter
