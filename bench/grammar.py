"""What does holding answers to a grammar add to a step? Batch 32, vocabulary 151,936.

Method: a made model of shape qwen2.5-0.5b in bfloat16 decodes 32 sequences, drawn at temperature 1,
for --steps steps with a grammar and as many without, in turns. Random weights are a hard case:
strings and white space wander through the whole vocabulary. A step with grammars is the loop's own:
masks are filled in a thread beside the forward pass, and added to the logits before the reduction.
Beside it, what filling and adding take by themselves.

    python -m bench.grammar [--model FOLDER]

The last line is JSON.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from bench.model_folder import model_folder
from bench.reduction import BATCH, VOCABULARY, make_engine
from services.compute.candidates.constraints import Constraints
from services.compute.candidates.reduction import NO_MASKS, reduce
from services.compute.loop.engine import Engine
from services.compute.sequence import Request, Sequence, Tokens
from shared.model.constraint import Constraint
from shared.model.grammar import compile_grammar
from shared.model.sampling_params import SamplingParams

RECORDS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
            "seen": {"type": "string", "format": "date-time"},
        },
        "required": ["name", "age", "tags", "seen"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
CASES = {
    "a JSON schema": Constraint("json_schema", json.dumps(RECORDS)),
    "any JSON": Constraint("json_schema", '{"type": "array", "minItems": 1000}'),
    "a regular expression": Constraint("regex", r"([A-Z][a-z]{2,12}( [a-z]{1,12}){3,20}\. )*"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What grammars add to a step.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", type=Path, help="a folder made by make-model; by default one is made")
    args = parser.parse_args()
    with model_folder(args.model, "qwen2.5-0.5b") as model:
        engine = make_engine(model)
        assert engine.runner.vocab_size == VOCABULARY
        started = time.perf_counter()
        vocabulary = engine.load_vocabulary()
        result: dict[str, float] = {"vocabulary_s": time.perf_counter() - started}
    print(f"the vocabulary takes {result['vocabulary_s']:.2f} s, once")
    for name, constraint in CASES.items():
        started = time.perf_counter()
        compile_grammar(constraint, vocabulary)
        compiled_ms = (time.perf_counter() - started) * 1000
        free, held, filling, adding = measure(
            engine, Constraints(lambda: vocabulary, VOCABULARY), constraint, args.steps
        )
        print(
            f"{name:22} compiles in {compiled_ms:5.1f} ms; a step {free:6.1f} ms without, {held:6.1f} with "
            f"({held / free - 1:+.1%}); "
            f"by themselves filling {filling:5.2f} ms, adding {adding:5.2f}"
        )
        key = name.replace(" ", "_")
        result |= {
            f"{key}_step_ms": free,
            f"{key}_held_ms": held,
            f"{key}_filling_ms": filling,
            f"{key}_adding_ms": adding,
            f"{key}_compile_ms": compiled_ms,
        }
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


def begin(engine: Engine, constraints: Constraints, constraint: Constraint, max_tokens: int) -> list[Sequence]:
    """Sequences whose grammars are compiled, in the scheduler."""
    sequences = [
        Sequence(
            Request(n, str(n), SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=n), (1,)),
            Tokens([5] * 100, 100),
        )
        for n in range(BATCH)
    ]
    for sequence in sequences:
        engine.scheduler.add(sequence)
        constraints.open(sequence, constraint)
    while constraints.opening:
        assert not [error for _, error in constraints.opened() if error]
        time.sleep(0.001)
    return sequences


def measure(
    engine: Engine, constraints: Constraints, constraint: Constraint, num_steps: int
) -> tuple[float, float, float, float]:
    """Medians in milliseconds: a step without the grammar, a step with it, filling the step's masks, adding them."""
    scheduler, sequences = engine.scheduler, begin(engine, constraints, constraint, 2 * num_steps + 5)
    seconds: dict[str, list[float]] = {"free": [], "held": [], "filling": [], "adding": []}
    for step in range(3 * num_steps):
        kind = ("apart", "free", "held")[step % 3]
        batch = scheduler.schedule()
        assert batch is not None and len(batch.sampled) == BATCH
        rows_of = [scheduler.get(handle) for handle, _ in batch.sampled]
        started = time.perf_counter()
        masking = constraints.start([sequence.prefix() for sequence in rows_of]) if kind != "free" else None
        if masking is not None and kind == "apart":
            masking.result()
            seconds["filling"].append(time.perf_counter() - started)
        logits = engine.runner.forward(batch)
        masks = masking.result() if masking is not None else NO_MASKS
        if kind == "apart":
            started = time.perf_counter()
            engine.runner.row_search.ban(
                logits, np.arange(BATCH), [masks.by_row[sequence.prefix().key] for sequence in rows_of]
            )
            seconds["adding"].append(time.perf_counter() - started)
        rows = reduce(logits, rows_of, engine.runner.row_search, masks)
        if kind != "apart":
            seconds[kind].append(time.perf_counter() - started)
        for sequence, token_id in zip(rows_of, rows.chosen.tolist(), strict=True):
            if kind == "free":  # the same step once more: the sequences keep to their grammars
                sequence.kv.num_computed -= 1
            else:
                scheduler.append(sequence, token_id)
    for sequence in sequences:
        scheduler.finish(sequence)
    return tuple(statistics.median(values) * 1000 for values in seconds.values())  # type: ignore[return-value]


if __name__ == "__main__":
    main()
