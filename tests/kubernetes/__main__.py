"""`make verify SUITE=kubernetes`: the manifests of deploy/kubernetes and the chart of deploy/helm, by
the schemas of several versions of Kubernetes, by each other, and by what they do: a kubelet in
small starts every stage, probes it, and rolls each Deployment over by the manifests' own numbers,
while clients ask. Then KEDA in small ends all replicas when nobody asks, and starts them when
somebody does. Needs root (host names of pods), helm and kubectl.

Every answer must be the one that it was before, no client may see an error, and nobody may have to be killed.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import httpx
import kubernetes_validate
import redis.asyncio
import yaml

from tests.chaos.cluster import Cluster
from tests.chaos.history import History
from tests.chaos.load import Load
from tests.chaos.specs import MODULES, make_specs
from tests.conftest import running_redis
from tests.kubernetes import chart
from tests.kubernetes.keda import SPEED, Keda
from tests.kubernetes.kubelet import FOLDER, NAMES, Kubelet

VERSIONS = ("1.28", "1.31", "1.34")
MODEL = "penstock-demo"
DRAIN_S = 60.0
BUSY_S = 1.5 * 600 / SPEED


def check_schemas() -> list[str]:
    """Whatever is wrong with an object of Kubernetes' own kinds, in a file or in what helm makes of the chart."""
    found = []
    objects: list[tuple[str, dict[str, Any]]] = [
        (path.name, each)
        for path in sorted(FOLDER.rglob("*.yaml"))
        if path.name != "kustomization.yaml"
        for each in yaml.safe_load_all(path.read_text())
    ]
    objects += [
        (f"chart, {values}", each)
        for values in (*chart.PAIRS.values(), *chart.OTHER_VALUES)
        for each in chart.render(values).objects
    ]
    for name, each in objects:
        for version in VERSIONS if not each["apiVersion"].startswith("keda.sh/") else ():
            try:
                kubernetes_validate.validate(each, version, strict=True)
            except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
                found.append(f"{name}: {each['kind']}, Kubernetes {version}: {error}")
    print(f"{len(objects)} objects, Kubernetes {', '.join(VERSIONS)}: {len(found)} wrong", flush=True)
    return found


async def roll_all(folder: Path, redis_url: str, options: argparse.Namespace) -> list[str]:
    """Roll every Deployment over under load. Returns what was wrong."""
    kubelet, history = Kubelet(redis_url, folder), History(folder / "history.jsonl")
    history.write("run", seed=options.seed, arguments="", most_pause_s=None, most_growth_mib={})
    try:
        await kubelet.start()
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            made = await http.post(
                f"http://127.0.0.1:{kubelet.endpoints[0].port}/v1/prompt_modules", json={"modules": MODULES}
            )
        load = Load(
            cast(Cluster, kubelet),
            make_specs(MODEL, options.seed, made.json()["id"], sees=False),
            history,
            options.seed,
        )
        await load.learn()
        history.write("round", number=1, at="begin", may_lose=False)
        clients = load.begin(options.clients, 1)
        for name in [name for name in NAMES for _ in range(options.times)]:
            before = history.judge.tally.total("answered")
            ended = await kubelet.roll(name)
            seconds = ", ".join(f"{pod.seconds_to_end:.1f}" for pod in ended)
            print(
                f"{name:10} {len(ended)} replaced, which ended in {seconds} s; "
                f"{history.judge.tally.total('answered') - before} answers",
                flush=True,
            )
        load.is_over = True
        async with asyncio.timeout(DRAIN_S):
            await asyncio.gather(*clients)
        history.write("round", number=1, at="over", may_lose=False)
    finally:
        await kubelet.stop()
        history.close()
    pods = [*kubelet.ended, *(pod for pods in kubelet.pods.values() for pod in pods)]
    wrong = [str(each) for each in history.judge.tally.wrong]
    wrong += [f"{pod.name} had to be killed" for pod in pods if pod.was_killed] + [
        f"{pod.name} was restarted" for pod in pods if pod.num_restarts
    ]
    print(f"\n{history.judge.tally.table()}\n", flush=True)
    return wrong


async def scale_all(folder: Path, redis_url: str, options: argparse.Namespace) -> list[str]:
    """Let KEDA's numbers end every replica of the model when nobody asks, and start them again.
    Returns what was wrong.
    """
    objects = chart.alike(chart.kustomize(folder, ("keda", "zero")).objects)
    scaled = {
        name: each["spec"]
        for (kind, name), each in objects.items()
        if kind == "ScaledObject" and each["spec"]["minReplicaCount"] == 0
    }
    settings = objects["Deployment", "gateway"]["spec"]["template"]["spec"]["containers"][0]["env"]
    kubelet = Kubelet(redis_url, folder, {"PENSTOCK_WAIT_FOR_REPLICAS_S": settings["PENSTOCK_WAIT_FOR_REPLICAS_S"]})
    history = History(folder / "history.jsonl")
    history.write("run", seed=options.seed, arguments="", most_pause_s=None, most_growth_mib={})
    wrong, scaling = [], None
    try:
        await kubelet.start()
        specs = [
            each
            for each in make_specs(MODEL, options.seed, "", sees=False)
            if each.name.endswith("/0") and each.kind != "modules"
        ]
        load = Load(cast(Cluster, kubelet), specs, history, options.seed)
        await load.learn()
        keda = Keda(kubelet, redis.asyncio.Redis.from_url(redis_url), scaled)
        scaling = asyncio.create_task(keda.run())
        for number in range(1, options.times + 1):
            await keda.wait_for_none()
            history.write("round", number=number, at="begin", may_lose=False)
            before, begun, num_scaled = history.judge.tally.total("answered"), time.monotonic(), len(keda.scaled)
            clients = load.begin(options.clients, number)
            while history.judge.tally.total("answered") == before and time.monotonic() - begun < DRAIN_S:
                await asyncio.sleep(0.1)
            first_s = time.monotonic() - begun
            await asyncio.sleep(BUSY_S)  # longer than the cooldown
            wrong += [f"while clients asked: {each}" for each in keda.scaled[num_scaled:] if " to 0" in each]
            load.is_over = True
            async with asyncio.timeout(DRAIN_S):
                await asyncio.gather(*clients)
            history.write("round", number=number, at="over", may_lose=False)
            answers = history.judge.tally.total("answered") - before
            print(f"from 0: the first of {answers} answers after {first_s:.1f} s", flush=True)
        await keda.wait_for_none()
    finally:
        if scaling is not None:
            scaling.cancel()
            await asyncio.gather(scaling, return_exceptions=True)
        await kubelet.stop()
        history.close()
    print("\n".join(keda.scaled), flush=True)
    wrong += [str(each) for each in history.judge.tally.wrong] + [
        f"{pod.name} had to be killed" for pod in kubelet.ended if pod.was_killed
    ]
    print(f"\n{history.judge.tally.table()}\n", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kubernetes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument(
        "--times", type=int, default=1, help="that each Deployment is rolled over (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("this needs root: pods have host names of their own", file=sys.stderr)
        return 2
    if missing := chart.missing_tools():
        print(f"this needs {' and '.join(missing)} on the path", file=sys.stderr)
        return 2
    wrong = (
        check_schemas()
        + chart.refusals()
        + [each for values in chart.OTHER_VALUES for each in chart.dangling(chart.render(values))]
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wrong += chart.compare(folder)
        (folder / "chart").mkdir()
        with running_redis(folder / "chart", None) as url:
            wrong += chart.users_work(url)
        (folder / "redis").mkdir()
        with running_redis(folder / "redis", None) as url:
            wrong += asyncio.run(roll_all(folder, url, options))
        (folder / "zero").mkdir()
        with running_redis(folder / "zero", None) as url:
            wrong += asyncio.run(scale_all(folder / "zero", url, options))
    print("\n".join(wrong) or "ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
