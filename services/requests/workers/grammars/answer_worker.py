"""`python -m services.requests.workers.grammars.answer_worker`: the gateway's helper that checks answers
against their schemas, by the jsonschema package.

Schemas come from clients, and a pattern may take for ever: then this process is killed, and nothing
else with it. A question is a packed list of function, schema as JSON, and text; the answer is a list
of problems.
"""

import json
from collections.abc import Iterator
from functools import cache
from itertools import islice
from math import isfinite
from typing import Any

import jsonschema
import referencing
from jsonschema_specifications import REGISTRY
from referencing.jsonschema import DRAFT202012

from services.requests.text.schemas.values import decimal
from shared.model.json_text import TooDeep, read_json
from shared.process.plain import unpack
from shared.process.priority import run_behind
from shared.process.worker import run_worker

NICENESS = 10  # behind the stages, and still a tenth of a busy core
MAX_PROBLEMS = 8
MAX_PATH = 200  # characters
EVERYTHING: Any = referencing.Resource(contents={}, specification=DRAFT202012)  # type: ignore[call-arg]

# What a schema refers to in another place is not fetched: it allows anything
PLACES: Any = referencing.Registry(retrieve=lambda _: EVERYTHING).combine(REGISTRY)  # type: ignore[call-arg]


def problems_of(schema: Any, text: str) -> list[dict[str, Any]]:
    """Where the answer breaks which keyword of its schema; empty if it is valid."""
    found: list[dict[str, Any]] = []
    try:
        value = read_json(text, parse_float=float)
    except TooDeep as depth:
        return [problem("$", f"not checked: it is {depth}")]
    except ValueError:
        return [problem("$", "it is not JSON")]
    try:
        validator = exact(jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator))
        for broken in islice(validator(schema, registry=PLACES).iter_errors(value), MAX_PROBLEMS):
            found.append(problem(broken.json_path, f"{broken.validator or 'false'} does not hold"))
    except Exception as error:  # a schema is the client's: what is made of it raises what it likes
        found.append(problem("$", f"not checked: the schema can't be read ({type(error).__name__})"))
    return found


@cache
def exact(validator: Any) -> Any:
    """The validator, to which 0.3 is a multiple of 0.1, as in decimal numbers."""
    return jsonschema.validators.extend(validator, {"multipleOf": multiple_of})


def multiple_of(validator: Any, divisor: Any, value: Any, _: Any) -> Iterator[jsonschema.ValidationError]:
    if validator.is_type(value, "number") and (
        not (isinstance(value, int) or isfinite(value)) or decimal(value) % decimal(divisor)
    ):
        yield jsonschema.ValidationError(f"{value!r} is not a multiple of {divisor!r}")


def problem(path: str, message: str) -> dict[str, Any]:
    return {"path": path[:MAX_PATH], "message": message}


def answer(question: bytes) -> list[dict[str, Any]]:
    problems = []
    for name, schema, text in unpack(question):
        problems += [{**({"function": name} if name else {}), **each} for each in problems_of(json.loads(schema), text)]
    return problems


if __name__ == "__main__":
    run_behind(NICENESS)
    run_worker(answer)
