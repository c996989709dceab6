"""Files and folders that pages name are there."""

import re
from pathlib import Path

from tests.lint.pages import pages, prose_lines
from tests.lint.problem import ROOT, Problem

FOLDERS = ("services", "shared", "tests", "bench", "deploy", "docs", ".github")
NAME = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|lua|cpp|h|inc|mjs|js|acl|conf|yml|toml))`")
FOLDER = re.compile(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/(?:[\w.-]+/)*)`")
IMAGINED = {
    "lanes_sve.inc",
    "sve.cpp",
}  # an instruction set that docs/understand/kernels.md makes up to show how one is added


def problems() -> list[Problem]:
    files = {
        path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()
    }
    files |= {path.name for path in ROOT.iterdir() if path.is_file()}
    found = []
    for page in pages():
        for number, line in prose_lines(page.read_text(encoding="utf-8")):
            missing = [name for name in NAME.findall(line) if not is_there(name, files)]
            missing += [name for name in FOLDER.findall(line) if not (ROOT / name).is_dir()]
            found += [Problem(page, number, f"there is no {name}") for name in missing]
    return found


def is_there(name: str, files: set[str]) -> bool:
    """Whether a file has this path, or ends with it: a page about compute need not write services/compute/."""
    whole = Path(name).parts[0] in FOLDERS
    return name in IMAGINED or name in files or (not whole and any(path.endswith(f"/{name}") for path in files))
