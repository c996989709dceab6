"""`make verify SUITE=models`: tiny random checkpoints of the architectures that transformers knows,
loaded as compute does.

Not part of `make test`. `cases.py` says of each architecture how it runs (native, ragged, one by
one), or with which words it is refused. 20 greedy tokens of prompts of 5, 40 and 130 tokens must be
those of transformers' `generate` in float32: in one batch, in chunks, and over the prefix cache. A
process is forked for each, so a crash is one row. Those in SERVED run behind the real pipeline as well,
and compute is killed in the middle (served.py).

`--gguf FOLDER`, of llama.cpp's source, converts each checkpoint first and loads the file.
"""

import argparse
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils import logging

from tests.models.blueprints import Blueprint
from tests.models.cases import CASES, SERVED
from tests.models.compare import Result, compare
from tests.models.convert import CONVERTED
from tests.models.served import serve

# for one architecture
PATIENCE_S = 600
MEMORY = 4 << 30


def in_a_process(name: str, blueprint: Blueprint, converter: Path | None) -> Result:
    """Compare in a process of its own."""
    began = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(report(name, blueprint, converter, writing))
    os.close(writing)
    said = b""
    while select.select([reading], [], [], max(0.0, began + PATIENCE_S - time.monotonic()))[0] and (
        part := os.read(reading, 1 << 16)
    ):
        said += part
    os.close(reading)
    if not said:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    result = Result(**json.loads(said)) if said else Result(name, f"the process ended with {status} and said nothing")
    result.seconds = round(time.monotonic() - began, 1)
    return result


def report(name: str, blueprint: Blueprint, converter: Path | None, writing: int) -> int:
    """In the child: what came of it goes to the parent, a crash as well."""
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))  # a config that leaves out a size means a large one
        with tempfile.TemporaryDirectory() as folder:
            result = compare(name, blueprint, Path(folder), converter)
    except BaseException as error:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f" ({Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno})" if place is not None else ""
        result = Result(name, f"crash: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}{where}")
    os.write(writing, json.dumps(asdict(result)).encode())
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models")
    parser.add_argument("--only", default="", help="names of cases, joined by commas")
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON")
    parser.add_argument("--gguf", type=Path, help="llama.cpp's folder: run the files that its converter makes")
    arguments = parser.parse_args()
    all_names = list(CASES if arguments.gguf is None else CONVERTED)
    names = arguments.only.split(",") if arguments.only else all_names
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no case {unknown[0]}")
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    rows, began = [], time.monotonic()
    for name in names:
        expected, blueprint = CASES[name]
        result = in_a_process(name, blueprint, arguments.gguf)
        problem = result.problem(expected)
        rows.append(asdict(result) | {"expected": expected, "problem": problem})
        numbers = f"{result.tokens}, {result.difference:.0e}, " if result.tokens else ""
        print(
            f"{name:28} {result.outcome[:100]} ({numbers}{result.seconds} "
            f"s){f'   FAILED: {problem}' if problem else ''}",
            flush=True,
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1))
    failed = [row["name"] for row in rows if row["problem"]]
    for name in [each for each in SERVED if each in names and arguments.gguf is None]:
        with tempfile.TemporaryDirectory() as folder:
            equal = serve(name, CASES[name][1], Path(folder))
        print(f"{name:28} served, killed and resumed: {'equal' if all(equal) else f'   FAILED: {equal}'}", flush=True)
        failed += [] if all(equal) else [f"{name}, served"]
    counts = Counter(str(row["outcome"]).partition(": ")[0] for row in rows)
    print(
        f"{len(rows)} architectures in {time.monotonic() - began:.0f} s: "
        f"{', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())}"
    )
    print(f"FAILED: {', '.join(map(str, failed))}" if failed else "all as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
