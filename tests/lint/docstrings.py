"""Docstrings begin with a sentence or a noun phrase, not with a bare genitive or pronoun. Questions are fine."""

import ast
import re

from tests.lint.problem import ROOT, Problem

FOLDERS = ("services", "shared", "bench", "tests")
BARE = re.compile(r"(Of|One of|By|What|Who|Whoever|Those|Under way)\b")
SENTENCE = re.compile(r".*?[.?!](?=\s|$)", re.DOTALL)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def bare_docstrings(source: str) -> list[tuple[int, str]]:
    """Lines of the docstrings that begin so, and the words with which they do."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)) and (bare := BARE.match(text)):
            sentence = SENTENCE.match(text)
            if sentence is None or not sentence[0].endswith("?"):
                found.append((node.body[0].lineno, bare[0]))
    return sorted(found)


def problems() -> list[Problem]:
    return [
        Problem(path, number, f"a docstring begins with a bare {words!r}")
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, words in bare_docstrings(path.read_text(encoding="utf-8"))
    ]
