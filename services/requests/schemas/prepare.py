"""What a client asks an answer to match, made such that it can be enforced, and what of it can't
be. Runs in the helper: a schema may take long."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from services.requests.schemas.closing import closed
from services.requests.schemas.rewrite import Malformed, OneOf, Rewriter
from shared.model.constraint import Constraint
from shared.model.grammar import check_grammar
from shared.process.errors import Invalid

Json = dict[str, Any]

MAX_NAMED = 16  # of what is passed over in a schema
BUDGET_S = 2.0  # of this process's time; then only a schema's first level is enforced
STRICT: tuple[tuple[bool, OneOf], ...] = ((True, "exclusive"), (True, "kept"))
LENIENT: tuple[tuple[bool, OneOf], ...] = (*STRICT, (True, "any"), (False, "any"))
MALFORMED = "malformed"  # of an error that is the same whether it is strict or not
ALL_BELOW = "all below the first level"


@dataclass(frozen=True, slots=True)
class Prepared:
    """constraint: what is enforced; ignored: what is not, by name.

    checks: the schemas that an answer is held against at its end: pairs of the function whose
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
class Enforced:
    """A schema in the library's words; passed_over: what is not enforced, by name, with whether an
    answer can be checked for it."""

    schema: Any
    passed_over: dict[str, bool]


def prepare(constraint: Constraint) -> Prepared:
    """Raises Invalid (400) for what can't be enforced, strictly asked, and for what nothing
    matches."""
    try:
        return prepare_any(constraint)
    except RecursionError:
        raise refused(constraint.param, "it is nested too deeply") from None


def prepare_any(constraint: Constraint) -> Prepared:
    if constraint.kind == "json_schema":
        schema = json.loads(constraint.text)
        found = enforceable(schema, constraint.param, is_lenient=constraint.is_lenient)
        checks = (("", constraint.text),) if any(found.passed_over.values()) else ()
        made = replace(constraint, text=as_json(found.schema), is_lenient=False)
        return Prepared(made, tuple(f"{constraint.param}: {name}" for name in found.passed_over)[:MAX_NAMED], checks)
    if constraint.kind == "structural_tag":
        return prepare_tag(constraint)
    check_grammar(constraint)
    return Prepared(constraint)


def prepare_tag(constraint: Constraint) -> Prepared:
    """Prepare each schema of a structural tag. A schema is strict where its x-guidance says that it
    is not lenient."""
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
            found = enforceable(schema, param, is_lenient=is_lenient)
        except Invalid as error:
            raise Invalid(f"the function {name}: {error}" if name else str(error), param=error.param, code=error.code) from None
        content["json_schema"] = found.schema
        ignored |= dict.fromkeys(f"{param}: {each}" for each in found.passed_over)
        if name and any(found.passed_over.values()):
            checks[name] = as_json(schema)
    made = replace(constraint, text=as_json(tag))
    check_grammar(made)
    return Prepared(made, tuple(ignored)[:MAX_NAMED], tuple(checks.items()))


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


def enforceable(schema: Any, param: str, *, is_lenient: bool) -> Enforced:
    """Raises Invalid."""
    if not isinstance(schema, dict | bool):
        raise refused(param, "a JSON schema is an object")
    began, refusal = time.process_time(), None
    for is_thorough, one_of in LENIENT if is_lenient else STRICT:
        if is_lenient and time.process_time() - began > BUDGET_S:
            break
        try:
            found = rewritten(schema, is_thorough=is_thorough, one_of=one_of)
            names = [name for name in found.passed_over if not name.startswith("format ")]
            if names and not is_lenient:
                raise refused(param, f"{', '.join(names)} can't be enforced; without strict it is passed over")
            check_schema(found.schema, param)
        except Invalid as error:
            refusal = refusal or error
            if error.code == MALFORMED:
                raise refused(param, str(error)) from None
            continue
        return found
    if not is_lenient:
        assert refusal is not None
        raise refusal
    for shallow in shallow_of(schema):
        try:
            check_schema(shallow, param)
        except Invalid:
            continue
        return Enforced(with_options(shallow, schema), {ALL_BELOW: True})
    return Enforced(with_options({}, schema), {"all": True})


def rewritten(schema: Any, *, is_thorough: bool, one_of: OneOf) -> Enforced:
    rewriter = Rewriter(closed(schema) if isinstance(schema, dict) else schema, is_thorough=is_thorough, one_of=one_of)
    try:
        made = rewriter.rewritten()
    except Malformed as error:
        raise Invalid(str(error), code=MALFORMED) from None
    if made is False:
        raise Invalid("no answer can match it", code=MALFORMED)
    return Enforced(with_options(made, schema), rewriter.passed_over)


def with_options(made: Json, schema: Any) -> Json:
    """With the engine's options, which the client may have given beside."""
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    return {**made, "x-guidance": own} if isinstance(own, dict) else made


def shallow_of(schema: Any) -> Iterator[Json]:
    """Less and less of a schema: its first level, its type."""
    if not isinstance(schema, dict):
        return
    properties = schema.get("properties") if isinstance(schema.get("properties"), dict) else {}
    types = {name: {"type": each["type"]} if isinstance(each, dict) and "type" in each else {} for name, each in (properties or {}).items()}
    top = {key: schema[key] for key in ("type", "required") if key in schema}
    yield {**top, "properties": types, **({"additionalProperties": False} if set(map(str, top.get("required", ()))) <= set(types) and types else {})}
    yield {"type": schema["type"]} if "type" in schema else {}


def check_schema(schema: Any, param: str) -> None:
    try:
        check_grammar(Constraint("json_schema", as_json(schema), param))
    except Invalid as error:
        if "oneOf constraints are not supported" in str(error):
            raise refused(param, "oneOf can't be enforced, for its options overlap; without strict it is passed over") from None
        raise


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def refused(param: str, reason: str) -> Invalid:
    return Invalid(f"{param or 'the schema'}: {reason}", param=param or None, code="invalid_json_schema")
