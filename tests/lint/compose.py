"""docker-compose.yml: what it mounts is there, and the image has a place for what Triton compiles."""

import re
from typing import Any

import yaml

from tests.lint.problem import ROOT, Problem, line_of

COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
OBSERVERS = {"prometheus", "tempo", "grafana"}
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def problems() -> list[Problem]:
    whole = yaml.safe_load(COMPOSE.read_text())
    return [*of_observability(whole["services"]), *of_triton(whole)]


def of_observability(services: dict[str, Any]) -> list[Problem]:
    added = {name: service for name, service in services.items() if service.get("profiles") == ["observability"]}
    found = [Problem(COMPOSE, 0, f"the profile observability has {sorted(added)}, not {sorted(OBSERVERS)}")] if set(added) != OBSERVERS else []
    for service in added.values():
        if not re.fullmatch(r"[\w/]+:v?[\d.]+", service["image"]):
            found.append(Problem(COMPOSE, line_of(COMPOSE, service["image"]), f"{service['image']} has no exact version"))
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./") and not (ROOT / source).exists():
                found.append(Problem(COMPOSE, line_of(COMPOSE, volume), f"there is no {source} to mount"))
    if services["compute"]["environment"][ENDPOINT] != services["gateway"]["environment"][ENDPOINT]:
        found.append(Problem(COMPOSE, line_of(COMPOSE, ENDPOINT), "compute and the gateway send their spans to different places"))
    return found


def of_triton(whole: dict[str, Any]) -> list[Problem]:
    """The image's root is read-only, and Docker lets nothing be run from a tmpfs: compiled kernels need a volume of their own."""
    compute = whole["services"]["compute-cuda"]
    place = compute["environment"]["TRITON_CACHE_DIR"]
    mounted = dict(reversed(each.split(":")[:2]) for each in compute["volumes"] if each.startswith("triton:"))
    line = line_of(COMPOSE, "TRITON_CACHE_DIR")
    found = []
    if not compute["read_only"] or mounted.get(place) not in whole["volumes"] or place in compute["tmpfs"]:
        found.append(Problem(COMPOSE, line, f"{place} is no volume of a container that is read-only"))
    if f"--owner=penstock --group=penstock /files {place} " not in DOCKERFILE.read_text():
        found.append(Problem(DOCKERFILE, line_of(DOCKERFILE, "--owner=penstock"), f"the image makes no {place} that penstock owns"))
    return found
