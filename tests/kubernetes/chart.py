"""The chart of deploy/helm, rendered by helm: what it says is what deploy/kubernetes says, as far
as both say it; and each other way to install it is sound.

Needs helm and kubectl, whose Kustomize renders the other side.
"""

import base64
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import yaml

from tests.lint.kubernetes import NAME, OTHERS, SETTINGS

ROOT = Path(__file__).parent.parent.parent
CHART, KUSTOMIZE = ROOT / "deploy/helm/penstock", ROOT / "deploy/kubernetes"
STAGES_OF_MODELS = re.compile(r"\bpenstock-(tokenizer|compute|sampler|encoder)-penstock-demo\b")
SHARED = re.compile(r"\bpenstock-(gateway|jobs|redis|models|files)\b")
COMPARED = ("Deployment", "PodDisruptionBudget", "Service", "StatefulSet", "PersistentVolumeClaim", "ScaledObject")
# components of Kustomize's, and values that ask for the same
PAIRS = {
    (): "{}",
    (
        "encoder",
        "models",
        "batches",
    ): "{encoder: {enabled: true}, modelsVolume: {enabled: true}, jobs: {enabled: true}}",
    ("cuda",): "{compute: {gpus: 1}}",
    ("keda",): "{keda: {enabled: true}}",
    ("keda", "zero"): "{keda: {enabled: true, toZero: true}}",
}
TWO_MODELS = (
    "[{name: penstock-demo, source: demo}, {name: Qwen2.5-7B, source: /models/Qwen, compute: {replicas: 3, gpus: 2}, "
    "encoder: {enabled: true}}]"
)
EVERYTHING = (
    "{redis: {users: true, tlsSecret: redis-tls}, gateway: {keysSecret: keys, tlsSecret: tls, nodeSelector: {disk: "
    "ssd}, priorityClassName: high}, "
    "keda: {enabled: true, toZero: true}, jobs: {enabled: true}, imagePullSecrets: [one], compute: {tolerations: "
    "[{operator: Exists}]}, "
    "modelsVolume: {enabled: true, existingClaim: mine}, files: {storageClass: nfs}}"
)
OTHER_VALUES = (
    f"{{models: {TWO_MODELS}}}",
    EVERYTHING,
    "{redis: {existingSecret: mine}}",
    "{redis: {url: 'rediss://me:secret@redis.example:6380/2', tlsSecret: ca}}",
    "{redis: {url: 'rediss+cluster://me:secret@one:6379,two:6379/a'}, keda: {enabled: true, authentication: mine}}",
    "{redis: {url: 'redis+sentinel://me:secret@one:26379,two:26379/penstock/0'}, keda: {enabled: true, "
    "authentication: mine}}",
    "{files: {url: 's3://bucket/penstock'}, jobs: {enabled: true}}",
)
REFUSED = {
    "{gatway: {replicas: 1}}": "gatway",
    "{compute: {replicas: -1}}": "replicas",
    "{models: []}": "models",
    "{redis: {url: 'memcached://x'}}": "url",
    "{settings: {penstock_model: x}}": "penstock_model",
    "{models: [{name: a.b, source: demo}, {name: a-b, source: demo}]}": "the same objects",
    "{keda: {enabled: true}, redis: {existingSecret: mine}}": "redis.url",
}

Json = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """The objects that a tool made, and of which values or components."""

    said: str
    objects: list[Json]


def missing_tools() -> list[str]:
    return [name for name in ("helm", "kubectl") if shutil.which(name) is None]


def render(values: str) -> Rendered:
    """The chart's objects with these values, YAML. Raises CalledProcessError."""
    command = ["helm", "template", "penstock", str(CHART), "--namespace", "penstock", "--values", "-"]
    made = subprocess.run(command, input=values, capture_output=True, text=True, check=True).stdout
    return Rendered(values, [each for each in yaml.safe_load_all(made) if each])


def kustomize(folder: Path, components: tuple[str, ...]) -> Rendered:
    """Kustomize's objects with these components."""
    where = os.path.relpath(KUSTOMIZE, folder.resolve())
    said: Json = {
        "namespace": "penstock",
        "resources": [where],
        "components": [f"{where}/{each}" for each in components],
    }
    said |= {
        "images": [
            {"name": name, "newTag": "latest"} for name in ("penstock-cpu", "penstock-compute", "penstock-compute-cuda")
        ]
    }
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump({"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"} | said)
    )
    made = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True).stdout
    return Rendered(" ".join(components) or "no component", [each for each in yaml.safe_load_all(made) if each])


def alike(objects: list[Json]) -> dict[tuple[str, str], Json]:
    """The part that both tools say, by kind and name: without the names of a release, and with each
    container's variables as it gets them.
    """
    named = json.loads(SHARED.sub(r"\1", STAGES_OF_MODELS.sub(r"\1", json.dumps(objects))))
    maps = {
        each["metadata"]["name"]: each.get("data") or each.get("stringData")
        for each in named
        if each["kind"] in ("ConfigMap", "Secret")
    }
    found = {}
    for each in named:
        if each["kind"] not in COMPARED:
            continue
        kept = without_own(each)
        kept["metadata"].pop("labels", None)
        for container in (
            kept["spec"].get("template", {}).get("spec", {}).get("containers", ())
            if each["kind"] == "Deployment"
            else ()
        ):
            container["env"] = variables(container, maps)
            container.pop("envFrom")
        if each["kind"] == "Service":
            kept["spec"].setdefault("type", "ClusterIP")
        found[each["kind"], each["metadata"]["name"]] = kept
    return found


def without_own(value: Any) -> Any:
    """A copy without what each tool adds for itself: labels, annotations, the namespace."""
    if isinstance(value, dict):
        return {
            key: without_own(each)
            for key, each in value.items()
            if key not in ("annotations", "namespace") and not own_label(key)
        }
    return [without_own(each) for each in value] if isinstance(value, list) else value


def own_label(key: str) -> bool:
    return key.startswith(("app.kubernetes.io/", "helm.sh/")) and key != NAME


def variables(container: Json, maps: dict[str, Json]) -> dict[str, str]:
    """The container's variables, as far as they are settings of its stage."""
    found: dict[str, str] = {}
    for source in container["envFrom"]:
        found |= decoded(maps[next(iter(source.values()))["name"]])
    for each in container.get("env", ()):
        reference = each.get("valueFrom", {}).get("secretKeyRef")
        found[each["name"]] = each["value"] if reference is None else decoded(maps[reference["name"]])[reference["key"]]
    known = {f"PENSTOCK_{field.upper()}" for field in SETTINGS[container["name"]].model_fields} | OTHERS
    return {
        name: value
        for name, value in found.items()
        if name in known and (name, value) != ("PENSTOCK_SERVED_MODEL_NAME", "penstock-demo")
    }


def decoded(data: Json) -> dict[str, str]:
    """The data of a ConfigMap, or of a Secret: Kustomize's one is in base64."""
    return {
        key: base64.b64decode(value).decode() if key == "PENSTOCK_REDIS_URL" else value for key, value in data.items()
    }


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Where two objects say different things."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            each
            for key in sorted(ours.keys() | theirs.keys())
            for each in differences(ours.get(key), theirs.get(key), f"{where}.{key}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            each
            for number, pair in enumerate(zip(ours, theirs, strict=True))
            for each in differences(*pair, f"{where}[{number}]")
        ]
    return [] if ours == theirs else [f"{where.lstrip('.')}: the chart says {ours}, Kustomize {theirs}"]


def compare(folder: Path) -> list[str]:
    """Where the chart and Kustomize differ, for each pair of values and components."""
    found = []
    for components, values in PAIRS.items():
        chart, other = alike(render(values).objects), alike(kustomize(folder, components).objects)
        if "keda" in components:  # which decides there
            for each in (*chart.values(), *other.values()):
                if each["kind"] == "Deployment":
                    each["spec"].pop("replicas", None)
        of_chart = {f"{kind} {name}": each for (kind, name), each in chart.items()}
        found += [
            f"{' '.join(components)}: {each}"
            for each in differences(of_chart, {f"{kind} {name}": each for (kind, name), each in other.items()})
        ]
    print(f"the chart and Kustomize, {len(PAIRS)} ways: {len(found)} differences", flush=True)
    return found


def dangling(rendered: Rendered) -> list[str]:
    """References to things that neither the chart nor the values have."""
    there = {(each["kind"], each["metadata"]["name"]) for each in rendered.objects}
    pods = [
        each["spec"]["template"]["metadata"]["labels"]
        for each in rendered.objects
        if each["kind"] in ("Deployment", "StatefulSet")
    ]
    found = []
    for each in rendered.objects:
        spec, name = each.get("spec", {}), f"{each['kind']} {each['metadata']['name']}"
        named = [("Deployment", spec["scaleTargetRef"]["name"])] if "scaleTargetRef" in spec else []
        named += [
            ("TriggerAuthentication", trigger["authenticationRef"]["name"])
            for trigger in spec.get("triggers", ())
            if "authenticationRef" in trigger
        ]
        named += [("Secret", reference["name"]) for reference in spec.get("secretTargetRef", ())]
        pod = spec.get("template", {}).get("spec", {})
        for volume in pod.get("volumes", ()):
            named += [("Secret", volume["secret"]["secretName"])] if "secret" in volume else []
            named += (
                [("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])]
                if "persistentVolumeClaim" in volume
                else []
            )
        found += [
            f"{rendered.said}: {name} names {' '.join(other)}"
            for other in named
            if other not in there and not re.search(rf"\b{other[1]}\b", rendered.said)
        ]
        for container in pod.get("containers", ()):
            mounts = {mount["name"] for mount in container["volumeMounts"]} - {
                claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())
            }
            if mounts != {volume["name"] for volume in pod.get("volumes", ())}:
                found.append(f"{rendered.said}: {name} mounts {sorted(mounts)}")
        selector = spec.get("selector", {})
        labels = selector.get("matchLabels", selector)
        if labels and sum(labels.items() <= each.items() for each in pods) != 1:
            found.append(f"{rendered.said}: {name} selects the pods of none or of several: {labels}")
    return found


def users_work(redis_url: str) -> list[str]:
    """Each stage's URL opens the Redis whose users the chart has written, and another password does not."""
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in render("{redis: {users: true}}").objects}
    found = []
    with redis.Redis.from_url(redis_url) as client:
        for line in by_name["Secret", "penstock-redis-users"]["stringData"]["users.acl"].splitlines():
            _, user, rules = line.split(" ", 2)
            if user != "default":
                client.execute_command("ACL", "SETUSER", user, *re.findall(r"\([^)]*\)|\S+", rules))
    for stage, url in by_name["Secret", "penstock-redis"]["stringData"].items():
        user, password = re.fullmatch(r"redis://(\w+):(\w+)@penstock-redis:6379/0", url).groups()  # type: ignore[union-attr]
        with redis.Redis.from_url(redis_url, username=user, password=password) as client:
            if user != stage or not client.ping():
                found.append(f"{stage}'s URL is for {user}")
    return found


def refusals() -> list[str]:
    """Values that are wrong are refused, and the message names them."""
    found = []
    for values, word in REFUSED.items():
        try:
            render(values)
            found.append(f"{values} is not refused")
        except subprocess.CalledProcessError as error:
            if word not in error.stderr:
                found.append(f"{values}: the message does not name {word}: {error.stderr}")
    return found
