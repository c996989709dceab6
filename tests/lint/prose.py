"""Prose in Markdown wraps at 100 columns. Tables, code blocks and the targets of links do not count.
README.md is a front page: at most 70 lines, none of them longer."""

import re

from tests.lint.pages import pages, prose_lines
from tests.lint.problem import ROOT, Problem

WIDTH = 100
README, MOST_LINES = ROOT / "README.md", 70
TARGET = re.compile(r"\]\([^)]*\)")


def long_lines(text: str) -> list[tuple[int, int]]:
    """Numbers and lengths of the lines of prose that are too long."""
    lines = [
        (number, len(TARGET.sub("]", line))) for number, line in prose_lines(text) if not line.lstrip().startswith("|")
    ]
    return [(number, length) for number, length in lines if length > WIDTH]


def problems() -> list[Problem]:
    lines = README.read_text(encoding="utf-8").splitlines()
    found = [
        Problem(README, number, f"{len(line)} columns, more than {WIDTH}")
        for number, line in enumerate(lines, 1)
        if len(line) > WIDTH
    ]
    found += [Problem(README, 0, f"{len(lines)} lines, more than {MOST_LINES}")] if len(lines) > MOST_LINES else []
    return found + [
        Problem(page, number, f"{length} columns of prose, more than {WIDTH}")
        for page in pages()
        for number, length in long_lines(page.read_text(encoding="utf-8"))
    ]
