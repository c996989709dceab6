"""Rewrites a JSON schema so that the grammars' library enforces it rightly: what the library does not
know is expressed in keywords that it does, or passed over and named.

No answer that keeps to the rewritten schema breaks the keywords that were rewritten. Where a keyword
allows more than a grammar can express, the rewritten one allows less.
"""

import json
from enum import IntEnum
from typing import Any

import referencing.exceptions
from jsonschema_specifications import REGISTRY
from referencing.jsonschema import DRAFT202012, specification_with

from services.requests.text.schemas import objects
from services.requests.text.schemas.form import NoSchema, normalize, pointed
from services.requests.text.schemas.negate import either, negated
from services.requests.text.schemas.one_of import exclusive
from services.requests.text.schemas.patterns import expressed, formatted, is_supported, matches_all
from services.requests.text.schemas.values import (
    COUNTS,
    NUMBERS,
    Json,
    bounds_of,
    exclusive_bounds,
    is_contradictory,
    is_valid,
    table,
    texts,
)

SIBLINGS_COUNT = ("2019-09", "2020-12")  # drafts in which the keywords beside a $ref have an effect
SCALARS = {"type", "minLength", "maxLength", "pattern", *NUMBERS}  # keywords that a listed value keeps to or not
ASKED = {*NUMBERS, *COUNTS, "pattern", "format"}  # keywords about which the library is asked
HELD = "#/$defs/"
COMPOSING = {"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas", "$dynamicRef"}
CHOICES = ("dependencies", "dependentRequired", "dependentSchemas", "minProperties", "maxProperties")
MAX_OPTIONAL = 900  # properties of an object; with more the library fails during the answer
MAX_WORK = 10_000  # nodes rewritten, pairs of options compared, calls of the library; half a second at most
CALL_WORK = 5  # nodes that are rewritten in the time of such a call


class TooLarge(ValueError):
    """The schema takes more work than MAX_WORK, or has an object with more than MAX_OPTIONAL properties."""


def has_too_many(node: Json) -> bool:
    """Whether an object has more optional properties than the library can hold."""
    return len(table(node.get("properties")).keys() - set(texts(node.get("required")))) > MAX_OPTIONAL


class Effort(IntEnum):
    """How much is rewritten: each level does what those below do."""

    PLAIN = 0  # nothing that multiplies alternatives
    ALTERNATIVES = 1  # negations, dependencies and counts; a oneOf whose options overlap is an anyOf
    EXCLUSIVE = 2  # such options each without the others, or a oneOf if the library sees that they differ


class Rewriter:
    """Rewrites one schema. passed_over: the names of the keywords that are not enforced, with whether
    an answer can be checked for them."""

    def __init__(self, schema: Any, effort: Effort) -> None:
        uri = schema.get("$schema") if isinstance(schema, dict) else None
        uri = uri if isinstance(uri, str) else ""
        self.schema = schema
        self.effort = effort
        self.passed_over: dict[str, bool] = {}
        self.has_open_names = False  # whether an object allows properties other than the listed ones
        self.specification = specification_with(
            uri if uri.endswith(("#", "schema#")) or "20" in uri else f"{uri}#", default=DRAFT202012
        )
        self.ignores_siblings = bool(uri) and not any(each in uri for each in SIBLINGS_COUNT)
        self.held: dict[str, Any] = {}  # targets of references, by the name that they have here
        self._names: dict[int, str] = {}  # of these targets, by their identity
        self._open: list[tuple[str, Any, Any]] = []  # those that are still to be rewritten
        self._work = 0

    @property
    def is_exclusive(self) -> bool:
        return self.effort == Effort.EXCLUSIVE

    def rewritten(self) -> Any:
        """Raises NoSchema, TooLarge."""
        resource = self.specification.create_resource(self.schema)
        registry: Any = REGISTRY.with_resource("", resource)
        try:
            resolver = registry.resolver_with_root(resource)
        except Exception:  # an $id that is no URI
            resolver = registry.resolver()
        made = self.walk(self.schema, resolver)
        while self._open:
            name, node, resolver = self._open.pop()
            self.held[name] = self.walk(node, resolver)
        if not isinstance(made, dict) or not self.held:
            return made
        for name in self.held:
            self._check_end(name)
        return {**made, "$defs": self.held}

    def _check_end(self, name: str) -> None:
        """Raises NoSchema for a reference that refers to nothing but itself."""
        seen = set()
        while (node := self.held.get(name)) and set(node) == {"$ref"}:
            if name in seen:
                raise NoSchema("a $ref refers to itself")
            seen.add(name)
            name = node["$ref"].removeprefix(HELD)

    def count_work(self, amount: int) -> None:
        """Raises TooLarge. The count depends on the schema alone, so the verdict does, too."""
        self._work += amount
        if self._work > MAX_WORK:
            raise TooLarge("it is too large")

    def walk(self, node: Any, resolver: Any) -> Any:
        """A node, rewritten; False if no value matches it."""
        self.count_work(1)
        if isinstance(node, bool):
            return {} if node else False
        if isinstance(node.get("$id"), str) and node is not self.schema:
            resolver = resolver.in_subresource(self.specification.create_resource(node))
        if "$ref" in node and self.ignores_siblings:
            node = {"$ref": node["$ref"]}
        out: Json = {}
        more: list[Any] = []
        if "enum" in node or "const" in node:
            self._values(node, more)
        else:
            self._scalars(node, out, more)
        for write in (self._list, self._properties, self._references, self._composed):
            write(node, out, more, resolver)
        return self._joined(out, more)

    def _joined(self, out: Json, more: list[Any]) -> Any:
        more = [each for each in more if each != {}]
        if is_contradictory(out) or any(each is False or each == {"not": {}} for each in more):
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
        """Note that a keyword is not enforced."""
        self.passed_over[name] = self.passed_over.get(name, False) or is_checkable

    def resolve(self, reference: Any, resolver: Any) -> tuple[Any, Any] | None:
        """A reference's target and the resolver there; None if it is not in the schema."""
        try:
            resolved = resolver.lookup(reference)
        except (referencing.exceptions.Unresolvable, ValueError, AttributeError, TypeError):
            return None
        return resolved.contents, resolved.resolver

    # Each of the following writes its keywords of a node into `out`, or what must also hold into `more`

    def _values(self, node: Json, more: list[Any]) -> None:
        own = {name: each for name, each in {**node, **exclusive_bounds(node)}.items() if name in SCALARS}
        for values in ([node["const"]] if "const" in node else None, node.get("enum")):
            if values is not None:
                kept = [each for each in values if is_valid(each, own)]
                more.append({"enum": kept} if kept else False)

    def _scalars(self, node: Json, out: Json, more: list[Any]) -> None:
        names = node.get("type")
        if names and names != "any" and "any" not in names:  # draft 3's
            out["type"] = names
        self.count_work(CALL_WORK * len(ASKED & node.keys()))
        kept, passed_over = bounds_of(node, dict(out))
        out |= kept
        for key, is_checkable in passed_over.items():
            self.pass_over(key, is_checkable=is_checkable)
        if isinstance(pattern := node.get("pattern"), str):
            if (made := expressed(pattern)) is None:
                self.pass_over("pattern")
            else:
                more.append({"pattern": made})
        if isinstance(name := node.get("format"), str):
            if (schema := formatted(name)) is None:
                self.pass_over(f"format {name[:32]}", is_checkable=False)
            else:
                more.append(schema)

    def _list(self, node: Json, out: Json, _: list[Any], resolver: Any) -> None:
        items, first = node.get("items"), node.get("prefixItems")
        if isinstance(items, list):
            first, items = items, node.get("additionalItems")
        if isinstance(first, list):
            out["prefixItems"] = [self.walk(each, resolver) for each in first]
        if isinstance(items, dict | bool):
            out["items"] = self.walk(items, resolver)
        if node.get("uniqueItems") is True and not (isinstance(node.get("maxItems"), int) and node["maxItems"] <= 1):
            self.pass_over("uniqueItems")
        if "contains" in node and (node.get("minContains", 1) > 0 or "maxContains" in node):
            self.pass_over("contains")
        if node.get("unevaluatedItems", True) is not True:
            self.pass_over("unevaluatedItems")

    def _properties(self, node: Json, out: Json, more: list[Any], resolver: Any) -> None:
        if "properties" in node:
            out["properties"] = {name: self.walk(each, resolver) for name, each in node["properties"].items()}
        if required := texts(node.get("required")):
            out["required"] = required
        if has_too_many(out):
            raise TooLarge(f"an object has more than {MAX_OPTIONAL} optional properties")
        rest = node.get("additionalProperties")
        if node.get("unevaluatedProperties") not in (None, True, {}):
            if rest is None and not COMPOSING & node.keys():
                rest = node["unevaluatedProperties"]
            else:
                self.pass_over("unevaluatedProperties")
        if rest not in (None, True, {}):
            out["additionalProperties"] = self.walk(rest, resolver)
        self._pattern_properties(node, out, resolver)
        self._property_names(node, out)
        self.has_open_names |= (
            bool({"properties", "patternProperties"} & out.keys()) and out.get("additionalProperties") is not False
        )
        if self.effort >= Effort.ALTERNATIVES:
            self._dependents(node, more, resolver)
            self._counts(node, out, more)
        else:
            for key in CHOICES:
                if node.get(key) not in (None, {}):
                    self.pass_over(key)

    def _pattern_properties(self, node: Json, out: Json, resolver: Any) -> None:
        made: Json = {}
        for pattern, each in table(node.get("patternProperties")).items():
            self.count_work(CALL_WORK + len(made) ** 2 // 20)  # the library compares each with each
            own = expressed(pattern)
            if own is not None and is_supported(
                {"type": "object", "patternProperties": dict.fromkeys([*made, own], {})}
            ):
                schema = self.walk(each, resolver)
                if can_go_on := objects.can_go_on(out.get("properties", {}), own):
                    made[own] = schema
                if matches_all(pattern):  # the library would begin another name, and not end it
                    out["additionalProperties"] = False
                self._join_listed(out, pattern, schema, is_joined_by_library=can_go_on)
            else:
                self.pass_over("patternProperties")
                if "additionalProperties" in out:  # it would forbid what the pattern allows
                    out["additionalProperties"] = {}
        if made:
            out["patternProperties"] = made

    def _join_listed(self, out: Json, pattern: str, schema: Any, *, is_joined_by_library: bool) -> None:
        """Join a pattern's schema with those of the listed properties that it matches. The library joins
        what both say, but not references: there the property is left out."""
        for name, each in out.get("properties", {}).items():
            if each is False or not is_valid(name, {"pattern": pattern}):
                continue
            if not is_joined_by_library:
                out["properties"][name] = (
                    schema if each in (schema, {}) else each if schema == {} else self._joined({}, [each, schema])
                )
            elif each == schema:
                out["properties"][name] = {}
            elif "$ref" in json.dumps(schema) and each != {} and name not in out.get("required", ()):
                out["properties"][name] = False

    def _property_names(self, node: Json, out: Json) -> None:
        names = node.get("propertyNames")
        if names in (None, True, {}, {"type": "string"}):
            return
        pattern = objects.name_pattern(names) if isinstance(names, dict) else None
        if (
            pattern is None
            or "patternProperties" in out
            or not is_supported({"type": "object", "patternProperties": {pattern: {}}})
        ):
            self.pass_over("propertyNames")
            return
        out["properties"] = {
            name: each if is_valid(name, names) else False for name, each in out.get("properties", {}).items()
        }
        if out.get("additionalProperties", {}) is not False:
            if objects.can_go_on(out["properties"], pattern):
                out["patternProperties"] = {pattern: out.get("additionalProperties", {})}
            out["additionalProperties"] = False

    def _dependents(self, node: Json, more: list[Any], resolver: Any) -> None:
        """Where an object has a property, require others, or a schema."""
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, each in table(node.get(key)).items():
                schema: Any = {"type": "object", "required": [name]}
                if isinstance(each, list | str):
                    schema["required"] += [each] if isinstance(each, str) else each
                else:
                    needing = (
                        {**each, "required": [*texts(each.get("required")), name]}
                        if isinstance(each, dict) and "$ref" not in each
                        else each
                    )
                    schema = self._joined(schema, [self.walk(needing, resolver)])
                self._any_of(
                    [schema] if name in texts(node.get("required")) else [objects.absent([name]), schema], {}, more
                )

    def _counts(self, node: Json, out: Json, more: list[Any]) -> None:
        least, most = node.get("minProperties", 0), node.get("maxProperties")
        if least <= 0 and most is None:
            return
        schemas = objects.counted(out, int(least), most if most is None else int(most))
        if schemas is None:
            for key in ("minProperties", "maxProperties"):
                if node.get(key):
                    self.pass_over(key)
        more += schemas or []

    def _references(self, node: Json, out: Json, more: list[Any], resolver: Any) -> None:
        for key in ("$dynamicRef", "$recursiveRef"):
            if key in node:
                self.pass_over(key)
        if "$ref" not in node:
            return
        target = self.resolve(node["$ref"], resolver)
        if target is None:
            self.pass_over("$ref", is_checkable=False)
            return
        made = {"$ref": HELD + self._hold(node["$ref"], *target)}
        if out:
            more.append(made)
        else:
            out.update(made)

    def _hold(self, reference: str, node: Any, resolver: Any) -> str:
        if id(node) not in self._names:
            if node is not pointed(self.schema, reference):
                normalize(node, null_is_absent=True)  # it stands where the schema's own check has not looked
            self._names[id(node)] = f"r{len(self._names)}"
            self._open.append((self._names[id(node)], node, resolver))
        return self._names[id(node)]

    def _composed(self, node: Json, out: Json, more: list[Any], resolver: Any) -> None:
        more += [self.walk(each, resolver) for each in node.get("allOf", ())]
        if "anyOf" in node:
            self._any_of([self.walk(each, resolver) for each in node["anyOf"]], out, more)
        if "oneOf" in node:
            self._one_of(node, out, more, resolver)
        if "not" in node:
            alternatives = self._negated("not", node["not"], resolver)
            if alternatives is not None:
                more.append(either(alternatives) if alternatives else False)
        if "if" in node and ("then" in node or "else" in node):
            self._conditional(node, more, resolver)

    def _any_of(self, options: list[Any], out: Json, more: list[Any]) -> None:
        options = [each for each in options if each is not False]
        if {} in options:
            return
        if out.keys() == {"type"} and options and all(self._has_only(out["type"], each) for each in options):
            del out["type"]  # beside references that refer to one another the library takes nothing
        more.append(either(options) if options else False)

    def _has_only(self, names: Any, option: Json, depth: int = 0) -> bool:
        """Whether an option, rewritten, allows these types only."""
        if "type" in option:
            own = option["type"] if isinstance(option["type"], list) else [option["type"]]
            return set(own) <= set(names if isinstance(names, list) else [names])
        if "$ref" in option and depth < 4:
            name = option["$ref"].removeprefix(HELD)
            target = self.held.get(name) or next((node for each, node, _ in self._open if each == name), None)
            return isinstance(target, dict) and self._has_only(names, target, depth + 1)
        return False

    def _one_of(self, node: Json, out: Json, more: list[Any], resolver: Any) -> None:
        options = node["oneOf"]
        walked = [self.walk(each, resolver) for each in options]
        if len(walked) == 1:
            more.append(walked[0])
        elif (
            made := exclusive(
                self, options, walked, resolver, {key: each for key, each in node.items() if key != "oneOf"}
            )
        ) is not None:
            self._any_of(made, out, more)
        elif not self.is_exclusive:
            self.pass_over("oneOf")
            self._any_of(walked, out, more)
        else:
            more.append({"oneOf": walked})

    def _negated(self, name: str, node: Any, resolver: Any) -> list[Json] | None:
        alternatives = negated(self, node, resolver) if self.effort >= Effort.ALTERNATIVES else None
        if alternatives is None:
            self.pass_over(name)
        return alternatives

    def _conditional(self, node: Json, more: list[Any], resolver: Any) -> None:
        otherwise = self._negated("if", node["if"], resolver)
        if otherwise is None:
            return
        both = [self.walk(node[key], resolver) for key in ("if", "then") if key in node]
        alternatives = [] if False in both else [{"allOf": [each for each in both if each != {}]}]
        last = self.walk(node["else"], resolver) if "else" in node else {}
        alternatives += [{"allOf": [each, last]} if last != {} else each for each in otherwise if last is not False]
        more.append(either(alternatives) if alternatives else False)
