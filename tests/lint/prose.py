"""Prose in Markdown wraps at 100 columns. Tables, code blocks and the targets of links do not count."""

import re

from tests.lint.pages import pages, prose_lines
from tests.lint.problem import Problem

WIDTH = 100
TARGET = re.compile(r"\]\([^)]*\)")


def long_lines(text: str) -> list[tuple[int, int]]:
    """Numbers and lengths of the lines of prose that are too long."""
    lines = [(number, len(TARGET.sub("]", line))) for number, line in prose_lines(text) if not line.lstrip().startswith("|")]
    return [(number, length) for number, length in lines if length > WIDTH]


def problems() -> list[Problem]:
    return [
        Problem(page, number, f"{length} columns of prose, more than {WIDTH}")
        for page in pages()
        for number, length in long_lines(page.read_text(encoding="utf-8"))
    ]
