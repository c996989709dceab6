"""Relative links between Markdown files lead somewhere: to a file, and to a heading of it. GitHub
and the site find the same headings.
"""

import re
from pathlib import Path

from tests.lint.pages import CODE, DOCS, github_slug, headings, pages, prose_lines, site_slug
from tests.lint.problem import Problem

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def problems() -> list[Problem]:
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    anchors = {page: {github_slug(title) for _, title in headings(text)} for page, text in texts.items()}
    return [
        problem
        for page, text in texts.items()
        for problem in (*wrong_headings(page, text), *wrong_links(page, text, anchors))
    ]


def wrong_headings(page: Path, text: str) -> list[Problem]:
    titles = [title for _, title in headings(text)]
    found = [
        Problem(page, 0, f"GitHub and the site make different anchors of {title!r}")
        for title in titles
        if github_slug(title) != site_slug(title)
    ]
    slugs = [github_slug(title) for title in titles]
    return found + [
        Problem(page, 0, f"two headings have the anchor {slug}")
        for slug in sorted({slug for slug in slugs if slugs.count(slug) > 1})
    ]


def wrong_links(page: Path, text: str, anchors: dict[Path, set[str]]) -> list[Problem]:
    found = []
    for number, line in prose_lines(text):
        for target in LINK.findall(CODE.sub("", line)):
            if (reason := problem_of(page, target, anchors)) is not None:
                found.append(Problem(page, number, f"{target}: {reason}"))
    return found


def problem_of(page: Path, target: str, anchors: dict[Path, set[str]]) -> str | None:
    """The problem of a link; None: no problem, or it leads out of the repository."""
    if re.match(r"[a-z]+:", target):
        return None
    path, _, anchor = target.partition("#")
    there = (page.parent / path).resolve() if path else page
    if not there.is_file():
        return "there is no such file"
    if DOCS in page.parents and DOCS not in there.parents:
        return "the site has no files outside of docs/"
    return f"there is no heading {anchor}" if anchor and anchor not in anchors.get(there, set()) else None
