"""The checks of texts that `make check` runs (tests/lint/) find what they are for."""

import ast

import pytest

from tests.lint.class_names import public_classes, repeated
from tests.lint.contents import BEGIN, with_contents
from tests.lint.docs_links import problem_of, wrong_headings
from tests.lint.named_files import is_there
from tests.lint.pages import DOCS, github_slug, headings, site_slug
from tests.lint.problem import ROOT
from tests.lint.prose import long_lines

LONG = "word " * 30


def test_prose_is_measured_without_tables_code_and_targets_of_links() -> None:
    text = f"{LONG}\n\n| {LONG} |\n\n```\n{LONG}\n```\n\n[a link](https://{'x' * 120})\n\n* {LONG}"
    assert [number for number, _ in long_lines(text)] == [1, 11]


def test_a_long_page_begins_with_its_sections_and_a_short_one_does_not() -> None:
    short = "# Page\n\nWhat it is about.\n\n## One\n\n## Two\n\n## Three\n"
    assert with_contents(short) == short
    made = with_contents(short + "line\n" * 90)
    assert made.startswith(
        f"# Page\n\nWhat it is about.\n\n{BEGIN}\nOn this page:\n[One](#one) ·\n[Two](#two) ·\n[Three](#three)\n"
    )
    assert with_contents(made) == made
    assert with_contents(made.replace("line\n", "")) == short


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("https://example.com/x", None),
        ("use/chat.md", None),
        ("use/chat.md#reasoning", None),
        ("use/chat.md#no-such-heading", "there is no heading no-such-heading"),
        ("use/no-such-page.md", "there is no such file"),
        ("../README.md", "the site has no files outside of docs/"),
    ],
)
def test_a_dead_link_is_told(target: str, reason: str | None) -> None:
    chat = DOCS / "use" / "chat.md"
    anchors = {chat: {github_slug(title) for _, title in headings(chat.read_text())}}
    assert problem_of(DOCS / "index.md", target, anchors) == reason


def test_a_heading_has_one_anchor_wherever_it_is_read() -> None:
    assert (
        github_slug("`max_tokens` beyond the window")
        == site_slug("`max_tokens` beyond the window")
        == "max_tokens-beyond-the-window"
    )
    assert len(wrong_headings(ROOT / "README.md", "# Why not …\n\n## Twice\n\n## Twice\n")) == 2


def test_a_file_is_named_by_its_path_or_by_the_end_of_it() -> None:
    files = {"services/compute/cache/block_manager.py"}
    assert is_there("cache/block_manager.py", files) and is_there("services/compute/cache/block_manager.py", files)
    assert not is_there("services/cache/block_manager.py", files) and not is_there("block.py", files)


def test_a_public_class_name_stands_once() -> None:
    sources = {
        "first": "class Line: ...\nclass _Own: ...\nclass Offer:\n    class Inner: ...",
        "second": "class _Own: ...\nclass Inner: ...\n\nclass Line: ...",
    }
    places = public_classes({ROOT / name: ast.parse(text) for name, text in sources.items()})
    assert [str(problem) for problem in repeated(places)] == ["second:4: a class Line stands in first, too"]


def test_ci_runs_the_commands_that_the_readme_names() -> None:
    readme = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    script = [line.split("&")[0].split(" ARGS=")[0].strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert all(command in readme and command in script for command in ("make check", "make test"))
    assert not [line for line in script if "-m tests" in line or "pytest" in line]
