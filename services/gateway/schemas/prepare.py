"""What a client asks an answer to match, made such that it can be enforced: for the helper, which may be killed in the middle of it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.schemas.rewrite import Rewriter
from shared.constraint import Constraint
from shared.errors import Invalid
from shared.grammar import check_grammar

MAX_NAMED = 16


@dataclass(frozen=True, slots=True)
class Prepared:
    """constraint: what is enforced; ignored: what of the client's is not, by name; is_checked: whether an answer is to be checked at its end."""

    constraint: Constraint
    ignored: tuple[str, ...] = ()
    is_checked: bool = False


def prepare(constraint: Constraint) -> Prepared:
    if constraint.kind != "json_schema":
        check_grammar(constraint)
        return Prepared(constraint)
    schema = json.loads(constraint.text)
    refusal: Invalid | None = None
    for made, passed_over in attempts(schema, is_strict=not constraint.is_lenient):
        names = [name for name in passed_over if not name.startswith("format ")]
        if names and not constraint.is_lenient:
            raise Invalid(f"can't enforce {', '.join(names)}")
        attempt = replace(constraint, text=json.dumps(made, ensure_ascii=False))
        try:
            check_grammar(attempt)
        except Invalid as error:
            refusal = refusal or error
            continue
        return Prepared(attempt, tuple(passed_over)[:MAX_NAMED], any(passed_over.values()))
    assert refusal is not None
    raise refusal


def attempts(schema: Any, *, is_strict: bool) -> Iterator[tuple[Any, dict[str, bool]]]:
    for is_thorough, takes_any_of in ((True, False), (True, True), (False, True)):
        rewriter = Rewriter(schema, is_thorough=is_thorough, takes_any_of=takes_any_of)
        yield rewriter.rewritten(), rewriter.passed_over
        if is_strict:
            return
    shallow = {}
    if isinstance(schema, dict):
        shallow = {key: schema[key] for key in ("type", "required") if key in schema}
        shallow["properties"] = {name: {"type": each["type"]} if isinstance(each, dict) and "type" in each else {} for name, each in (schema.get("properties") or {}).items()}
    yield shallow, {"shallow": True}
    yield {"type": schema["type"]} if isinstance(schema, dict) and "type" in schema else {}, {"all": True}
