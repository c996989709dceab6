"""A public class name stands once in services/ and shared/: one word means one thing."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.lint.problem import ROOT, Problem


def problems() -> list[Problem]:
    """A problem for each class but the first of a name."""
    trees = {
        path: ast.parse(path.read_text())
        for folder in ("services", "shared")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    return repeated(public_classes(trees))


def public_classes(trees: dict[Path, ast.Module]) -> dict[str, list[tuple[Path, int]]]:
    """The files and lines of each public class at the top of a module, by its name."""
    places: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append((path, node.lineno))
    return dict(places)


def repeated(places: dict[str, list[tuple[Path, int]]]) -> list[Problem]:
    return [
        Problem(path, line, f"a class {name} stands in {first.relative_to(ROOT)}, too")
        for name, ((first, _), *others) in places.items()
        for path, line in others
    ]
