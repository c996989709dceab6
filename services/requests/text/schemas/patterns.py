"""Regular expressions for what the grammars' library has no word for: dates of the calendar,
look-ahead at the beginning, all texts but some."""

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
MAX_CLASS = 64  # alternatives of one group

YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"  # 0001 to 9999
DIVISIBLE_BY_4 = "(?:0[48]|[2468][048]|[13579][26])"
LEAP_YEAR = f"(?:[0-9]{{2}}{DIVISIBLE_BY_4}|{DIVISIBLE_BY_4}00)"
DATE = f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP_YEAR}-02-29)"
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}[Tt]{TIME}$"}

ANYTHING = r"[\s\S]*"
LOOK_AHEAD = re.compile(r"\(\?([=!])")
ONE_CLASS = re.compile(r"\^(?:\[(?P<negative>\^?)(?P<letters>(?:[^\]\\]|\\.)+)\]|(?P<escape>\\[sSdDwW]))(?P<times>[+*])\$")
LITERALS = re.compile(r"(?:[^\\^$.|?*+()\[\]{}]|\\[^\w\s])+")


@lru_cache(maxsize=4096)
def refusal(text: str) -> str:
    """The library's words against any part of a schema, given as JSON; empty: there are none."""
    is_error, told = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(text), None)
    return " ".join(told) or ("refused" if is_error else "")


def takes(schema: Mapping[str, Any]) -> bool:
    return not refusal(json.dumps(schema))


def unsayable(beside: Mapping[str, Any], keywords: dict[str, Any]) -> str | None:
    """The first of the keywords that the library has no words for, beside what is given; None: it says
    them all."""
    for key, some in [*((key, {key: value}) for key, value in keywords.items()), (next(reversed(keywords)), keywords)]:
        if (told := refusal(json.dumps({**beside, **some}))) and UNSATISFIABLE not in told:
            return key
    return None


@lru_cache(maxsize=4096)
def has_more(text: str, beginning: str) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
    matcher = LLMatcher(ByteVocabulary(()).tokenizer(), grammar, log_level=0, limits=limits_of(Constraint("json_schema", text)))
    if matcher.is_error():
        return True
    matcher.consume_tokens(list(beginning.encode()))
    matcher.compute_bitmask()
    return not matcher.get_error().startswith("NoExtension")


def goes_on(schema: Mapping[str, Any], beginning: str) -> bool:
    """Whether something may follow in an answer that begins so; what is too complex may go on."""
    return has_more(json.dumps(schema), beginning)


def matches_all(pattern: str) -> bool:
    """Whether a pattern plainly matches every text: it looks at no end, and matches the empty
    text."""
    try:
        return not {"^", "$"} & set(pattern.replace("[^", "[")) and re.search(pattern, "") is not None
    except re.error:
        return False


def formatted(name: str) -> dict[str, Any] | None:
    """A schema of the texts of a format; None: the format says nothing here."""
    if name in FORMATS:
        return {"type": "string", "pattern": FORMATS[name]}
    return {"type": "string", "format": name} if takes({"type": "string", "format": name}) else None


def expressed(pattern: str) -> str | None:
    """The pattern in the library's words; None: it has none."""
    made = written(pattern)
    return made if made is not None and takes({"type": "string", "pattern": made}) else None


def matched(pattern: str) -> list[dict[str, Any]] | None:
    """Schemas of which all hold for the texts that match; None: the library can't say it."""
    made = [expressed(each) for each in _without_look_ahead(pattern) or [pattern]]
    return [{"type": "string", "pattern": each} for each in made] if None not in made else None


def _without_look_ahead(pattern: str) -> list[str] | None:
    """`^(?=a)(?!b|c)d` as patterns that must all match; None: there is no look-ahead, or one that
    stands elsewhere or forbids more than literal texts."""
    if not pattern.startswith("^"):
        return None
    rest, made = pattern[1:], []
    while begin := LOOK_AHEAD.match(rest):
        if (end := _end_of_group(rest)) is None:
            return None
        inner, rest = rest[begin.end() : end], rest[end + 1 :]
        if begin[1] == "=":
            made.append(f"^(?:{inner})")
        elif (words := _literals(inner)) is None:
            return None
        else:
            made.append(excluding(words))
    return [*made, f"^{rest}"] if made else None


def _end_of_group(pattern: str) -> int | None:
    """Find the end of the group that the pattern begins with."""
    depth, is_class, number = 0, False, 0
    while number < len(pattern):
        letter = pattern[number]
        if letter == "\\":
            number += 1
        elif is_class:
            is_class = letter != "]"
        elif letter == "[":
            is_class = True
        elif letter in "()":
            depth += 1 if letter == "(" else -1
            if depth == 0:
                return number
        number += 1
    return None


def _literals(alternatives: str) -> dict[str, bool] | None:
    """The texts of `a|b$`, each with whether it is forbidden as a beginning, not only as the
    whole."""
    inner = alternatives
    while inner.startswith(("(?:", "(")) and _end_of_group(inner) == len(inner) - 1:
        inner = inner[3:-1] if inner.startswith("(?:") else inner[1:-1]
    words: dict[str, bool] = {}
    for each in inner.split("|"):
        is_beginning = not each.endswith("$")
        word = each.removesuffix("$").removesuffix(".*") if is_beginning else each[:-1]
        if not LITERALS.fullmatch(word) or len(words) > MAX_CLASS:
            return None
        words[re.sub(r"\\(.)", r"\1", word)] = is_beginning
    return words


def excluding(words: Mapping[str, bool]) -> str:
    """A pattern of all texts but these. True: none that begins with it, either."""
    tree: dict[str, Any] = {}
    for word, is_beginning in words.items():
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node["end"] = is_beginning or node.get("end", False)
    return f"^{_all_but(tree)}$"


def excluding_texts(texts: Iterable[str]) -> str | None:
    """A pattern of all texts but these, in the library's words; None: they are too long."""
    words = dict.fromkeys(texts, False)
    return written(excluding(words)) if sum(map(len, words)) <= MAX_WORDS and max(map(len, words), default=0) < 200 else None


def complement(pattern: str) -> str | None:
    """A pattern, in the library's words, of the texts that do not match, for patterns that are a
    list of literal texts or a class of letters, repeated; None: for others."""
    if (found := ONE_CLASS.fullmatch(pattern)) is not None:
        of_class = f"[{found['letters']}]" if found["negative"] else f"[^{found['letters']}]"
        others = found["escape"].swapcase() if found["escape"] is not None else of_class
        made = others if found["times"] == "*" else f"^$|{others}"
    elif pattern.startswith("^") and (words := _literals(pattern[1:])) is not None:
        made = excluding(words)
    else:
        return None
    return expressed(made)


def are_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the library sees that no text is of both."""
    return UNSATISFIABLE in refusal(json.dumps({"type": "string", "allOf": [one, other]}))


def _all_but(node: Mapping[str, Any]) -> str:
    """The pattern of what may follow at a node of the tree of forbidden texts. `end`: whether one
    ends here, as the whole (False) or a beginning (True)."""
    letters = [letter for letter in node if letter != "end"]
    alternatives = [] if "end" in node else [""]
    alternatives.append(f"[^{''.join(map(_in_class, letters))}]{ANYTHING}" if letters else f"[\\s\\S]{ANYTHING}")
    alternatives += [re.escape(letter) + _all_but(node[letter]) for letter in letters if not node[letter].get("end", False)]
    return f"(?:{'|'.join(alternatives)})"


def _in_class(letter: str) -> str:
    return f"\\{letter}" if letter in "\\]^-[&~" else letter
