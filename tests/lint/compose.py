"""docker-compose.yml: what it mounts is there, the image has a place for what Triton compiles, and
ranks of a group find each other.
"""

import os
import re
from typing import Any
from unittest import mock

import yaml

from shared.process.errors import StartupError
from shared.process.group_settings import split_address
from shared.process.settings import ComputeSettings, load_settings
from tests.lint.problem import ROOT, Problem, line_of

COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
OBSERVERS = {"prometheus", "tempo", "grafana"}
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")


def problems() -> list[Problem]:
    whole = yaml.safe_load(COMPOSE.read_text())
    return [
        *of_observability(whole["services"]),
        *of_triton(whole),
        *of_cache(whole["services"]),
        *of_group(whole["services"]),
    ]


def of_observability(services: dict[str, Any]) -> list[Problem]:
    added = {name: service for name, service in services.items() if service.get("profiles") == ["observability"]}
    found = (
        [Problem(COMPOSE, 0, f"the profile observability has {sorted(added)}, not {sorted(OBSERVERS)}")]
        if set(added) != OBSERVERS
        else []
    )
    for service in added.values():
        if not re.fullmatch(r"[\w/]+:v?[\d.]+", service["image"]):
            found.append(
                Problem(COMPOSE, line_of(COMPOSE, service["image"]), f"{service['image']} has no exact version")
            )
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./") and not (ROOT / source).exists():
                found.append(Problem(COMPOSE, line_of(COMPOSE, volume), f"there is no {source} to mount"))
    if services["compute"]["environment"][ENDPOINT] != services["gateway"]["environment"][ENDPOINT]:
        found.append(
            Problem(COMPOSE, line_of(COMPOSE, ENDPOINT), "compute and the gateway send their spans to different places")
        )
    return found


def of_triton(whole: dict[str, Any]) -> list[Problem]:
    """The image's root is read-only, and Docker lets nothing be run from a tmpfs: compiled kernels
    need a volume of their own.
    """
    compute = whole["services"]["compute-cuda"]
    place = compute["environment"]["TRITON_CACHE_DIR"]
    mounted = dict(reversed(each.split(":")[:2]) for each in compute["volumes"] if each.startswith("triton:"))
    line = line_of(COMPOSE, "TRITON_CACHE_DIR")
    found = []
    if not compute["read_only"] or mounted.get(place) not in whole["volumes"] or place in compute["tmpfs"]:
        found.append(Problem(COMPOSE, line, f"{place} is no volume of a container that is read-only"))
    if f"--owner=penstock --group=penstock /files {place} " not in DOCKERFILE.read_text():
        found.append(
            Problem(
                DOCKERFILE, line_of(DOCKERFILE, "--owner=penstock"), f"the image makes no {place} that penstock owns"
            )
        )
    return found


def of_cache(services: dict[str, Any]) -> list[Problem]:
    """A tmpfs of each stage takes what is unpacked from GGUF files."""
    place = re.search(r"^ENV XDG_CACHE_HOME=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    stages = {
        name: service for name, service in services.items() if str(service.get("image", "")).startswith("penstock-")
    }
    lacking = [
        name
        for name, service in stages.items()
        if place is None or not any(place[1].startswith(f"{each}/") for each in service["tmpfs"])
    ]
    return (
        [
            Problem(
                DOCKERFILE,
                line_of(DOCKERFILE, "XDG_CACHE_HOME"),
                f"{', '.join(lacking)}: no place for a GGUF file's tokenizer",
            )
        ]
        if lacking
        else []
    )


def of_group(services: dict[str, Any]) -> list[Problem]:
    """The profile group is one group, as compute reads its environment: each rank once, and all go to
    the container of rank 0, in a network where nobody else is."""
    ranks = {name: service for name, service in services.items() if service.get("profiles") == ["group"]}
    found, settings = [], {}
    for name, service in ranks.items():
        environment = {key: DEFAULT.sub(r"\1", str(value)) for key, value in service["environment"].items()}
        try:
            with mock.patch.dict(os.environ, environment, clear=True):
                settings[name] = load_settings(ComputeSettings, [])
        except StartupError as error:
            found.append(Problem(COMPOSE, line_of(COMPOSE, name), f"{name}: {error}"))
    if sorted(each.rank or 0 for each in settings.values()) != list(
        range(next(iter(settings.values())).num_ranks if settings else 2)
    ):
        found.append(
            Problem(
                COMPOSE, line_of(COMPOSE, "PENSTOCK_RANK"), f"the profile group has not each rank once: {sorted(ranks)}"
            )
        )
    if strangers := {name for name, service in services.items() if "group" in service.get("networks", [])} ^ set(ranks):
        found.append(
            Problem(
                COMPOSE,
                line_of(COMPOSE, "networks"),
                f"the network group is for the ranks of a group: {sorted(strangers)}",
            )
        )
    heads = [ranks[name]["networks"]["group"]["aliases"] for name, each in settings.items() if each.rank == 0]
    for name, each in settings.items():
        if [(place := split_address(each.master)[0])] not in heads:
            found.append(
                Problem(
                    COMPOSE,
                    line_of(COMPOSE, "PENSTOCK_MASTER"),
                    f"{name} looks for rank 0 at {place}, which is not its container",
                )
            )
        if each.model_copy(update={"rank": 0}) != next(iter(settings.values())).model_copy(update={"rank": 0}):
            found.append(Problem(COMPOSE, line_of(COMPOSE, name), f"{name} has other settings than the first rank"))
    return found
