"""A kubelet and a Deployment's controller in small: pods are processes, started, probed, replaced
and ended by the numbers of the manifests.

A pod has a host name of its own, as a container has, for its probes look for themselves in the
registry by that name; so this needs root (unshare). Other than on a cluster, all pods share one
network: a gateway's port is chosen, and which gateways a Service would name is `endpoints`.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.chaos.cluster import Slot
from tests.deployment import free_port

FOLDER = Path(__file__).parent.parent.parent / "deploy/kubernetes"
NAMES = ("sampler", "tokenizer", "compute", "gateway", "jobs")
PROPAGATION_S = 0.5  # from the decision to end a pod until clients are told


def read_deployments() -> dict[str, dict[str, Any]]:
    """The spec of each stage's Deployment."""
    files = [*FOLDER.glob("*.yaml"), *FOLDER.glob("batches/*.yaml")]
    objects = [
        each for path in files for each in yaml.safe_load_all(path.read_text()) if each.get("kind") == "Deployment"
    ]
    return {each["metadata"]["name"]: each["spec"] for each in objects}


def read_settings() -> dict[str, str]:
    lines = (FOLDER / "settings.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@dataclass
class Pod:
    """A process of a Deployment's template, as a kubelet runs it."""

    name: str
    spec: dict[str, Any]  # of the pod
    environment: dict[str, str]
    folder: Path
    slot: Slot
    num_restarts: int = 0
    is_ready: bool = False
    is_ending: bool = False
    seconds_to_end: float = 0.0
    was_killed: bool = False
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def container(self) -> dict[str, Any]:
        container: dict[str, Any] = self.spec["containers"][0]
        return container

    async def run(self) -> None:
        """Start it, and again whenever it ends or its probes say so, until it is to end."""
        while not self.is_ending:
            self.process = self._start(self.container["command"])
            await self._watch(self.process)
            self.is_ready = False
            if not self.is_ending:
                self.num_restarts += 1
                self.process.kill()
                await asyncio.to_thread(self.process.wait)

    async def end(self) -> None:
        """SIGTERM, and SIGKILL once its time is over."""
        assert self.process is not None
        self.is_ending, started_at = True, time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self.process.wait, self.spec["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            self.was_killed = True
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        self.seconds_to_end = time.monotonic() - started_at

    async def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        """Probe it until it ends, or is to be restarted."""
        if not await self._holds(process, self.container["startupProbe"], wanted=True):
            return
        readiness = asyncio.create_task(self._be_ready(process))
        try:
            await self._holds(process, self.container["livenessProbe"], wanted=False)
        finally:
            readiness.cancel()

    async def _be_ready(self, process: "subprocess.Popen[bytes]") -> None:
        while process.poll() is None:
            self.is_ready = await self._holds(process, self.container["readinessProbe"], wanted=True)
            await self._holds(process, self.container["readinessProbe"], wanted=False)
            self.is_ready = False

    async def _holds(self, process: "subprocess.Popen[bytes]", probe: dict[str, Any], *, wanted: bool) -> bool:
        """Probe until it succeeds, or until it has failed as often as it may. wanted: return with
        the first success; else stay as long as it succeeds.
        """
        num_failed = 0
        while process.poll() is None and num_failed < probe["failureThreshold"]:
            is_well = await self._probe(probe)
            if is_well and wanted:
                return True
            num_failed = 0 if is_well else num_failed + 1
            await asyncio.sleep(probe["periodSeconds"])
        return False

    async def _probe(self, probe: dict[str, Any]) -> bool:
        asked = self._start(probe["exec"]["command"], is_probe=True)
        try:
            return await asyncio.to_thread(asked.wait, probe["timeoutSeconds"]) == 0
        except subprocess.TimeoutExpired:
            asked.kill()
            await asyncio.to_thread(asked.wait)
            return False

    def _start(self, command: list[str], *, is_probe: bool = False) -> "subprocess.Popen[bytes]":
        program = [
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0" && exec "$@"',
            self.name,
            sys.executable,
            *command[1:],
        ]
        with (self.folder / f"{self.name}{'.probes' if is_probe else ''}.log").open("ab") as log:
            return subprocess.Popen(program, env=self.environment, stdout=log, stderr=log, start_new_session=True)


@dataclass
class Kubelet:
    """All pods of the Deployments."""

    redis_url: str
    folder: Path
    more_settings: dict[str, str] = field(default_factory=dict)
    pods: dict[str, list[Pod]] = field(default_factory=lambda: {name: [] for name in NAMES})
    endpoints: list[Slot] = field(default_factory=list)  # gateways that a client may be sent to
    ended: list[Pod] = field(default_factory=list)
    _tasks: "set[asyncio.Task[None]]" = field(default_factory=set)
    _num_pods: int = 0

    def __post_init__(self) -> None:
        self.deployments, self.settings = read_deployments(), read_settings() | self.more_settings

    def of(self, _: str) -> list[Slot]:
        """The gateways: what the load asks its cluster for."""
        return self.endpoints

    async def start(self) -> None:
        for name in NAMES:
            for _ in range(self.deployments[name]["replicas"]):
                self._add(name)
        await asyncio.gather(*(self._wait_ready(pod) for pods in self.pods.values() for pod in pods))

    async def roll(self, name: str) -> list[Pod]:
        """A rolling update: one pod more, and when that is ready one of the old ones less. Returns
        those that have ended.
        """
        assert self.deployments[name]["strategy"] == {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
        ended = []
        for old in list(self.pods[name]):
            await self._wait_ready(self._add(name))
            await self._remove(name, old)
            ended.append(old)
        return ended

    async def scale(self, name: str, num_replicas: int) -> None:
        """Start or end pods, the newest first, until there are so many. Waits for those that end,
        and for none that begins.
        """
        while len(self.pods[name]) < num_replicas:
            self._add(name)
        await asyncio.gather(*(self._remove(name, pod) for pod in self.pods[name][num_replicas:]))

    async def stop(self) -> None:
        for pods in self.pods.values():
            for pod in pods:
                await pod.end()
        for task in self._tasks:
            task.cancel()

    def _add(self, name: str) -> Pod:
        self._num_pods += 1
        pod_name, spec = f"{name}-{self._num_pods}", self.deployments[name]["template"]["spec"]
        port = free_port() if name == "gateway" else 0
        own = {each["name"]: each["value"] for each in spec["containers"][0].get("env", [])}
        environment = {
            **os.environ,
            **self.settings,
            **own,
            "PENSTOCK_REDIS_URL": self.redis_url,
            "PENSTOCK_FILES_URL": str(self.folder / "files"),
            "PENSTOCK_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        } | ({"PENSTOCK_PORT": str(port), "PENSTOCK_HOST": "127.0.0.1"} if port else {})
        pod = Pod(pod_name, spec, environment, self.folder, Slot(name, self._num_pods, pod_name, port))
        self.pods[name].append(pod)
        task = asyncio.create_task(pod.run())
        self._tasks.add(task)
        return pod

    async def _wait_ready(self, pod: Pod) -> None:
        async with asyncio.timeout(180):
            while not pod.is_ready:
                await asyncio.sleep(0.1)
        if pod.slot.port and pod.slot not in self.endpoints:
            self.endpoints.append(pod.slot)

    async def _remove(self, name: str, pod: Pod) -> None:
        self.pods[name].remove(pod)
        ending = asyncio.create_task(pod.end())
        await asyncio.sleep(PROPAGATION_S)
        if pod.slot in self.endpoints:
            self.endpoints.remove(pod.slot)
        await ending
        self.ended.append(pod)
