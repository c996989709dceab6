"""Rules of the architecture that import contracts cannot state: what shared/ holds, where keys are
made, how long a file may be.
"""

import ast
from collections import defaultdict
from pathlib import Path

from tests.lint.problem import ROOT, Problem

MAX_LINES = 600
KEYS = (
    "requests:",
    "prompts:",
    "candidates:",
    "decisions:",
    "events:",
    "log:",
    "cancelled:",
    "reader:",
    "response:",
    "replica:",
    "inflight:",
    "attempts:",
    "quota:",
    "running:",
    "file:",
    "files:",
    "batch:",
    "batches:",
    "batch-",
    "upkeep:",
    "celery:",
    "view:",
)


def problems() -> list[Problem]:
    sources = {
        path: path.read_text() for folder in ("services", "shared") for path in sorted((ROOT / folder).rglob("*.py"))
    }
    trees = {path: ast.parse(text) for path, text in sources.items()}
    return [*used_by_one_stage(trees), *long_files(sources), *keys_made_elsewhere(trees)]


def imports_of(tree: ast.Module) -> set[str]:
    """The names of our own modules that a module imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name for name in names if name.startswith(("shared.", "services."))}


def used_by_one_stage(trees: dict[Path, ast.Module]) -> list[Problem]:
    """Modules of shared/ that fewer than two packages of services/ use, directly or through another shared module."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in trees}
    inner = {
        name: imports_of(trees[path])
        for name, path in paths.items()
        if name.startswith("shared.") and path.stem != "__init__"
    }
    users: dict[str, set[str]] = defaultdict(set)

    def reach(name: str, user: str) -> None:
        if name in inner and user not in users[name]:
            users[name].add(user)
            for each in inner[name]:
                reach(each, user)

    for name, path in paths.items():
        if name.startswith("services."):
            for each in imports_of(trees[path]):
                reach(each, path.relative_to(ROOT).parts[1])
    return [
        Problem(paths[name], 0, f"shared/ holds what two stages use; users: {sorted(users[name])}")
        for name in sorted(inner)
        if len(users[name]) < 2
    ]


def long_files(sources: dict[Path, str]) -> list[Problem]:
    lengths = {path: len(text.splitlines()) for path, text in sources.items()}
    return [
        Problem(path, MAX_LINES, f"{length} lines, at most {MAX_LINES}")
        for path, length in lengths.items()
        if length > MAX_LINES
    ]


def keys_made_elsewhere(trees: dict[Path, ast.Module]) -> list[Problem]:
    """String literals outside streams.py that begin as a key of Redis does."""
    return [
        Problem(path, node.lineno, f"a key of Redis, which only shared/wire/streams.py makes: {node.value!r}")
        for path, tree in trees.items()
        if path.name != "streams.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(KEYS)
    ]
