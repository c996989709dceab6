"""Build the native library: `penstock build-kernels`. Installing the package does it as well.

Each instruction set's file is compiled for it, whatever the machine that builds; the library
chooses at run time. It is linked to libgomp.so.1 by name only: torch's wheel brings one, which is
loaded first, and so the two share one pool of threads.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "libpenstock_kernels.so"
# x86-64
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512_VNNI = [
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512vnni",
    "-mfma",
    "-mf16c",
    "-mprefer-vector-width=512",
]
AVX512 = [*AVX512_VNNI, "-mavx512bf16"]
X86 = {
    "amx": [*AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
    "avx512": AVX512,
    "avx512vnni": AVX512_VNNI,
    "avxvnni": [*AVX2, "-mavxvnni"],
    "avx2": AVX2,
}
ARM = {"i8mm": ["-march=armv8.2-a+dotprod+i8mm"], "neon": ["-march=armv8.2-a+dotprod"]}
# best first, as in registry_*.inc: each one's file has its name, and is compiled with these flags
INSTRUCTION_SETS = ARM if platform.machine() in ("aarch64", "arm64") else X86
# -ffp-contract=off: all compilers make the same bits
COMMON = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
]


@dataclass(frozen=True)
class System:
    """A compiler's options. OpenMP's functions come from the library that torch has loaded. clang
    on Linux links its own, a second pool of threads.
    """

    compile: tuple[str, ...]
    link: tuple[str, ...]


LINUX = System(("-fopenmp",), ("-shared", "-fopenmp"))
MAC = System(
    ("-Xclang", "-fopenmp", "-mmacosx-version-min=11.0"),
    ("-dynamiclib", "-undefined", "dynamic_lookup", "-mmacosx-version-min=11.0"),
)
SYSTEMS = {("linux", "x86_64"): LINUX, ("linux", "aarch64"): LINUX, ("darwin", "arm64"): MAC}


def source_id() -> str:
    """The hash of the C++ sources as they stand here. A library that was built from another does
    not fit the structures of library.py."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in (".h", ".inc", ".cpp"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def find_compiler() -> str | None:
    """CXX from the environment, or g++ or clang++."""
    return next(
        (found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None
    )


def build() -> str | None:
    """Compile LIBRARY. Returns None, or why there is none."""
    system = SYSTEMS.get((sys.platform, platform.machine()))
    if system is None:
        return (
            f"the kernels are for Linux on x86-64 and aarch64, and macOS on arm64; this is {sys.platform} on "
            f"{platform.machine()}"
        )
    compiler = find_compiler()
    if compiler is None:
        return "no C++ compiler was found (g++ or clang++)"
    return compile_library([compiler], system, INSTRUCTION_SETS, LIBRARY)


def compile_library(
    compiler: list[str], system: System, instruction_sets: dict[str, list[str]], to: Path
) -> str | None:
    """Compile the library of some instruction sets. Returns None, or what failed."""
    files: dict[str, list[str]] = {"api.cpp": [], "draw.cpp": []} | {
        f"{name}.cpp": flags for name, flags in instruction_sets.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{name}.o" for name in files]
        common = [*compiler, *COMMON, *system.compile, f'-DPENSTOCK_SOURCE_ID="{source_id()}"']
        commands = [
            [*common, *flags, "-c", str(HERE / name), "-o", str(out)]
            for (name, flags), out in zip(files.items(), objects, strict=True)
        ]
        with ThreadPoolExecutor() as pool:
            done = list(pool.map(lambda command: subprocess.run(command, capture_output=True, text=True), commands))
        linked = Path(folder) / to.name
        # the linker keeps the first of an inline function's copies, which every machine must run:
        # the best set comes last
        done.append(
            subprocess.run(
                [*compiler, *system.link, *map(str, reversed(objects)), "-o", str(linked)],
                capture_output=True,
                text=True,
            )
        )
        failed = next((each for each in done if each.returncode), None)
        if failed is not None:
            return f"{' '.join(map(str, failed.args))} failed:\n{failed.stderr[-2000:]}"
        shutil.move(linked, to)
    return None
