"""`python -m tests.kernels.cuda`: the CUDA backend without a GPU. Minutes.

Every kernel runs in Triton's interpreter, with its errors, and whole models do; then each kernel is
compiled for Ampere, Ada and Hopper. The arguments are `python -m bench.gpu`'s.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = "tests/kernels/cuda"


def main() -> int:
    (ROOT / "build/gpu.json").unlink(missing_ok=True)  # what it says has been run is not run again
    run("bench.gpu", "--out", "build", *sys.argv[1:], TRITON_INTERPRET="1")
    run("pytest", "--numprocesses", "auto", "-m", "", FOLDER, f"{FOLDER}/more_models.py", f"{FOLDER}/more_bench.py")
    run("tests.kernels.cuda.compiled", "80", "89", "90")
    return 0


def run(module: str, *arguments: str, **environment: str) -> None:
    code = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, env=os.environ | environment).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
