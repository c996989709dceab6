"""deploy/kubernetes: what names something names what is there: files, labels, stages, settings, images, streams."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from shared.process.settings import (
    ComputeSettings,
    EncoderSettings,
    GatewaySettings,
    JobsSettings,
    SamplerSettings,
    TokenizerSettings,
)
from shared.process.stage_settings import StageSettings
from shared.wire.streams import prompts, requests
from tests.lint.compose import COMPOSE
from tests.lint.problem import ROOT, Problem, line_of

FOLDER = ROOT / "deploy/kubernetes"
NAME = "app.kubernetes.io/name"
SETTINGS: dict[str, type[StageSettings]] = {
    "gateway": GatewaySettings,
    "tokenizer": TokenizerSettings,
    "compute": ComputeSettings,
    "sampler": SamplerSettings,
    "jobs": JobsSettings,
    "encoder": EncoderSettings,
}
OTHERS = {"HF_HOME", "TRITON_CACHE_DIR", "OTEL_EXPORTER_OTLP_ENDPOINT"}  # variables of the libraries'


def problems() -> list[Problem]:
    objects = [
        (path, each)
        for path in sorted(FOLDER.rglob("*.yaml"))
        if path.name != "kustomization.yaml"
        for each in yaml.safe_load_all(path.read_text())
    ]
    return [*of_lists(), *of_names(objects), *of_pods(objects), *of_settings(objects), *of_streams(objects)]


def of_lists() -> Iterator[Problem]:
    """Each file is in the kustomization of its folder, and nothing else is."""
    for path in sorted(FOLDER.rglob("kustomization.yaml")):
        there = {each.name for each in path.parent.glob("*.yaml")} - {"kustomization.yaml"}
        if (named := set(yaml.safe_load(path.read_text()).get("resources", []))) != there:
            yield Problem(path, 0, f"resources and files differ in {sorted(named ^ there)}")


def of_names(objects: list[tuple[Path, dict[str, Any]]]) -> Iterator[Problem]:
    """Selectors find pods, and what scales or bounds a Deployment names one."""
    pods = {
        each["spec"]["template"]["metadata"]["labels"][NAME]
        for _, each in objects
        if each["kind"] in ("Deployment", "StatefulSet")
    }
    for path, each in objects:
        name, spec = each["metadata"]["name"], each.get("spec", {})
        selector = spec.get("selector", {})
        named = (
            [selector.get("matchLabels", selector)[NAME]]
            if selector
            else [spec["scaleTargetRef"]["name"]]
            if "scaleTargetRef" in spec
            else []
        )
        if unknown := next((each for each in named if each not in pods), None):
            yield Problem(path, 0, f"{each['kind']} {name} is for {unknown}, which no pod is called")
        if each["kind"] == "Deployment" and ("PodDisruptionBudget", name) not in {
            (other["kind"], other["metadata"]["name"]) for _, other in objects
        }:
            yield Problem(path, 0, f"{name} has no PodDisruptionBudget")


def of_pods(objects: list[tuple[Path, dict[str, Any]]]) -> Iterator[Problem]:
    """Stages run their own modules and ask for their own health, in images that are built; they
    have as long to end as in docker-compose.yml.
    """
    compose = yaml.safe_load(COMPOSE.read_text())
    images = {service["image"] for service in compose["services"].values() if "build" in service} | {"redis:7"}
    grace_s = int(compose["x-stage"]["stop_grace_period"].removesuffix("s"))
    for path, each in objects:
        if each["kind"] != "Deployment":
            continue
        [container], name = each["spec"]["template"]["spec"]["containers"], each["metadata"]["name"]
        if (
            container["command"] != ["python", "-m", f"services.{name}"]
            or not (ROOT / "services" / name / "__main__.py").exists()
        ):
            yield Problem(path, line_of(path, "command:"), f"{name} runs {container['command']}")
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if container[probe]["exec"]["command"] != ["python", "-m", "services.operator.healthcheck", name]:
                yield Problem(path, line_of(path, probe), f"{name}'s {probe} asks for something else")
        if container["image"] not in images:
            yield Problem(path, line_of(path, "image:"), f"nothing builds {container['image']}")
        if each["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] < grace_s:
            yield Problem(path, line_of(path, "terminationGrace"), f"{name} has less than {grace_s} s to end")


def of_settings(objects: list[tuple[Path, dict[str, Any]]]) -> Iterator[Problem]:
    """Variables are settings, of the stage that gets them, or of any stage."""
    known = {
        name: {f"PENSTOCK_{field.upper()}" for field in settings.model_fields} | OTHERS
        for name, settings in SETTINGS.items()
    }
    path = FOLDER / "settings.env"
    for variable in re.findall(r"^(\w+)=", path.read_text(), re.MULTILINE):
        if not any(variable in each for each in known.values()):
            yield Problem(path, line_of(path, variable), f"no stage has the setting {variable}")
    for path, each in objects:
        if each["kind"] == "Deployment":
            [container] = each["spec"]["template"]["spec"]["containers"]
            for variable in (entry["name"] for entry in container.get("env", [])):
                if variable not in known[each["metadata"]["name"]]:
                    yield Problem(
                        path, line_of(path, variable), f"{each['metadata']['name']} has no setting {variable}"
                    )
    path = FOLDER / "cuda/kustomization.yaml"
    for variable in re.findall(r"name: ([A-Z_]+)", path.read_text()):
        if variable not in known["compute"]:
            yield Problem(path, line_of(path, variable), f"compute has no setting {variable}")


def of_streams(objects: list[tuple[Path, dict[str, Any]]]) -> Iterator[Problem]:
    """Triggers name a stage's stream, and its group."""
    streams = {stream.key: stream.group for stream in (requests("penstock-demo"), prompts("penstock-demo"))}
    for path, each in objects:
        for trigger in each.get("spec", {}).get("triggers", []):
            said = trigger["metadata"]
            if trigger["type"] == "redis-streams" and streams.get(said["stream"]) != said["consumerGroup"]:
                yield Problem(
                    path,
                    line_of(path, said["stream"]),
                    f"no stream {said['stream']} with the group {said['consumerGroup']}",
                )
