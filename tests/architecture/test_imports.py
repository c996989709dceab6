"""The architecture as a test: who may import whom, and which stages start without torch."""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_the_import_contracts_hold() -> None:
    found = subprocess.run([Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("module", ["gateway.app", "tokenizer.service", "sampler.service", "jobs.worker", "operator.launcher", "operator.cli"])
def test_cpu_stages_do_not_import_torch(module: str) -> None:
    code = f"import sys, services.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name for name in names if name.startswith(("shared.", "services."))}


def test_shared_holds_only_what_two_stages_use() -> None:
    """Directly or through another shared module."""
    users: dict[str, set[str]] = defaultdict(set)
    inner = {".".join(path.relative_to(ROOT).with_suffix("").parts): imports_of(path) for path in (ROOT / "shared").rglob("*.py") if path.stem != "__init__"}

    def reach(name: str, user: str) -> None:
        if name in inner and user not in users[name]:
            users[name].add(user)
            for each in inner[name]:
                reach(each, user)

    for path in (ROOT / "services").rglob("*.py"):
        user = path.relative_to(ROOT / "services").parts[0]
        for name in imports_of(path):
            reach(name, user)
    lonely = sorted(name for name in inner if len(users[name]) < 2)
    assert lonely == []


def test_no_file_is_two_ideas() -> None:
    long = [str(path) for folder in ("services", "shared") for path in (ROOT / folder).rglob("*.py") if len(path.read_text().splitlines()) > 400]
    assert long == []


def test_only_streams_makes_keys() -> None:
    """No f-string or literal elsewhere looks like one of our keys."""
    prefixes = (
        "requests:", "prompts:", "candidates:", "decisions:", "events:", "log:", "cancelled:", "reader:", "response:", "replica:", "inflight:", "attempts:",
        "quota:", "running:", "file:", "files:", "batch:", "batches:", "batch-", "upkeep:", "celery:", "view:",
    )  # fmt: skip
    offenders = []
    for path in [*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]:
        if path.name == "streams.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(prefixes):
                offenders.append(f"{path.name}: {node.value}")
    assert offenders == []
