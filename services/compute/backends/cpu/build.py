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
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "libpenstock_kernels.so"
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512_VNNI = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c", "-mprefer-vector-width=512"]
AVX512 = [*AVX512_VNNI, "-mavx512bf16"]
# best first, as in registry.inc: each one's file has its name, and is compiled with these flags
INSTRUCTION_SETS = {
    "amx": [*AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
    "avx512": AVX512,
    "avx512vnni": AVX512_VNNI,
    "avxvnni": [*AVX2, "-mavxvnni"],
    "avx2": AVX2,
}
FLAGS: dict[str, list[str]] = {"api.cpp": [], "draw.cpp": ["-ffp-contract=off"]} | {f"{name}.cpp": flags for name, flags in INSTRUCTION_SETS.items()}
COMMON = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"]


def source_id() -> str:
    """The hash of the C++ sources as they stand here. A library that was built from another does
    not fit the structures of library.py."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in (".h", ".inc", ".cpp"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def find_compiler() -> str | None:
    """CXX from the environment, or g++ or clang++."""
    return next((found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None)


def build() -> str | None:
    """Compile LIBRARY. Returns None, or why there is none."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        return f"the kernels are for x86-64 Linux, this is {platform.machine()} {sys.platform}"
    compiler = find_compiler()
    if compiler is None:
        return "no C++ compiler was found (g++ or clang++)"
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{name}.o" for name in FLAGS]
        made_from = f'-DPENSTOCK_SOURCE_ID="{source_id()}"'
        commands = [
            [compiler, *COMMON, made_from, *flags, "-c", str(HERE / name), "-o", str(out)] for (name, flags), out in zip(FLAGS.items(), objects, strict=True)
        ]
        with ThreadPoolExecutor() as pool:
            done = list(pool.map(lambda command: subprocess.run(command, capture_output=True, text=True), commands))
        linked = Path(folder) / LIBRARY.name
        done.append(subprocess.run([compiler, "-shared", "-fopenmp", *map(str, objects), "-o", str(linked)], capture_output=True, text=True))
        failed = next((each for each in done if each.returncode), None)
        if failed is not None:
            return f"{' '.join(map(str, failed.args))} failed:\n{failed.stderr[-2000:]}"
        shutil.move(linked, LIBRARY)
    return None
