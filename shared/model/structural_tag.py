"""vLLM's structural tags as a grammar: free text in which what begins like a tag must go on like
one.

Two forms: `{"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers":
[…]}`, and `{"type": "structural_tag", "format": {…}}`, a tree of const_string, any_text,
json_schema, regex, grammar, sequence, or, tag, triggered_tags and tags_with_separator.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from shared.process.errors import Invalid

ANY_TEXT = r"/(.|\n)*/"
SPACE = r"/[ \t\n\r]{0,8}/"  # between a thought and the answer
EMPTY = '""'
MAX_DEPTH = 32
MAX_TAGS = 1000


def structural_tag_grammar(
    value: Any, *, special_tokens: Mapping[str, int], make_regex: Callable[[str], str], json_options: Mapping[str, Any]
) -> str:
    """llguidance's grammar. special_tokens: by text, those that stand as one token where a tag
    spells them. Raises Invalid."""
    if not isinstance(value, dict):
        raise Invalid("a structural tag is an object")
    writer = _Writer(special_tokens, make_regex, json_options)
    writer.rules["start"] = writer.format(value["format"] if "format" in value else _triggered_tags_of(value), 0)
    lark = "%llguidance {}\n" + "".join(f"{name}: {rule}\n" for name, rule in writer.rules.items())
    return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": lark}, *writer.grammars]})


def thought_grammar(begin: str, end: str, answer: str, special_tokens: Mapping[str, int]) -> str:
    """A thought and, behind it, the grammar of that name, in Lark's syntax. Without begin the
    thought has begun; with it, it may be left out. Where begin is the end, nothing is between."""
    writer = _Writer(special_tokens, str, {})
    thought = f"{writer.text(begin)} {writer.text_until(end) if begin != end else ''} {writer.rule(SPACE)}"
    writer.rules["start"] = f"({thought}){'?' if begin else ''} @{answer}"
    return "%llguidance {}\n" + "".join(f"{name}: {rule}\n" for name, rule in writer.rules.items())


def _triggered_tags_of(value: dict[str, Any]) -> dict[str, Any]:
    """The first form as the second."""
    tags = [
        {
            "type": "tag",
            "begin": _get(each, "begin", str),
            "content": {"type": "json_schema", "json_schema": each.get("schema", True)},
            "end": _get(each, "end", str),
        }
        for each in _objects(value, "structures")
    ]
    return {"type": "triggered_tags", "triggers": _get(value, "triggers", list), "tags": tags}


class _Writer:
    """Collects the rules of one grammar, and the grammars that stand in it whole."""

    def __init__(
        self, special_tokens: Mapping[str, int], make_regex: Callable[[str], str], json_options: Mapping[str, Any]
    ) -> None:
        self.special_tokens = special_tokens
        self.make_regex = make_regex
        self.json_options = json_options
        self.rules: dict[str, str] = {}
        self.grammars: list[dict[str, str]] = []

    def format(self, value: Any, depth: int) -> str:
        """A node of the tree as an expression."""
        if depth > MAX_DEPTH:
            raise Invalid(f"a structural tag is at most {MAX_DEPTH} levels deep")
        if not isinstance(value, dict):
            raise Invalid("a format is an object")
        writers: dict[Any, Callable[[], str]] = {
            "const_string": lambda: self.text(_get(value, "value", str)) or EMPTY,
            "any_text": lambda: self.rule(ANY_TEXT),
            "json_schema": lambda: self.schema(value.get("json_schema", True)),
            "regex": lambda: self.rule(f"/{self.make_regex(_get(value, 'pattern', str))}/"),
            "grammar": lambda: self.grammar(_get(value, "grammar", str)),
            "sequence": lambda: f"({' '.join(self.elements(value, depth))})",
            "or": lambda: f"({' | '.join(self.elements(value, depth))})",
            "tag": lambda: self.tag(value, "", depth),
            "triggered_tags": lambda: self.triggered_tags(value, depth),
            "tags_with_separator": lambda: self.tags_with_separator(value, depth),
        }
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in writers:
            raise Invalid(f"there is no format {kind!r}, only {', '.join(writers)}")
        return writers[kind]()

    def elements(self, value: dict[str, Any], depth: int) -> list[str]:
        return [self.format(each, depth + 1) for each in _objects(value, "elements")]

    def tag(self, value: dict[str, Any], trigger: str, depth: int) -> str:
        """A tag after its trigger, which its begin begins with."""
        begin = self.text(_get(value, "begin", str)[len(trigger) :])
        content, end = value.get("content"), value.get("end", "")
        ends = [each for each in (end if isinstance(end, list) else [end]) if isinstance(each, str)]
        if not ends:
            raise Invalid("the end of a tag is a text, or a list of texts")
        if isinstance(content, dict) and content.get("type") == "any_text":
            return f"({begin} ({' | '.join(self.text_until(each) for each in ends)}))"
        return f"({begin} {self.format(content, depth + 1)} ({' | '.join(self.text(each) or EMPTY for each in ends)}))"

    def triggered_tags(self, value: dict[str, Any], depth: int) -> str:
        triggers, tags = _get(value, "triggers", list), _objects(value, "tags")
        if not triggers or not all(isinstance(each, str) and each for each in triggers):
            raise Invalid("triggers takes texts, at least one")
        units = []
        for trigger in triggers:
            bodies = [self.tag(tag, trigger, depth) for tag in tags if _get(tag, "begin", str).startswith(trigger)]
            if bodies:
                units.append(f"{self.text_until(trigger)} ({' | '.join(bodies)})")
        if any(not any(_get(tag, "begin", str).startswith(trigger) for trigger in triggers) for tag in tags):
            raise Invalid("every tag begins with one of the triggers")
        unit = self.rule(" | ".join(units))
        if value.get("stop_after_first"):
            return unit if value.get("at_least_one") else f"({unit} | {self.rule(ANY_TEXT)})"
        return f"({unit}{'+' if value.get('at_least_one') else '*'} {self.rule(ANY_TEXT)})"

    def tags_with_separator(self, value: dict[str, Any], depth: int) -> str:
        tag = self.rule(" | ".join(self.tag(each, "", depth) for each in _objects(value, "tags")))
        max_tags = value.get("max_tags")
        if max_tags is not None and (
            isinstance(max_tags, bool) or not isinstance(max_tags, int) or not 1 <= max_tags <= MAX_TAGS
        ):
            raise Invalid(f"max_tags is a number from 1 to {MAX_TAGS}")
        times = "*" if max_tags is None else f"{{0,{max_tags - 1}}}"
        more = (
            ""
            if value.get("stop_after_first") or max_tags == 1
            else f" ({self.text(_get(value, 'separator', str))} {tag}){times}"
        )
        return f"({tag}{more})" if value.get("at_least_one") else f"({tag}{more})?"

    def schema(self, schema: Any) -> str:
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise Invalid("a JSON schema is an object")
        own = schema.get("x-guidance", {})
        if not isinstance(own, dict):
            raise Invalid("x-guidance is an object")
        options = {**self.json_options, **own}
        if "whitespace_flexible" in own:  # a pattern, ours too, would override it
            options.pop("whitespace_pattern", None)
        return f"%json {json.dumps({**schema, 'x-guidance': options})}"

    def grammar(self, lark: str) -> str:
        """A grammar of its own, by reference."""
        name = f"grammar_{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def text(self, text: str) -> str:
        """A text as it is spelt, its special tokens as tokens; nothing for none."""
        parts, rest = [], text
        while rest:
            names = [(rest.find(name), -len(name), name) for name in self.special_tokens if name in rest]
            at, _, name = min(names, default=(len(rest), 0, ""))
            parts += [json.dumps(rest[:at], ensure_ascii=False)] if at else []
            parts += [f"<[{self.special_tokens[name]}]>"] if name else []
            rest = rest[at + len(name) :]
        return " ".join(parts)

    def text_until(self, end: str) -> str:
        """Any text up to the first `end`, and that; without an end, any text."""
        special = next(
            (name for name in sorted(self.special_tokens, key=len, reverse=True) if end.startswith(name)), None
        )
        if special is not None:
            return f"{self.rule(ANY_TEXT)} {self.text(end)}"
        return (
            self.rule(f"{ANY_TEXT} {json.dumps(end, ensure_ascii=False)}", is_lazy=True) if end else self.rule(ANY_TEXT)
        )

    def rule(self, rule: str, *, is_lazy: bool = False) -> str:
        """A rule of its own, by name."""
        name = f"r{len(self.rules)}"
        self.rules[f"{name}[lazy]" if is_lazy else name] = rule
        return name


def _get(value: Any, name: str, kind: type) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get(name), kind):
        raise Invalid(f"{name} is missing, or not a {'text' if kind is str else 'list'}")
    return value[name]


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    items = _get(value, name, list)
    if not items or not all(isinstance(item, dict) for item in items):
        raise Invalid(f"{name} takes objects, at least one")
    return list(items)
