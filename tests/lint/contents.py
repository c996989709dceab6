"""Contents: a page that is longer than a screen begins with the names of its sections, for who
reads it on GitHub. MkDocs shows them beside the page.
"""

import re
from pathlib import Path

from tests.lint.pages import DOCS, github_slug, headings, prose_lines
from tests.lint.problem import Problem

BEGIN, END = "<!-- contents -->", "<!-- end of contents -->"
SCREEN = 80  # lines of a page that needs no contents
FEWEST = 3  # sections of a page that has contents


def with_contents(text: str) -> str:
    """The page with its contents behind its first paragraph; without them if it is short."""
    bare = re.sub(rf"{BEGIN}\n.*?{END}\n\n", "", text, flags=re.DOTALL)
    sections = [title for level, title in headings(bare) if level == 2]
    if len(bare.splitlines()) <= SCREEN or len(sections) < FEWEST:
        return bare
    listed = " ·\n".join(f"[{title}](#{github_slug(title)})" for title in sections)
    lines = bare.splitlines()
    first = next(
        number for number, line in prose_lines(bare) if line and not line.startswith(("#", "<!--"))
    )  # its first paragraph
    end = next(number for number in range(first, len(lines)) if not lines[number])
    return "\n".join([*lines[:end], "", BEGIN, "On this page:", listed, END, *lines[end:]]) + "\n"


def listed_pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def write() -> None:
    for page in listed_pages():
        text = page.read_text(encoding="utf-8")
        if text != (wanted := with_contents(text)):
            page.write_text(wanted, encoding="utf-8")


def problems() -> list[Problem]:
    wrong = [page for page in listed_pages() if (text := page.read_text(encoding="utf-8")) != with_contents(text)]
    return [Problem(page, 0, "its contents are not its sections; make docs writes them") for page in wrong]
