"""Is the CUDA backend right on this machine's GPU, and how fast is it, beside what the device can do?

Method: every kernel against its definition, and whole models by bits and tokens; then each kernel's
time over the layers of real shapes, steps of decoding at 1,024 tokens by batch and a prompt of
1,024, with random weights, and with --trace a file of requests through the scheduler: each with a
step in flight and without. The ceilings (a copy of 1 GiB, the vendor's products of 8192 x 8192 x
8192) are measured in the same run. Layers, and steps of the first shape, are measured with the
vendor's products, too (--allow-batch-variance). Last the pipeline's cost with the last shape:
requests over HTTP, through all processes, beside the same steps in a bare loop (bench.pipeline).

    python -m bench.gpu [--parts kernels models ceilings layers steps trace pipeline] [--shapes
    llama-3-8b qwen2.5-7b qwen2.5-0.5b]
                        [--modes none w8a8 w4 fp8] [--trace FILE] [--out DIR]

gpu.json and gpu.md in --out are written after each case. A case that fails, hangs or takes its
process with it is said there, and the others are run all the same. A run that was killed goes on
when it is started again: what has held is not run again, what has not is.

Without a GPU it says so and exits with 2. In Triton's interpreter (TRITON_INTERPRET=1) it checks
what a CPU can, in minutes.
"""

import json
import subprocess
import sys
import time
import uuid
from argparse import Namespace
from pathlib import Path

from bench.gpu.journal import Journal, replace_text
from bench.gpu.options import device_and_versions, is_interpreted, parse
from bench.gpu.report import page
from services.compute.backends.cuda.device import why_unusable
from shared.process.errors import StartupError

WORKER = "bench.gpu.work"
LOOK_EVERY_S = 0.5


def run_once(arguments: list[str], path: Path, run: str, *, is_bounded: bool) -> int:
    """Start a process for the cases that are left, and wait for it; end it where a case takes too
    long. Returns its exit code.
    """
    started_at = time.time()
    process = subprocess.Popen([sys.executable, "-m", WORKER, run, *arguments])
    try:
        while process.poll() is None:
            time.sleep(LOOK_EVERY_S)
            if is_bounded and path.exists() and (written_at := path.stat().st_mtime) > started_at:
                limit_s = json.loads(path.read_text())["cases"][-1]["limit_s"]
                if time.time() - written_at > limit_s:
                    process.kill()
        return process.wait()
    finally:
        process.kill()
        process.wait()


def run_all(options: Namespace, arguments: list[str]) -> int:
    """Raises StartupError for a file that is of another device."""
    options.out.mkdir(parents=True, exist_ok=True)
    path, on, run = options.out / "gpu.json", device_and_versions(), uuid.uuid4().hex
    num_begun, code = len(Journal(path, on, run).of_this_run()), -1
    while code != 0:
        code = run_once(arguments, path, run, is_bounded=not is_interpreted())
        journal = Journal(path, on, run)
        replace_text(options.out / "gpu.md", page(journal))
        if code != 0 and len(journal.of_this_run()) == num_begun:
            break  # it came to no case: so would another
        num_begun = len(journal.of_this_run())
    print(page(journal))
    entries = journal.entries.values()
    print(json.dumps(on | {"cases": len(entries), "hold": sum(each.holds for each in entries)}))
    return int(code != 0 or not all(each.holds for each in entries))


def main() -> int:
    options = parse()
    if not is_interpreted() and (reason := why_unusable()) is not None:
        print(f"no GPU can be used: {reason}", file=sys.stderr)
        return 2
    try:
        return run_all(options, sys.argv[1:])
    except StartupError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
