"""A pipeline of real processes for tests: any number of replicas of each stage, which can be terminated and killed."""

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import redis

from shared.wire.registry import Registry, look
from shared.wire.transport import connect
from tests import forge
from tests.redis_users import add_users, as_user
from tests.waiting import wait_until

MODEL = "penstock-demo"


HELD: list[socket.socket] = []  # see free_port


def free_port() -> int:
    """A port for a server that a test starts, which nobody else gets in the meantime: the socket that
    has it stays open and never listens, and SO_REUSEADDR lets the server, which sets it too, bind
    beside it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    HELD.append(holder)
    port: int = holder.getsockname()[1]
    return port


@dataclass
class Deployment:
    """Owns the processes it has started, and the clients it has made. Logs go to files in `folder`,
    printed when a test fails to get what it waits for.
    """

    redis_url: str
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    # by stage: a test's own in place of the stage's. Suites beside pytest give {}
    programs: dict[str, str] = field(default_factory=lambda: {"gateway": forge.GATEWAY, "tokenizer": forge.TOKENIZER})
    processes: dict[str, forge.ForkedProcess] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    clients: "list[openai.OpenAI | redis.Redis]" = field(default_factory=list)
    has_users: bool = (
        True  # each stage is its own at a Redis with a Unix socket, which forgets them when it is started again
    )
    users: set[str] = field(default_factory=set)  # that were made there

    def start(self, stage: str, replica_id: str | None = None, **settings: Any) -> str:
        """Start a replica; returns its id without waiting for it."""
        replica_id = replica_id or f"{stage}-{len(self.processes) + 1}"
        own = {f"PENSTOCK_{name.upper()}": str(value) for name, value in settings.items()}
        if stage == "gateway":
            self.ports[replica_id] = free_port()
            own["PENSTOCK_PORT"] = str(self.ports[replica_id])
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PENSTOCK_NUM_THREADS": "1",  # other deployments of other tests want the cores, too
            "PENSTOCK_REDIS_URL": self.url_of(stage),
            "PENSTOCK_REPLICA_ID": replica_id,
            "PENSTOCK_FILES_URL": str(self.folder / "files"),
            **self.environment,
            **own,
        }
        program = self.programs.get(stage, f"services.{stage}")
        self.processes[replica_id] = forge.start(program, environment, self.folder / f"{replica_id}.log")
        return replica_id

    def url_of(self, stage: str) -> str:
        """Where a stage finds Redis."""
        if not self.has_users or not self.redis_url.startswith("unix://"):
            return self.redis_url
        self.users = self.users or add_users(self.redis_url)
        return as_user(self.redis_url, stage) if stage in self.users else self.redis_url

    def start_all(
        self, *, tokenizers: int = 1, samplers: int = 1, computes: int = 1, gateways: int = 1, **settings: Any
    ) -> "Deployment":
        """Start them all and wait until they are live."""
        counts = {"sampler": samplers, "tokenizer": tokenizers, "compute": computes, "gateway": gateways}
        ids = [self.start(stage, **settings) for stage, count in counts.items() for _ in range(count)]
        self.wait_live(*ids)
        for gateway in self.ports:
            wait_until(
                lambda gateway=gateway: self.get("/ready", gateway).status_code == 200,
                description=f"{gateway} is ready",
            )
        return self

    def wait_live(self, *replica_ids: str) -> None:
        """Until these replicas are in the registry."""
        try:
            with connect(self.redis_url) as client:
                wait_until(
                    lambda: set(replica_ids) <= {each.replica_id for each in look(client).replicas},
                    description=f"{replica_ids} live",
                    timeout_s=180,
                )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def terminate(self, replica_id: str, *, timeout_s: float = 60.0) -> int:
        """SIGTERM; returns the exit code."""
        process = self.processes.pop(replica_id)
        process.terminate()
        return process.wait(timeout_s)

    def kill(self, replica_id: str) -> None:
        """SIGKILL: no chance to hand anything over."""
        process = self.processes.pop(replica_id)
        process.kill()
        process.wait()

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        self.clients.clear()
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 15
        for process in self.processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()

    def registry(self) -> Registry:
        with connect(self.redis_url) as client:
            return look(client)

    def redis(self) -> "redis.Redis":
        """A new client, which is closed with the deployment, as `client` says why."""
        client = connect(self.redis_url)
        self.clients.append(client)
        return client

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("*.log")))

    def url(self, gateway: str | None = None) -> str:
        return f"http://127.0.0.1:{self.ports[gateway or next(iter(self.ports))]}"

    def get(self, path: str, gateway: str | None = None) -> httpx.Response:
        try:
            return httpx.get(self.url(gateway) + path, timeout=60, trust_env=False)
        except (
            httpx.NetworkError,
            httpx.RemoteProtocolError,
        ):  # it is not there yet, or dies in the middle of its answer
            return httpx.Response(599)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return httpx.post(self.url() + path, json=body, headers=headers, timeout=120, trust_env=False)

    def client(self, gateway: str | None = None) -> openai.OpenAI:
        """A new client, which is closed with the deployment: one that only the garbage collector
        closes may warn of its socket, in whatever test runs then.
        """
        client = openai.OpenAI(base_url=self.url(gateway) + "/v1", api_key="none", max_retries=0, timeout=120)
        self.clients.append(client)
        return client

    def async_client(self, gateway: str | None = None) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url(gateway) + "/v1", api_key="none", max_retries=0, timeout=120)
