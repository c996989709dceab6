"""Makes the form of an answer that a client asks for enforceable, and says which parts of it can't be
enforced. Runs in a helper process: a schema may take long.

The verdict depends on the constraint alone: work is bounded by counts, not by time.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from services.requests.text.schemas.endings import never_ends
from services.requests.text.schemas.form import MAX_SHOWN, NoSchema, below, joined, normalize, pointed
from services.requests.text.schemas.patterns import UNSATISFIABLE, expressed, refusal
from services.requests.text.schemas.rewrite import Effort, Rewriter, TooLarge, has_too_many
from services.requests.text.schemas.values import Json, table
from shared.model.constraint import Constraint
from shared.model.grammar import check_grammar
from shared.process.deep_stack import on_deep_stack
from shared.process.errors import Invalid

NAMED_ESCAPES = 'nrbtf\\"'  # JSON's escapes apart from \\uXXXX
MAX_REASON = 200  # characters of the library's words against a pattern
MAX_NAMED = 16  # keywords of a schema that are named as passed over
NO_ANSWER = "no answer can match it"
OF_PATTERNS = ("pattern", "patternProperties")
ALL_BELOW, ALL_BUT_TYPE, ALL = "all below the first level", "all but its type", "all"
MAX_CLOSED = 64  # levels of a schema whose objects are closed
COMPOSED = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties",
    "dependencies", "dependentRequired", "dependentSchemas", "allOf", "anyOf", "oneOf", "not", "$ref", "$dynamicRef",
    "if",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Enforceable:
    """constraint: what is enforced; ignored: the names of what is not.

    checks: the schemas against which a finished answer is checked: pairs of the function whose
    arguments they describe (empty: the answer itself) and the JSON.
    """

    constraint: Constraint
    ignored: tuple[str, ...] = ()
    checks: tuple[tuple[str, str], ...] = ()

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.constraint.text) + sum(len(schema) for _, schema in self.checks)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A schema that the library enforces. passed_over: the names of what it does not enforce, with
    whether an answer can be checked for it."""

    schema: Any
    passed_over: dict[str, bool]


def prepare(constraint: Constraint) -> Enforceable:
    """Raises Invalid (400) for what is no schema, for a strict schema that can't be enforced in full,
    and for one that nothing matches."""
    try:
        return on_deep_stack(lambda: prepare_here(constraint))
    except RecursionError:
        raise refused(constraint.param, "it is nested too deeply") from None


def prepare_here(constraint: Constraint) -> Enforceable:
    """`prepare`, on this stack. Raises RecursionError, Invalid."""
    if constraint.kind == "json_schema":
        schema = json.loads(constraint.text)
        made = rewritten(schema, constraint.param, is_lenient=constraint.is_lenient)
        checks = (("", as_json(schema)),) if any(made.passed_over.values()) else ()
        enforced = replace(constraint, text=as_json(made.schema), is_lenient=False)
        return Enforceable(
            enforced, tuple(f"{constraint.param}: {name}" for name in made.passed_over)[:MAX_NAMED], checks
        )
    if constraint.kind == "structural_tag":
        return prepare_tag(constraint)
    check_grammar(constraint)
    return Enforceable(constraint)


def prepare_tag(constraint: Constraint) -> Enforceable:
    """Prepare each schema of a structural tag. A schema is strict if its x-guidance says that it is not
    lenient."""
    try:
        tag, ignored, checks = json.loads(constraint.text), dict[str, None](), dict[str, str]()
    except ValueError as error:
        raise refused(constraint.param, f"it is not JSON: {error}") from None
    for content in contents_of(tag):
        param, name = content.get("param") or constraint.param, content.get("function") or ""
        schema = content.get("json_schema", True)
        own = schema.get("x-guidance") if isinstance(schema, dict) else None
        is_lenient = not isinstance(own, dict) or own.get("lenient") is not False
        try:
            made = rewritten(schema, param, is_lenient=is_lenient)
        except Invalid as error:
            raise Invalid(
                f"the function {name}: {error}" if name else str(error), param=error.param, code=error.code
            ) from None
        content["json_schema"] = made.schema
        ignored |= dict.fromkeys(f"{param}: {each}" for each in made.passed_over)
        if name and any(made.passed_over.values()):
            checks[name] = as_json(schema)
    enforced = replace(constraint, text=as_json(tag))
    check_grammar(enforced)
    return Enforceable(enforced, tuple(ignored)[:MAX_NAMED], tuple(checks.items()))


def unenforced(schema: Any, names: list[str]) -> str:
    """The words of what can't be enforced; of patterns one, with its place and the reason."""
    fault = fault_of_pattern(schema) if set(names) & set(OF_PATTERNS) else ""
    others = ", ".join(name for name in names if not fault or name not in OF_PATTERNS)
    return "; ".join(filter(None, (fault, others and f"{others} can't be enforced")))


def fault_of_pattern(schema: Any) -> str:
    """The place of a pattern that can't be enforced, and the reason; empty if there is none."""
    ahead, seen = [("", schema)], set()
    while ahead:
        path, node = ahead.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        for place, pattern in patterns_of(path, node):
            if expressed(pattern) is None:
                return f"{place.lstrip('.')} can't be enforced: {reason_of(pattern)}"
        # definitions are reached by the references to them: an unused one is not at fault
        ahead += below(path, {key: value for key, value in node.items() if key not in ("$defs", "definitions")})
        if isinstance(reference := node.get("$ref"), str):
            ahead.append((reference.removeprefix("#/").replace("/", "."), pointed(schema, reference)))
    return ""


def patterns_of(path: str, node: Json) -> Iterator[tuple[str, str]]:
    """The patterns of a node, by place. Beside enum and const they choose among the values, which needs
    no grammar."""
    if "pattern" in node and not {"enum", "const"} & node.keys():
        yield joined(path, ".pattern"), node["pattern"]
    for pattern in node.get("patternProperties", ()):
        yield joined(path, f".patternProperties.{pattern[:MAX_SHOWN]}"), pattern


def reason_of(pattern: str) -> str:
    """The engine's words, or those for a pattern that the rewriter does not express."""
    reason = refusal(json.dumps({"type": "string", "pattern": pattern}))
    return reason.rpartition("error: ")[2].partition(";")[0].strip()[:MAX_REASON] or "engines read it differently"


def contents_of(node: Any) -> Iterator[Json]:
    """The places of a structural tag where a schema stands, each with the schema as
    `json_schema`."""
    if isinstance(node, list):
        for each in node:
            yield from contents_of(each)
    if isinstance(node, dict):
        if node.get("type") == "json_schema":
            yield node
            return
        if "structures" in node and "format" not in node:
            for each in node["structures"] if isinstance(node["structures"], list) else ():
                if isinstance(each, dict):
                    content = {"json_schema": each.get("schema", True)}
                    yield content
                    each["schema"] = content["json_schema"]
        for key in ("format", "content", "elements", "tags"):
            yield from contents_of(node.get(key))


def rewritten(schema: Any, param: str, *, is_lenient: bool) -> Rewritten:
    """The schema as the library enforces it, with the greatest effort that succeeds. A lenient schema
    for which none does is enforced at its first level. Raises Invalid."""
    refusal: Invalid | None = None
    try:
        normalize(schema, null_is_absent=is_lenient)
        for effort in reversed(Effort) if is_lenient else (Effort.EXCLUSIVE,):
            try:
                return rewritten_by(effort, schema, param, is_lenient=is_lenient)
            except TooLarge as error:
                refusal = refused(param, str(error))
            except Invalid as error:
                refusal = error
    except NoSchema as error:
        raise refused(param, str(error)) from None
    if refusal is not None and (not is_lenient or NO_ANSWER in str(refusal)):  # even without what was passed over
        raise refusal
    return first_level(schema, param)


def rewritten_by(effort: Effort, schema: Any, param: str, *, is_lenient: bool) -> Rewritten:
    """Raises NoSchema, TooLarge, Invalid."""
    rewriter = Rewriter(closed(schema) if isinstance(schema, dict) else schema, effort)
    made = rewriter.rewritten()
    if made is False:
        raise NoSchema(NO_ANSWER)
    names = [name for name in rewriter.passed_over if not name.startswith("format ")]
    if names and not is_lenient:
        raise refused(param, f"{unenforced(schema, names)}; without strict it is passed over")
    made = with_options(made, schema, has_open_names=rewriter.has_open_names)
    check_schema(made, param)
    return Rewritten(made, rewriter.passed_over)


def closed(schema: Json, levels: int = MAX_CLOSED) -> Json:
    """The schema without properties that it does not name. A schema that does not forbid others allows
    any, but a client that lists some means these, and a model may go on without an end.

    Where schemas are put together (allOf, $ref and the like), one of them can't say so alone: they
    stay as they are. So does what lies deeper than the levels.
    """
    made, properties, required = dict(schema), schema.get("properties"), schema.get("required", [])
    if (
        isinstance(properties, dict)
        and isinstance(required, list)
        and set(map(str, required)) <= properties.keys()
        and not COMPOSED & schema.keys()
    ):
        made["properties"] = {
            name: closed(each, levels - 1) if isinstance(each, dict) and levels else each
            for name, each in properties.items()
        }
        made["additionalProperties"] = False
    if isinstance(schema.get("items"), dict) and levels:
        made["items"] = closed(schema["items"], levels - 1)
    return made


def with_options(made: Json, schema: Any, *, has_open_names: bool) -> Json:
    """The schema with the engine's options, which the client may have given with its own.

    has_open_names: whether an object may have properties other than those that it lists. Spelt with
    escapes like `\\u0061`, the engine would take a listed name for another: then it allows none.
    """
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    options = own if isinstance(own, dict) else {}
    if has_open_names:
        escapes = options.get("json_allowed_escapes")
        options = {
            **options,
            "json_allowed_escapes": (escapes if isinstance(escapes, str) else NAMED_ESCAPES).replace("u", ""),
        }
    return {**made, "x-guidance": options} if options else made


def first_level(schema: Any, param: str) -> Rewritten:
    """The first level of a schema, or its type, or nothing: the first of these that the library takes."""
    for shallow, name in shallow_of(schema):
        with suppress(Invalid):
            check_schema(shallow, param)
            return Rewritten(with_options(shallow, schema, has_open_names="properties" in shallow), {name: True})
    return Rewritten(with_options({}, schema, has_open_names=False), {ALL: True})


def shallow_of(schema: Any) -> Iterator[tuple[Json, str]]:
    """The first level of a schema, then its type, each with the name of what is passed over."""
    own_type = typed(schema)
    if isinstance(schema, dict) and (properties := table(schema.get("properties"))):
        types = {name: typed(each) for name, each in properties.items()}
        top: Json = {**own_type, **{key: schema[key] for key in ("required",) if key in schema}, "properties": types}
        is_closed = set(schema.get("required", ())) <= set(types) and (
            schema.get("additionalProperties") is False or not COMPOSED & schema.keys()
        )
        if not has_too_many(top):
            yield top | ({"additionalProperties": False} if is_closed else {}), ALL_BELOW
    if own_type:
        yield own_type, ALL_BUT_TYPE


def typed(schema: Any) -> Json:
    """A schema of the type alone."""
    return {"type": schema["type"]} if isinstance(schema, dict) and "any" not in schema.get("type", "any") else {}


def check_schema(schema: Any, param: str) -> None:
    """Raises Invalid for a schema that the library does not take, or that no answer can match."""
    try:
        check_grammar(Constraint("json_schema", as_json(schema), param))
    except Invalid as error:
        if UNSATISFIABLE in str(error):
            raise refused(param, f"{NO_ANSWER}: {str(error).partition(UNSATISFIABLE)[2]}") from None
        if "oneOf constraints are not supported" in str(error):
            raise refused(
                param, "oneOf can't be enforced, for its options overlap; without strict it is passed over"
            ) from None
        raise
    if isinstance(schema, dict) and never_ends(schema):
        raise refused(param, f"{NO_ANSWER}: by a $ref, each would hold another one, without an end")


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def refused(param: str, reason: str) -> Invalid:
    return Invalid(f"{param or 'the schema'}: {reason}", param=param or None, code="invalid_json_schema")
