"""A JSON schema in the words that the grammars' library knows: what it has none for is said by
others, or passed over and named.

No answer that keeps to the rewritten schema breaks the keywords that were rewritten. Where a
keyword allows more than can be said (`contains` at any place of a list), the rewritten one allows
less.
"""

import json
import time
from typing import Any, Literal

import referencing.exceptions

from services.requests.text.schemas import objects
from services.requests.text.schemas.bounds import NUMBERS, bounds_of, exclusive_bounds
from services.requests.text.schemas.drafts import ignores_siblings, resolver_of, specification_of
from services.requests.text.schemas.negate import Json, either, negated
from services.requests.text.schemas.objects import table, texts
from services.requests.text.schemas.one_of import exclusive
from services.requests.text.schemas.patterns import expressed, formatted, matched, matches_all, takes
from services.requests.text.schemas.values import is_contradictory, keeps_to, orders, said_of_strings, sequence
from shared.process.errors import Invalid

TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
SCALARS = {"type", "minLength", "maxLength", "pattern", *NUMBERS}  # keywords that a listed value keeps to or not
MAX_PLACES = 6  # of a list in which `contains` is looked for
OneOf = Literal["exclusive", "kept", "any"]
HELD = "#/$defs/"
MAX_UNIQUE = 4  # values of which all lists without a double are listed
MAX_OPTIONAL = 900  # properties of an object that the library takes; further ones are patterns
MAX_PATTERNS = 32  # that these become
NOT_LISTS = [each for each in TYPES if each not in ("array", "integer")]
COMPOSING = {"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas", "$dynamicRef"}


class Malformed(Invalid):
    """The schema is none at all, strict or not."""


class TooLarge(Invalid):
    """The schema asks for more work than it gets."""


class Rewriter:
    """One schema's. passed_over: the names of what is not enforced, with whether an answer can be
    checked for it."""

    def __init__(self, schema: Any, *, is_thorough: bool = True, one_of: OneOf = "exclusive", deadline: float = float("inf")) -> None:
        """is_thorough: rewrite also what multiplies alternatives.

        one_of: what becomes of options that are not plainly disjoint: each without the others, left
        to the library, or an anyOf.
        deadline: by this process's time, in seconds; then the methods raise TooLarge.
        """
        self.schema = schema
        self.deadline = deadline
        self.is_thorough = is_thorough
        self.one_of = one_of
        self.passed_over: dict[str, bool] = {}
        self.has_open_names = False  # beside the properties that an object lists
        self.specification = specification_of(schema)
        self.ignores_siblings = ignores_siblings(schema)
        self._names: dict[int, str] = {}  # of what is referred to, by identity
        self._open: list[tuple[str, Any, Any]] = []
        self.held: dict[str, Any] = {}

    def rewritten(self) -> Any:
        """Raises Malformed for what is no schema, TooLarge."""
        made = self.walk(self.schema, resolver_of(self.schema))
        while self._open:
            name, node, resolver = self._open.pop()
            self.held[name] = self.walk(node, resolver)
        if not isinstance(made, dict) or not self.held:
            return made
        for name in self.held:
            self._check_end(name)
        return {**made, "$defs": self.held}

    def _check_end(self, name: str) -> None:
        """Raises Malformed for a reference that refers to nothing but itself."""
        seen = set()
        while (node := self.held.get(name)) and set(node) == {"$ref"}:
            if name in seen:
                raise Malformed("a $ref refers to itself")
            seen.add(name)
            name = node["$ref"].removeprefix(HELD)

    def check_time(self) -> None:
        if time.process_time() > self.deadline:
            raise TooLarge("it is too large")

    def walk(self, node: Any, resolver: Any) -> Any:
        """A node, rewritten."""
        self.check_time()
        if isinstance(node, bool):
            return {} if node else False
        if not isinstance(node, dict):
            raise Malformed("a JSON schema is an object")
        if isinstance(node.get("$id"), str) and node is not self.schema:
            resolver = resolver.in_subresource(self.specification.create_resource(node))
        if "$ref" in node and self.ignores_siblings:
            node = {"$ref": node["$ref"]}
        out: Json = {}
        more: list[Any] = []
        for write in (self._values, self._numbers, self._text, self._list, self._properties, self._references, self._composed):
            write(node, out, more, resolver)
        if (bundled := objects.bundled(out, MAX_OPTIONAL, MAX_PATTERNS)) is None:
            raise TooLarge(f"an object has more than {MAX_OPTIONAL} optional properties, with more than {MAX_PATTERNS} different schemas")
        return self._joined(bundled, more)

    def _joined(self, out: Json, more: list[Any]) -> Any:
        more = [each for each in more if each != {}]
        if is_contradictory(out):
            return False
        if any(each is False or each == {"not": {}} for each in more):
            return False
        if not more:
            return out
        out, *more = objects.with_names_that_end([out, *more])
        if not out and len(more) == 1:
            return more[0]
        if len(more) == 1 and not set(more[0]) & set(out) and set(more[0]) <= {"pattern", "format", "anyOf"}:
            return {**out, **more[0]}
        return {**out, "allOf": more}

    def pass_over(self, name: str, *, is_checkable: bool = True) -> None:
        self.passed_over[name] = self.passed_over.get(name, False) or is_checkable

    def found(self, reference: Any, resolver: Any) -> tuple[Any, Any] | None:
        """Resolve a reference: its target and the resolver there; None: it is not in the schema."""
        try:
            resolved = resolver.lookup(reference)
        except (referencing.exceptions.Unresolvable, ValueError, AttributeError, TypeError):
            return None
        return resolved.contents, resolved.resolver

    # Each of the following writes its keywords of a node into `out`, or what must hold, too, into `more`

    def _values(self, node: Json, out: Json, more: list[Any], _: Any) -> None:
        names = node.get("type")
        if names is not None:
            listed = names if isinstance(names, list) else [names]
            if unknown := [each for each in listed if each not in (*TYPES, "any")]:
                raise Malformed(f"there is no type {json.dumps(unknown[0])[:40]}")
            if listed and "any" not in listed:  # of draft 3
                out["type"] = names
        for key in ("enum", "const"):
            if key in node and (key == "const" or (isinstance(node[key], list) and node[key])):
                own = {name: each for name, each in {**node, **exclusive_bounds(node)}.items() if name in SCALARS}
                kept = [each for each in (node[key] if key == "enum" else [node[key]]) if keeps_to(each, own)]
                out.pop("type", None)
                more.append({"enum": kept} if kept else False)

    def _numbers(self, node: Json, out: Json, _: list[Any], __: Any) -> None:
        if "enum" in node or "const" in node:
            return
        said, unsaid = bounds_of(node, {"type": out["type"]} if "type" in out else {})
        out |= said
        for key, is_checkable in unsaid.items():
            self.pass_over(key, is_checkable=is_checkable)

    def _text(self, node: Json, _: Json, more: list[Any], __: Any) -> None:
        if "enum" in node or "const" in node:
            return
        if isinstance(pattern := node.get("pattern"), str):
            said = matched(pattern)
            if said is None:
                self.pass_over("pattern")
            more += said_of_strings(said or [])
        if isinstance(name := node.get("format"), str):
            schema = formatted(name)
            if schema is None:
                self.pass_over(f"format {name[:32]}", is_checkable=False)
            else:
                more += said_of_strings([schema])

    def _list(self, node: Json, out: Json, more: list[Any], resolver: Any) -> None:
        items, first = node.get("items"), node.get("prefixItems")
        if isinstance(items, list):
            first, items = items, node.get("additionalItems")
        if isinstance(first, list):
            out["prefixItems"] = [self.walk(each, resolver) for each in first]
        if isinstance(items, dict | bool):
            out["items"] = self.walk(items, resolver)
        if node.get("uniqueItems") is True and not (isinstance(node.get("maxItems"), int) and node["maxItems"] <= 1):
            self._unique(node, more)
        if "contains" in node:
            self._contains(node, out, more, resolver)
        if "unevaluatedItems" in node and node["unevaluatedItems"] is not True:
            if not COMPOSING & set(node) and "items" not in node:
                out["items"] = self.walk(node["unevaluatedItems"], resolver)
            else:
                self.pass_over("unevaluatedItems")

    def _unique(self, node: Json, more: list[Any]) -> None:
        """Few values can be listed in all their orders."""
        items = node.get("items")
        values = items.get("enum") if isinstance(items, dict) else None
        if not isinstance(values, list) or not 0 < len(values) <= MAX_UNIQUE or "prefixItems" in node:
            return self.pass_over("uniqueItems")
        more.append({"anyOf": [sequence(each) for each in orders(values)]})
        return None

    def _contains(self, node: Json, out: Json, more: list[Any], resolver: Any) -> None:
        least, most = node.get("minContains", 1), node.get("maxContains")
        if least == 0 and most is None:
            return
        if least != 1 or most is not None or not self.is_thorough:
            return self.pass_over("contains")
        inner, before, rest = self.walk(node["contains"], resolver), out.get("prefixItems", []), out.get("items", {})
        places = []
        for number in range(max(MAX_PLACES, len(before))):
            at = [before[place] if place < len(before) else rest for place in range(number + 1)]
            places.append({"type": "array", "prefixItems": [*at[:-1], {"allOf": [at[-1], inner]} if at[-1] != {} else inner], "minItems": number + 1})
        more.append({"anyOf": places} if node.get("type") == "array" else {"anyOf": [{"type": NOT_LISTS}, *places]})
        return None

    def _properties(self, node: Json, out: Json, more: list[Any], resolver: Any) -> None:
        if isinstance(node.get("properties"), dict):
            out["properties"] = {name: self.walk(each, resolver) for name, each in node["properties"].items() if isinstance(each, dict | bool)}
        if required := texts(node.get("required")):
            out["required"] = required
        if (rest := node.get("additionalProperties")) not in (None, True, {}) and isinstance(rest, dict | bool):
            out["additionalProperties"] = self.walk(rest, resolver)
        self._pattern_properties(node, out, resolver)
        self._names_of_properties(node, out)
        self.has_open_names |= bool({"properties", "patternProperties"} & out.keys()) and out.get("additionalProperties") is not False
        if self.is_thorough:
            self._dependents(node, more, resolver)
            self._counts(node, out, more)
            self._unevaluated(node, more, resolver)
        else:
            for key in ("dependencies", "dependentRequired", "dependentSchemas", "minProperties", "maxProperties", "unevaluatedProperties"):
                if node.get(key) not in (None, {}):
                    self.pass_over(key)

    def _pattern_properties(self, node: Json, out: Json, resolver: Any) -> None:
        made: Json = {}
        for pattern, each in table(node.get("patternProperties")).items():
            self.check_time()
            words = expressed(pattern)
            if words is not None and takes({"type": "object", "patternProperties": dict.fromkeys([*made, words], {})}):
                said = self.walk(each, resolver)
                if can_go_on := objects.can_go_on(out.get("properties", {}), words):
                    made[words] = said
                if matches_all(pattern):  # the library would begin another name, and not end it
                    out["additionalProperties"] = False
                self._say_of_listed(out, pattern, said, is_said_twice=can_go_on)
            else:
                self.pass_over("patternProperties")
                if "additionalProperties" in out:  # which would forbid what the pattern allows
                    out["additionalProperties"] = {}
        if made:
            out["patternProperties"] = made

    def _say_of_listed(self, out: Json, pattern: str, said: Any, *, is_said_twice: bool) -> None:
        """A property that a pattern speaks of, too. is_said_twice: the library joins what both say,
        but not references: there the property is left out."""
        for name, each in out.get("properties", {}).items():
            if each is False or not keeps_to(name, {"pattern": pattern}):
                continue
            if not is_said_twice:
                out["properties"][name] = said if each in (said, {}) else each if said == {} else self._joined({}, [each, said])
            elif each == said:
                out["properties"][name] = {}
            elif "$ref" in json.dumps(said) and each != {} and name not in out.get("required", ()):
                out["properties"][name] = False

    def _names_of_properties(self, node: Json, out: Json) -> None:
        names = node.get("propertyNames")
        if names in (None, True, {}) or names == {"type": "string"}:
            return
        pattern = objects.named(names) if isinstance(names, dict) else None
        if pattern is None or "patternProperties" in out or not takes({"type": "object", "patternProperties": {pattern: {}}}):
            return self.pass_over("propertyNames")
        out["properties"] = {name: each if keeps_to(name, names) else False for name, each in out.get("properties", {}).items()}
        if out.get("additionalProperties", {}) is not False:
            if objects.can_go_on(out["properties"], pattern):
                out["patternProperties"] = {pattern: out.get("additionalProperties", {})}
            out["additionalProperties"] = False
        return None

    def _dependents(self, node: Json, more: list[Any], resolver: Any) -> None:
        required = texts(node.get("required"))
        given = table(node.get("dependencies")) | table(node.get("dependentRequired"))
        required_by = {name: texts(each) if isinstance(each, list) else [each] for name, each in given.items() if isinstance(each, list | str) and each}
        for names, group in objects.groups_of_dependents(required_by):
            more += objects.dependents_required(names, group, required)
        schemas = {name: each for name, each in given.items() if isinstance(each, dict | bool)} | table(node.get("dependentSchemas"))
        for name, each in schemas.items():
            needing = {**each, "required": [*texts(each.get("required")), name]} if isinstance(each, dict) and "$ref" not in each else each
            more += objects.dependent(name, self.walk(needing, resolver), required)

    def _counts(self, node: Json, out: Json, more: list[Any]) -> None:
        least, most = node.get("minProperties", 0), node.get("maxProperties")
        if not isinstance(least, int) or not isinstance(most, int | None) or (least <= 0 and most is None):
            return
        said = objects.counted(out, least, most)
        if said is None:
            for key in ("minProperties", "maxProperties"):
                if node.get(key):
                    self.pass_over(key)
        more += said or []

    def _unevaluated(self, node: Json, more: list[Any], resolver: Any) -> None:
        if node.get("unevaluatedProperties") in (None, True, {}):
            return
        names = objects.evaluated(self, node, resolver)
        if names is not None and node["unevaluatedProperties"] is False:
            more.append({"properties": dict.fromkeys(names, {}), "additionalProperties": False})
        else:
            self.pass_over("unevaluatedProperties")

    def _references(self, node: Json, out: Json, more: list[Any], resolver: Any) -> None:
        for key in ("$dynamicRef", "$recursiveRef"):
            if key in node:
                self.pass_over(key)
        if "$ref" not in node:
            return
        target = self.found(node["$ref"], resolver)
        if target is None:
            return self.pass_over("$ref", is_checkable=False)
        made = {"$ref": HELD + self._hold(*target)}
        if out:
            more.append(made)
        else:
            out.update(made)
        return None

    def _hold(self, node: Any, resolver: Any) -> str:
        if id(node) not in self._names:
            self._names[id(node)] = f"r{len(self._names)}"
            self._open.append((self._names[id(node)], node, resolver))
        return self._names[id(node)]

    def _composed(self, node: Json, out: Json, more: list[Any], resolver: Any) -> None:
        more += [self.walk(each, resolver) for each in node.get("allOf", ()) if isinstance(each, dict | bool)]
        if isinstance(options := node.get("anyOf"), list) and options:
            self._any_of([self.walk(each, resolver) for each in options], out, more)
        if isinstance(options := node.get("oneOf"), list) and options:
            self._one_of(node, out, more, resolver)
        if "not" in node:
            self._negated("not", node["not"], more, resolver)
        if "if" in node and ("then" in node or "else" in node):
            self._conditional(node, more, resolver)

    def _any_of(self, options: list[Any], out: Json, more: list[Any]) -> None:
        options = [each for each in options if each is not False]
        if {} in options:
            return
        if out.keys() == {"type"} and options and all(self._says(out["type"], each) for each in options):
            del out["type"]  # beside references that refer to one another the library takes nothing
        more.append(either(options) if options else False)

    def _says(self, names: Any, option: Json, depth: int = 0) -> bool:
        """Whether an option, rewritten, allows these types only."""
        if "type" in option:
            own = option["type"] if isinstance(option["type"], list) else [option["type"]]
            return set(own) <= set(names if isinstance(names, list) else [names])
        if "$ref" in option and depth < 4:
            target = self._target(option["$ref"])
            return isinstance(target, dict) and self._says(names, target, depth + 1)
        return False

    def _target(self, reference: str) -> Any:
        """The target of a reference that was written here, as the client wrote it."""
        name = reference.removeprefix(HELD)
        return self.held.get(name) or next((node for each, node, _ in self._open if each == name), None)

    def _one_of(self, node: Json, out: Json, more: list[Any], resolver: Any) -> None:
        options = node["oneOf"]
        walked = [self.walk(each, resolver) for each in options]
        if len(walked) == 1:
            more.append(walked[0])
        elif (said := exclusive(self, options, walked, resolver, {key: each for key, each in node.items() if key != "oneOf"})) is not None:
            self._any_of(said, out, more)
        elif self.one_of == "any":
            self.pass_over("oneOf")
            self._any_of(walked, out, more)
        else:
            more.append({"oneOf": walked})

    def _negated(self, name: str, node: Any, more: list[Any], resolver: Any) -> None:
        alternatives = negated(self, node, resolver) if self.is_thorough else None
        if alternatives is None:
            self.pass_over(name)
        else:
            more.append(either(alternatives) if alternatives else False)

    def _conditional(self, node: Json, more: list[Any], resolver: Any) -> None:
        otherwise = negated(self, node["if"], resolver) if self.is_thorough else None
        if otherwise is None:
            return self.pass_over("if")
        both = [self.walk(node[key], resolver) for key in ("if", "then") if key in node]
        alternatives = [] if False in both else [{"allOf": [each for each in both if each != {}]}]
        last = self.walk(node["else"], resolver) if "else" in node else {}
        alternatives += [{"allOf": [each, last]} if last != {} else each for each in otherwise if last is not False]
        more.append(either(alternatives) if alternatives else False)
        return None
