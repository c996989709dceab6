"""Thousands of schemas: `python -m tests.grammars`. Prints what became of them, and ends with 1 if an answer did not keep to its schema.

By default hypothesis makes them. With --suite FOLDER they are the JSON Schema Test Suite's (its folder tests/draft2020-12, which
jsonschema's source distribution has). Beside the answers, its own instances are tried: what it calls invalid must not be accepted, and of
what it calls valid it is counted how much is.
"""

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shared.constraint import Constraint
from shared.errors import Invalid
from shared.grammar import compile_grammar
from tests.grammars.generate import Answer, generate, vocabulary
from tests.grammars.schemas import keeps_to, schemas

AT_ONCE = 32
TEMPERATURES = (0.7, 1.3, 2.5)


def main() -> int:
    parser = argparse.ArgumentParser(description="Are answers that are held to a schema valid?")
    parser.add_argument("--schemas", type=int, default=3000, help="how many hypothesis makes")
    parser.add_argument("--suite", type=Path, help="a folder of the JSON Schema Test Suite")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # hypothesis's, about what takes long
    counts: Counter[str] = Counter()
    wrong = of_suite(args.suite, counts) if args.suite else of_hypothesis(args.schemas, args.seed, counts)
    for each in wrong[:20]:
        print("WRONG", each)
    print(json.dumps({**counts, "wrong": len(wrong)}))
    return 1 if wrong else 0


def of_hypothesis(count: int, seed: int, counts: Counter[str]) -> list[str]:
    wrong: list[str] = []

    @settings(max_examples=-(-count // AT_ONCE), deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.lists(schemas(), min_size=AT_ONCE, max_size=AT_ONCE), st.sampled_from(TEMPERATURES))
    def run(some: list[Any], temperature: float) -> None:
        wrong.extend(check(some, temperature, seed, counts))

    run()
    return wrong


def of_suite(folder: Path, counts: Counter[str]) -> list[str]:
    groups = [group for file in sorted(folder.glob("*.json")) for group in json.loads(file.read_text(encoding="utf-8"))]
    wrong, held = [], []
    for group in groups:
        try:
            matcher = compile_grammar(Constraint("json_schema", json.dumps(group["schema"])), vocabulary())
        except Invalid:
            counts["refused"] += 1
            continue
        held.append(group["schema"])
        for test in group["tests"]:
            own, token_ids = matcher.deep_copy(), vocabulary().tokenizer.tokenize_str(json.dumps(test["data"], ensure_ascii=False))
            is_accepted = own.consume_tokens(token_ids) and own.is_accepting()
            counts[f"{'valid' if test['valid'] else 'invalid'} instances"] += 1
            counts[f"{'valid' if test['valid'] else 'invalid'} instances that are accepted"] += is_accepted
            if is_accepted and not test["valid"]:
                wrong.append(f"{test['data']!r} is accepted for {group['schema']!r}")
    for temperature in TEMPERATURES:
        for start in range(0, len(held), AT_ONCE):
            wrong += check(held[start : start + AT_ONCE], temperature, start, counts)
    return wrong


def check(some: list[Any], temperature: float, seed: int, counts: Counter[str]) -> list[str]:
    """What did not keep to its schema."""
    answers = generate([Constraint("json_schema", json.dumps(each)) for each in some], temperature=temperature, seed=seed, max_tokens=400)
    counts["schemas"] += len(some)
    counts.update(answer.finish_reason for answer in answers)
    return [f"{answer} for {schema!r}: {problem}" for answer, schema in zip(answers, some, strict=True) if (problem := problem_of(answer, schema))]


def problem_of(answer: Answer, schema: Any) -> str:
    if answer.finish_reason == "error":
        return str(answer.error)
    if answer.finish_reason == "length":
        return ""
    try:
        keeps_to(answer.text, schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    except Exception as error:  # a reference to what is not there, for one
        return repr(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
