"""Makes what a client asks an answer to match enforceable, and says what of it can't
be. Runs in the helper: a schema may take long."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from services.requests.text.schemas.closing import COMPOSED, closed
from services.requests.text.schemas.endings import never_ends
from services.requests.text.schemas.faults import fault_of_pattern
from services.requests.text.schemas.form import NoSchema, normalize
from services.requests.text.schemas.objects import bundled, table
from services.requests.text.schemas.patterns import UNSATISFIABLE
from services.requests.text.schemas.rewrite import MAX_OPTIONAL, MAX_PATTERNS, Malformed, OneOf, Rewriter, TooLarge
from shared.model.constraint import Constraint
from shared.model.grammar import check_grammar
from shared.process.deep_stack import on_deep_stack
from shared.process.errors import Invalid

Json = dict[str, Any]

NAMED_ESCAPES = 'nrbtf\\"'  # of JSON's texts, all but \\uXXXX
MAX_NAMED = 16  # of what is passed over in a schema
BUDGET_S = 2.0  # of this process's time; then only the schemas' first level is enforced
STRICT: tuple[tuple[bool, OneOf], ...] = ((True, "exclusive"), (True, "kept"))
LENIENT: tuple[tuple[bool, OneOf], ...] = (*STRICT, (True, "any"), (False, "any"))
MALFORMED = "malformed"  # of an error that is the same whether it is strict or not
NO_ANSWER = "no answer can match it"
OF_PATTERNS = ("pattern", "patternProperties")
ALL_BELOW, ALL_BUT_TYPE, ALL = "all below the first level", "all but its type", "all"


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


def prepare(constraint: Constraint, *, is_shallow: bool = False) -> Prepared:
    """is_shallow: enforce no more than the first level of schemas that are not strict.

    Raises Invalid (400) for what is no schema, for what can't be enforced, strictly asked, and for
    what nothing matches.
    """
    preparation = Preparation(time.process_time() + (0.0 if is_shallow else BUDGET_S))
    try:
        return on_deep_stack(lambda: preparation.prepared(constraint))
    except RecursionError:
        raise refused(constraint.param, "it is nested too deeply") from None


@dataclass(frozen=True, slots=True)
class Preparation:
    """One constraint's. ends_at: by this process's time; then only the first level of schemas that
    are not strict is enforced."""

    ends_at: float

    def prepared(self, constraint: Constraint) -> Prepared:
        if constraint.kind == "json_schema":
            schema = json.loads(constraint.text)
            found = self.enforceable(schema, constraint.param, is_lenient=constraint.is_lenient)
            checks = (("", as_json(schema)),) if any(found.passed_over.values()) else ()
            made = replace(constraint, text=as_json(found.schema), is_lenient=False)
            return Prepared(made, tuple(f"{constraint.param}: {name}" for name in found.passed_over)[:MAX_NAMED], checks)
        if constraint.kind == "structural_tag":
            return self.tag(constraint)
        check_grammar(constraint)
        return Prepared(constraint)

    def tag(self, constraint: Constraint) -> Prepared:
        """Prepare each schema of a structural tag. A schema is strict where its x-guidance says
        that it is not lenient."""
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
                found = self.enforceable(schema, param, is_lenient=is_lenient)
            except Invalid as error:
                raise Invalid(f"the function {name}: {error}" if name else str(error), param=error.param, code=error.code) from None
            content["json_schema"] = found.schema
            ignored |= dict.fromkeys(f"{param}: {each}" for each in found.passed_over)
            if name and any(found.passed_over.values()):
                checks[name] = as_json(schema)
        made = replace(constraint, text=as_json(tag))
        check_grammar(made)
        return Prepared(made, tuple(ignored)[:MAX_NAMED], tuple(checks.items()))

    def enforceable(self, schema: Any, param: str, *, is_lenient: bool) -> Enforced:
        """Raises Invalid."""
        try:
            normalize(schema, null_is_absent=is_lenient)
        except NoSchema as error:
            raise refused(param, str(error)) from None
        if not is_lenient:
            return strictly(schema, param)
        began, refusal = time.process_time(), None
        for number, (is_thorough, one_of) in enumerate(LENIENT, 1):
            deadline = began + (self.ends_at - began) * number / len(LENIENT)  # time is left for the easier ways
            if began >= deadline:
                break
            try:
                found = rewritten(schema, param, is_thorough=is_thorough, one_of=one_of, deadline=deadline)
                check_schema(found.schema, param)
            except Invalid as error:
                refusal = error
                if error.code == MALFORMED:
                    raise refused(param, str(error)) from None
                continue
            return found
        else:
            if refusal is not None and NO_ANSWER in str(refusal):  # even without what was passed over
                raise refusal
        return first_level(schema, param)


def strictly(schema: Any, param: str) -> Enforced:
    """Raises Invalid for a schema that can't be enforced in full."""
    refusal = None
    for is_thorough, one_of in STRICT:
        try:
            found = rewritten(schema, param, is_thorough=is_thorough, one_of=one_of)
            names = [name for name in found.passed_over if not name.startswith("format ")]
            if names:
                raise refused(param, f"{unenforced(schema, names)}; without strict it is passed over")
            check_schema(found.schema, param)
        except Invalid as error:
            refusal = refusal or error
            if error.code == MALFORMED:
                raise refused(param, str(error)) from None
            continue
        return found
    assert refusal is not None
    raise refusal


def unenforced(schema: Any, names: list[str]) -> str:
    """The words of what can't be enforced; of patterns one, with its place and the reason."""
    fault = fault_of_pattern(schema) if set(names) & set(OF_PATTERNS) else ""
    others = ", ".join(name for name in names if not fault or name not in OF_PATTERNS)
    return "; ".join(filter(None, (fault, others and f"{others} can't be enforced")))


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


def rewritten(schema: Any, param: str, *, is_thorough: bool, one_of: OneOf, deadline: float = float("inf")) -> Enforced:
    rewriter = Rewriter(closed(schema) if isinstance(schema, dict) else schema, is_thorough=is_thorough, one_of=one_of, deadline=deadline)
    try:
        made = rewriter.rewritten()
    except Malformed as error:
        raise Invalid(str(error), code=MALFORMED) from None
    except TooLarge as error:
        raise refused(param, str(error)) from None
    if made is False:
        raise Invalid(NO_ANSWER, code=MALFORMED)
    return Enforced(with_options(made, schema, has_open_names=rewriter.has_open_names), rewriter.passed_over)


def with_options(made: Json, schema: Any, *, has_open_names: bool) -> Json:
    """With the engine's options, which the client may have given beside.

    has_open_names: an object may have others than the properties that it lists. Spelt with escapes
    like `\\u0061`, the engine would take a listed name for another: then it allows none.
    """
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    options = own if isinstance(own, dict) else {}
    if has_open_names:
        escapes = options.get("json_allowed_escapes")
        options = {**options, "json_allowed_escapes": (escapes if isinstance(escapes, str) else NAMED_ESCAPES).replace("u", "")}
    return {**made, "x-guidance": options} if options else made


def first_level(schema: Any, param: str) -> Enforced:
    """As much of a schema as is quick: its first level, or its type, or nothing."""
    for shallow, name in shallow_of(schema):
        try:
            check_schema(shallow, param)
        except Invalid:
            continue
        return Enforced(with_options(shallow, schema, has_open_names="properties" in shallow), {name: True})
    return Enforced(with_options({}, schema, has_open_names=False), {ALL: True})


def shallow_of(schema: Any) -> Iterator[tuple[Json, str]]:
    """Less and less of a schema: its first level, its type; each with the name of what is passed
    over."""
    if not isinstance(schema, dict):
        return
    own_type = {key: schema[key] for key in ("type",) if key in schema and "any" not in schema[key]}
    if properties := table(schema.get("properties")):
        types = {name: {"type": each["type"]} if isinstance(each, dict) and "any" not in each.get("type", "any") else {} for name, each in properties.items()}
        top = {**own_type, **{key: schema[key] for key in ("required",) if key in schema}, "properties": types}
        is_closed = set(schema.get("required", ())) <= set(types) and (schema.get("additionalProperties") is False or not COMPOSED & schema.keys())
        shallow = bundled({**top, **({"additionalProperties": False} if is_closed else {})}, MAX_OPTIONAL, MAX_PATTERNS)
        if shallow is not None:
            yield shallow, ALL_BELOW
    if own_type:
        yield own_type, ALL_BUT_TYPE


def check_schema(schema: Any, param: str) -> None:
    if never_ends(schema):
        raise refused(param, f"{NO_ANSWER}: by a $ref, each would hold another one, without an end")
    try:
        check_grammar(Constraint("json_schema", as_json(schema), param))
    except Invalid as error:
        if UNSATISFIABLE in str(error):
            raise refused(param, f"{NO_ANSWER}: {str(error).partition(UNSATISFIABLE)[2]}") from None
        if "oneOf constraints are not supported" in str(error):
            raise refused(param, "oneOf can't be enforced, for its options overlap; without strict it is passed over") from None
        raise


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def refused(param: str, reason: str) -> Invalid:
    return Invalid(f"{param or 'the schema'}: {reason}", param=param or None, code="invalid_json_schema")
