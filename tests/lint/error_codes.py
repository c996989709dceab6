"""Errors: the pages of docs/use name each code that a client can get."""

import re

from tests.lint.problem import ROOT, Problem

PAGES = ROOT / "docs/use"
PLACES = ("services", "shared")
CODE = re.compile(r"\bcode=\"([a-z_]+)\"")


def problems() -> list[Problem]:
    told = set(re.findall(r"`([a-z_]+)`", "".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))))
    found = []
    for path in sorted(path for place in PLACES for path in (ROOT / place).rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [
                Problem(path, number, f"docs/use does not name the error {code}")
                for code in CODE.findall(line)
                if code not in told
            ]
    return found
