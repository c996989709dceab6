"""`make verify SUITE=wheel`: `pip wheel` makes a wheel with the kernels inside, which works where there is no compiler.

Shows that the wheel has every file of services/ and shared/ and the library, and nothing else; that
its tag is one that auditwheel finds right; and that a new environment without a compiler answers
with it, on native kernels. The packages that it needs there are those of this environment; CI
installs them, in a container. Built where there is no compiler, it is a wheel of pure Python.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from services.compute.backends.cpu.build import INSTRUCTION_SETS, LIBRARY

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="one that was built before")
    given: Path | None = parser.parse_args().wheel
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = given if given is not None else build(folder / "built", dict(os.environ))
        check_contents(wheel)
        check_tag(wheel, folder)
        check_instruction_sets(wheel, folder)
        check_answer(wheel, folder / "venv")
        without = build(folder / "without", with_path(Path(sys.executable).parent))
        assert without.name.endswith("-py3-none-any.whl"), "it was built without a compiler"
    print("the wheel is what it should be")


def build(folder: Path, environment: dict[str, str]) -> Path:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT],
        check=True,
        env=environment,
    )
    (wheel,) = folder.iterdir()
    print(f"built {wheel.name}, {wheel.stat().st_size / 2**20:.1f} MiB")
    return wheel


def check_contents(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "services", "shared"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    expected = {*filter(None, listed), str(LIBRARY.relative_to(ROOT))}
    with zipfile.ZipFile(wheel) as opened:
        found = {name for name in opened.namelist() if ".dist-info/" not in name}
    assert found == expected, f"missing: {sorted(expected - found)}; too many: {sorted(found - expected)}"
    print(f"{len(found)} files: those of services/ and shared/, and the kernels")


def check_tag(wheel: Path, folder: Path) -> None:
    """auditwheel gives a wheel the oldest tags that are right. libgomp is torch's, and the
    library's flags depend on the instruction set that it finds.
    """
    programs = Path(sys.executable).parent
    options = ("--exclude", "libgomp.so.1", "--disable-isa-ext-check", "--wheel-dir", folder / "repaired")
    subprocess.run([programs / "auditwheel", "repair", *options, wheel], check=True, env=with_path(programs))
    (repaired,) = (folder / "repaired").iterdir()
    tag = wheel.stem.split("-")[-1]
    assert tag.startswith("manylinux_2_") and at_least(tag, repaired.stem.split("-")[-1]), (
        f"the tag is {tag}, and auditwheel's {repaired.name}"
    )
    print(f"{tag}: right, says auditwheel")


def at_least(tag: str, others: str) -> bool:
    """Whether a manylinux tag promises no more than the oldest of some."""
    return int(tag.split("_")[2]) >= min(
        int(other.split("_")[2]) for other in others.split(".") if other.startswith("manylinux_2_")
    )


def check_instruction_sets(wheel: Path, folder: Path) -> None:
    """The library has a table of each by its name."""
    with zipfile.ZipFile(wheel) as opened:
        library = opened.read(str(LIBRARY.relative_to(ROOT)))
    missing = [name for name in INSTRUCTION_SETS if name.encode() + b"\0" not in library]
    assert not missing, f"no kernels for {missing}"
    print(f"kernels for {', '.join(INSTRUCTION_SETS)}")


def check_answer(wheel: Path, place: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    python = place / "bin/python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", wheel], check=True
    )
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    # behind the new environment's own, and without what this one's .pth files add: its Penstock is the wheel's
    (Path(packages.strip()) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = subprocess.run(
        [python, "-I", "-c", "import services; print(services.__file__)"], check=True, capture_output=True, text=True
    ).stdout
    assert found.startswith(str(place)), f"this is not the wheel's: {found}"
    subprocess.run(
        [python, HERE / "answers.py", place / "bin/penstock"], check=True, cwd=place, env=with_path(place / "bin")
    )


def with_path(folder: Path) -> dict[str, str]:
    """This environment with no other programs than a folder's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {"PATH": str(folder)}


if __name__ == "__main__":
    main()
