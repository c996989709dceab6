"""A stage's image has what its extra installs and no more: is all that its modules import there?"""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata

import grimp
from packaging.requirements import Requirement

from tests.lint.problem import ROOT, Problem

STAGES = ("gateway", "tokenizer", "compute", "sampler", "jobs", "encoder")
ELSEWHERE = {"opentelemetry": "tracing", "triton": "cuda"}  # imported where these extras are installed, too
PYPROJECT = ROOT / "pyproject.toml"


def problems() -> list[Problem]:
    graph = grimp.build_graph("services", "shared", include_external_packages=True, exclude_type_checking_imports=True)
    owners = metadata.packages_distributions()
    return [
        Problem(PYPROJECT, 0, f"the extra {stage} does not install {package}, which {importer} imports")
        for stage in STAGES
        for installed in [installed_by(stage)]
        for package, importer in imported(graph, f"services.{stage}.__main__")
        if package not in ELSEWHERE and not installed & {normal(name) for name in owners.get(package, [])}
    ]


def imported(graph: grimp.ImportGraph, start: str) -> Iterator[tuple[str, str]]:
    """The packages of others that a module imports, itself or by ours, at its beginning or later;
    with one of those who do.
    """
    reached = {start, *graph.find_upstream_modules(start)}
    for package in sorted(reached - set(sys.stdlib_module_names)):
        if package.partition(".")[0] not in ("services", "shared"):
            yield package, min(graph.find_modules_that_directly_import(package) & reached)


def installed_by(extra: str) -> set[str]:
    """All distributions that `pip install penstock[extra]` brings."""
    waiting = [Requirement(f"penstock[{extra}]")]
    found: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        for chosen in {"", *requirement.extras} - {known for name, known in found if name == normal(requirement.name)}:
            found.add((normal(requirement.name), chosen))
            waiting += requirements_of(normal(requirement.name), chosen)
    return {name for name, _ in found}


def requirements_of(name: str, extra: str) -> list[Requirement]:
    if name == "penstock":  # as it is here, not as it was when it was installed
        project = tomllib.loads(PYPROJECT.read_text())["project"]
        return [
            Requirement(each)
            for each in (project["optional-dependencies"][extra] if extra else project["dependencies"])
        ]
    try:
        wanted = map(Requirement, metadata.requires(name) or [])
    except metadata.PackageNotFoundError:  # for another system
        return []
    return [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": extra})]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
