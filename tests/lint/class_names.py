"""A public class name stands once in services/ and shared/: one word means one thing."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.lint.problem import ROOT, Problem

# Names that still stand twice. Nothing new belongs here: take the field's word for the second thing.
TWICE = frozenset({
    "Admission", "Answer", "Attention", "CacheSize", "Calibration", "ChatOptions", "Choice", "Context",
    "Control", "Conversation", "Decoder", "Draws", "End", "Exchange", "Form", "Format", "Grammar", "Group",
    "Head", "Heads", "Kept", "Kind", "Line", "Marks", "Measured", "Member", "Model", "ModelShape", "Named",
    "Norms", "Offer", "Opening", "Parser", "Parts", "Piece", "Place", "Places", "Prepared", "Progress",
    "Question", "Replay", "Replica", "Result", "Rows", "StepLimits", "Stored", "Timeline", "TokenCounts",
    "Turn", "Usage", "Watch",
})  # fmt: skip


def problems() -> list[Problem]:
    """Each class but the first of a name, unless `TWICE` allows the name. Prints a hint for allowed names that stand once by now."""
    trees = {path: ast.parse(path.read_text()) for folder in ("services", "shared") for path in sorted((ROOT / folder).rglob("*.py"))}
    places = public_classes(trees)
    if done := sorted(name for name in TWICE if len(places.get(name, [])) < 2):
        print(f"TWICE of tests/lint/class_names.py may lose the names that stand once: {', '.join(done)}")
    return repeated(places, TWICE)


def public_classes(trees: dict[Path, ast.Module]) -> dict[str, list[tuple[Path, int]]]:
    """The files and lines of each public class at the top of a module, by its name."""
    places: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append((path, node.lineno))
    return dict(places)


def repeated(places: dict[str, list[tuple[Path, int]]], allowed: frozenset[str] = frozenset()) -> list[Problem]:
    """A problem for each further class of a name."""
    return [
        Problem(path, line, f"a class {name} stands in {first.relative_to(ROOT)}, too")
        for name, ((first, _), *others) in places.items()
        if name not in allowed
        for path, line in others
    ]
