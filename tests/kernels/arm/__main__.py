"""`make verify SUITE=arm`: the kernels for Arm's processors, on a machine that has none.

Two runs, which need each other. The kernels' own tests, over a build for x86-64 in which SIMDe
(simd-everywhere) computes each of Arm's instructions; so every result is compared with the
definition in torch. And a program that calls every kernel with random numbers, over that build, and
over one for aarch64 in QEMU: all bits are equal, so Arm's own instructions do what SIMDe's do. QEMU's
processors also show that each machine gets the best instruction set that it has.

Needs (Debian): apt install g++ g++-aarch64-linux-gnu qemu-user libsimde-dev. ARGS are pytest's.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from services.compute.backends.cpu.build import ARM, LINUX, compile_library
from tests.kernels.arm.pretend import LIBRARY

HERE = Path(__file__).parent
PROGRAMS = ("g++", "aarch64-linux-gnu-g++", "qemu-aarch64")
SIMDE = Path("/usr/include/simde/arm/neon.h")
CROSS = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
# QEMU's processors, and the instruction set that a machine with each gets
PROCESSORS = {"max": "i8mm", "neoverse-n1": "neon", "cortex-a72": "none"}


def main(arguments: list[str]) -> None:
    missing = [name for name in PROGRAMS if shutil.which(name) is None] + ([] if SIMDE.exists() else [str(SIMDE)])
    if missing:
        sys.exit(
            f"missing: {', '.join(missing)}. On Debian: apt install g++ g++-aarch64-linux-gnu qemu-user libsimde-dev"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here, arm = folder / "here.so", folder / "arm.so"
        simde = ["-I", str(HERE), "-mavx2", "-mfma", "-mf16c", "-ffp-contract=off"]
        compile_or_end(["g++", f'-DPENSTOCK_REGISTRY="{HERE / "registry.inc"}"'], dict.fromkeys(ARM, simde), here)
        compile_or_end(["aarch64-linux-gnu-g++"], ARM, arm)
        compare_bits(folder, here, arm)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.kernels.arm.pretend",
            "-q",
            "-n",
            str(os.cpu_count()),
            "tests/kernels",
        ]
        command += ["--ignore", "tests/kernels/cuda", "-k", " or ".join(ARM), *arguments]
        sys.exit(subprocess.run(command, env=os.environ | {LIBRARY: str(here)}, check=False).returncode)


def compile_or_end(compiler: list[str], instruction_sets: dict[str, list[str]], to: Path) -> None:
    problem = compile_library(compiler, LINUX, instruction_sets, to)
    if problem is not None:
        sys.exit(problem)


def compare_bits(folder: Path, here: Path, arm: Path) -> None:
    """Ends the program if a kernel gives other bits on Arm, or with another instruction set, or a
    machine gets another instruction set than its best.
    """
    options = ("-std=c++17", "-O1", "-fopenmp", "-ffp-contract=off", str(HERE / "driver.cpp"), "-ldl")
    for compiler, driver in (("g++", "driver-here"), ("aarch64-linux-gnu-g++", "driver-arm")):
        subprocess.run([compiler, *options, "-o", folder / driver], check=True)
    for processor, expected in PROCESSORS.items():
        found = output(*CROSS, "-cpu", processor, folder / "driver-arm", arm)
        if found != [expected]:
            sys.exit(f"QEMU's {processor} gets {found}, not {expected}")
    bits = set()
    for name in ARM:
        ours, theirs = (
            output(folder / "driver-here", here, name),
            output(*CROSS, "-cpu", "max", folder / "driver-arm", arm, name),
        )
        different = [line for line, other in zip(ours, theirs, strict=True) if line != other]
        if different or not ours:
            sys.exit(f"{name}: other bits on Arm:\n" + "\n".join(different))
        bits.add(tuple(ours))
        print(f"{name}: {len(ours)} results, the same bits in QEMU")
    if len(bits) > 1:
        sys.exit(f"{' and '.join(ARM)} give different bits")


def output(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    main(sys.argv[1:])
