"""Thousands of schemas: `python -m tests.grammars`. Prints what became of them, and ends with 1 if
an answer did not keep to its schema.

By default hypothesis makes them, and patterns are drawn by chance. With --suite FOLDER they are the
JSON Schema Test Suite's (its folder
tests/draft2020-12, which jsonschema's source distribution has). Beside the answers, its own
instances are tried: what it calls invalid must not be
accepted, and of what it calls valid it is counted how much is. With --folder PATH they are the
files *.json below a folder, each a schema that
somebody has written (the data of guidance-ai/jsonschemabench, for one): --count of them, drawn by
--seed from all in the order of their names, each
taken with and without strict as the gateway takes it, with --answers for each that a random walk
draws among the tokens that are allowed. With
--llama-cpp FOLDER they are grammars, of llama.cpp's sources: those in its folder grammars/ and in
its tests, and of these the texts that they must
allow and must not.
"""

import argparse
import json
import random
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from services.requests.text.schemas.prepare import prepare
from services.requests.workers.grammars.answer_worker import problems_of
from shared.model.constraint import Constraint
from shared.model.grammar import compile_grammar
from shared.process.errors import Invalid
from tests.grammars import gbnf
from tests.grammars.generate import Answer, generate, vocabulary
from tests.grammars.patterns import of_patterns
from tests.grammars.schemas import keeps_to, schemas
from tests.grammars.walk import walk_from

AT_ONCE = 32
TEMPERATURES = (0.7, 1.3, 2.5)


def main() -> int:
    parser = argparse.ArgumentParser(description="Are answers that are held to a schema valid?")
    parser.add_argument("--schemas", type=int, default=3000, help="how many hypothesis makes")
    parser.add_argument("--suite", type=Path, help="a folder of the JSON Schema Test Suite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="a folder of schemas")
    parser.add_argument("--count", type=int, default=699, help="how many of the folder's")
    parser.add_argument("--answers", type=int, default=20, help="to each of the folder's")
    parser.add_argument("--patterns", type=int, default=2000, help="how many are drawn, beside hypothesis's schemas")
    parser.add_argument("--llama-cpp", type=Path, help="a folder of llama.cpp's sources")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # hypothesis's, about what takes long
    counts: Counter[str] = Counter()
    if args.folder:
        wrong = of_folder(args.folder, args.count, args.answers, args.seed, counts)
    elif args.suite:
        wrong = of_suite(args.suite, counts)
    elif args.llama_cpp:
        wrong = of_llama_cpp(args.llama_cpp, counts)
    else:
        wrong = of_hypothesis(args.schemas, args.seed, counts) + of_patterns(args.patterns, args.seed, counts)
    for each in wrong[:20]:
        print("WRONG", each)
    print(json.dumps({**counts, "wrong": len(wrong)}))
    return 1 if wrong else 0


def of_hypothesis(count: int, seed: int, counts: Counter[str]) -> list[str]:
    wrong: list[str] = []

    @settings(
        max_examples=-(-count // AT_ONCE),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(schemas(), min_size=AT_ONCE, max_size=AT_ONCE), st.sampled_from(TEMPERATURES))
    def run(some: list[Any], temperature: float) -> None:
        wrong.extend(check(some, temperature, seed, counts))

    run()
    return wrong


def of_folder(folder: Path, count: int, num_answers: int, seed: int, counts: Counter[str]) -> list[str]:
    """An answer that ended is wrong if it is not valid, and nothing would be told of it."""
    files = sorted(folder.rglob("*.json"))
    wrong = []
    for file in random.Random(seed).sample(files, min(count, len(files))):
        text = json.dumps(json.loads(file.read_text(encoding="utf-8-sig")), ensure_ascii=False, separators=(",", ":"))
        counts["schemas"] += 1
        for way, is_lenient in (("strict", False), ("lenient", True)):
            try:
                found = prepare(Constraint("json_schema", text, "schema", is_lenient))
                beginning = compile_grammar(found.constraint, vocabulary())
            except Invalid as error:
                print(f"{way} refused: {file.relative_to(folder)}: {error}")
                continue
            counts[f"{way}: taken"] += 1
            counts[f"{way}: taken, and checked at the end"] += bool(found.checks)
            for answer in (walk_from(beginning, seed=number) for number in range(num_answers)):
                counts[f"{way}: {answer.finish_reason}"] += 1
                problems = problems_of(json.loads(text), answer.text) if answer.finish_reason == "stop" else []
                counts[f"{way}: broken, and told"] += bool(problems and found.checks)
                wrong += [f"{file.name}, {way}: {answer.text!r}: {problems}"] if problems and not found.checks else []
    return wrong


def of_llama_cpp(folder: Path, counts: Counter[str]) -> list[str]:
    """A grammar that llama.cpp takes is wrong if it is refused; one that it refuses for its size may be taken."""
    wrong = []
    for name, grammar, is_good in gbnf.grammars_of(folder):
        refusal = gbnf.refusal(grammar)
        counts["grammars that are taken" if is_good else "grammars that are not taken there"] += 1
        counts["of those: taken"] += is_good and not refusal
        wrong += [f"{name}: {refusal}"] if is_good and refusal else []
    for case in gbnf.cases_of(folder):
        for text, is_allowed in zip(
            case.good + case.bad, gbnf.accepts(case.grammar, case.good + case.bad), strict=True
        ):
            counts["texts"] += 1
            wrong += [f"{case.name}: {text!r}: {is_allowed}"] if is_allowed != (text in case.good) else []
    return wrong


def of_suite(folder: Path, counts: Counter[str]) -> list[str]:
    groups = [group for file in sorted(folder.glob("*.json")) for group in json.loads(file.read_text(encoding="utf-8"))]
    wrong, held = [], []
    for group in groups:
        try:
            matcher = compile_grammar(enforced(group["schema"]), vocabulary())
        except Invalid:
            counts["refused"] += 1
            continue
        held.append(group["schema"])
        for test in group["tests"]:
            own, token_ids = (
                matcher.deep_copy(),
                vocabulary().tokenizer.tokenize_str(json.dumps(test["data"], ensure_ascii=False)),
            )
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
    """Answers that broke their schemas."""
    answers = generate([enforced(each) for each in some], temperature=temperature, seed=seed, max_tokens=400)
    counts["schemas"] += len(some)
    counts.update(answer.finish_reason for answer in answers)
    return [
        f"{answer} for {schema!r}: {problem}"
        for answer, schema in zip(answers, some, strict=True)
        if (problem := problem_of(answer, schema))
    ]


def enforced(schema: Any) -> Constraint:
    """As the gateway hands it to compute. Raises Invalid."""
    return prepare(Constraint("json_schema", json.dumps(schema))).constraint


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
