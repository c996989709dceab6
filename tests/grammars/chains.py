"""`python -m tests.grammars.chains [NAME ...]`: grammars and schemas of thousands of rules, each of
which refers to the next, as the gateway's helper and compute compile them. The library ends the
process where its stack ends: that is why this is one of its own.
"""

import sys
import time

from services.compute.candidates.compiled import GrammarCache
from services.requests.text.schemas.prepare import prepare
from shared.model.constraint import MAX_TEXT, Constraint
from shared.process.errors import Invalid
from tests.grammars.generate import vocabulary


def rules(head: str, line: str, last: str, most: int) -> str:
    """So many lines as fit, each about the number that follows its own."""
    lines, size = [head.format(0)], len(head) + len(last) + 10
    while len(lines) < most and size < MAX_TEXT - 60:
        lines.append(line.format(len(lines) - 1, len(lines)))
        size += len(lines[-1]) + 1
    return "\n".join([*lines, last.format(len(lines) - 1)])


def schema(step: str) -> str:
    """A schema whose definitions refer each to the next."""
    text = rules(
        "",
        '"{0}":' + step.replace("{", "{{").replace("}", "}}").replace("NEXT", '"$ref":"#/$defs/{1}"') + ",",
        '"{0}":{{}}',
        100_000,
    )
    return '{"$defs":{' + text + '},"$ref":"#/$defs/0"}'


STEPS = {
    "reference": "{NEXT}",
    "property": '{"properties":{"x":{NEXT}}}',
    "item": '{"items":{NEXT}}',
    "option": '{"anyOf":[{NEXT},{}]}',
}
CHAINS = {
    "rules": Constraint("lark", rules("start: r{}", "r{}:r{}", 'r{}:"a"', 100_000)),
    "terminals": Constraint("lark", rules("start: R{}", "R{}:R{}", 'R{}:"a"', 100_000)),
    "gbnf": Constraint("gbnf", rules("root ::= r{}", "r{} ::= r{}", 'r{} ::= "a"', 5000)),
    **{name: Constraint("json_schema", schema(step), is_lenient=True) for name, step in STEPS.items()},
    **{f"strict {name}": Constraint("json_schema", schema(step)) for name, step in STEPS.items()},
}


def main(names: list[str]) -> None:
    compilers = GrammarCache(vocabulary)
    for name in names or CHAINS:
        constraint, began = CHAINS[name], time.process_time()
        for made in (lambda: prepare(constraint), lambda: compilers.get(constraint, []).result()):  # noqa: B023
            try:
                print(
                    name,
                    "compiled",
                    f"{len(constraint.text)} characters:",
                    type(made()).__name__,
                    f"{time.process_time() - began:.1f} s",
                )
            except Invalid as error:
                print(name, "refused:", str(error)[:80])
        compilers.forget(constraint)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1:])
