"""Prose in Markdown wraps at 100 columns. Tables, code blocks and the targets of links do not count."""

import re

from tests.lint.pages import ROOT, pages, prose_lines

WIDTH = 100
TARGET = re.compile(r"\]\([^)]*\)")


def problems() -> list[str]:
    return [
        f"{page.relative_to(ROOT)}:{number}: {len(line)} columns of prose, more than {WIDTH}"
        for page in pages()
        for number, line in prose_lines(page.read_text(encoding="utf-8"))
        if not line.lstrip().startswith("|") and len(TARGET.sub("]", line)) > WIDTH
    ]
