"""The repository's Markdown, and what the checks need to know of it."""

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from tests.lint.problem import ROOT

DOCS = ROOT / "docs"
FENCE = re.compile(r"^\s*(```|~~~)")
HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*$")
CODE = re.compile(r"`[^`]*`")


def pages() -> list[Path]:
    """Every Markdown file that somebody reads: the root's, .github's, and docs/."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md"), *DOCS.rglob("*.md")])


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines outside of code blocks, with their numbers from 1."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            is_code = not is_code
        elif not is_code:
            yield number, line


def headings(text: str) -> list[tuple[int, str]]:
    """Levels and titles, in their order."""
    found = [HEADING.match(line) for _, line in prose_lines(text)]
    return [(len(each[1]), each[2]) for each in found if each]


def github_slug(title: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower().replace("`", "")).replace(" ", "-")


def site_slug(title: str) -> str:
    """The anchor that Python-Markdown, and so MkDocs, makes of it."""
    plain = unicodedata.normalize("NFKD", title.replace("`", "")).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
