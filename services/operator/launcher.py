"""`penstock up`: every process of the pipeline on this machine, restarted when it dies, stopped together.

Runs `python -m services.<stage>` for each replica: the same command lines as docker-compose.
Settings travel in the environment. What happens when the launcher itself is killed is in
lifeline.py.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import httpx
import redis

from services.operator.lifeline import Lifeline
from services.operator.model_store import DEFAULT_MODEL, pull
from services.operator.preflight import check_device, check_keys, check_memory, check_ports
from services.operator.redis_server import (
    BROKEN_FILE,
    default_memory,
    password_for,
    socket_path,
    start_server,
    url_of,
    why_it_ended,
)
from services.requests.store.tenants.api_keys import check_exposure, wants_keys
from shared.model.files import ModelFiles, open_model
from shared.process.errors import StartupError
from shared.process.host_memory import free_host_memory, size_text
from shared.process.priority import run_behind
from shared.process.settings import UpSettings
from shared.process.stage_settings import DEFAULT_REDIS_URL, environment_of
from shared.process.telemetry import get_logger
from shared.wire.registry import look
from shared.wire.replica import Replica
from shared.wire.stage import LIFELINE, STOP_TIMEOUT_S
from shared.wire.transport import connect

log = get_logger("penstock.launcher")

FIRST_RESTART_S, LONGEST_RESTART_S = 0.2, 10.0
STABLE_AFTER_S = 30.0  # a process that lived this long starts its backoff again
REDIS = "redis"
MAX_REDIS_FAILURES = 3
MAX_KILLS = 3  # of one process, in a row, before everything has been ready: then no person ended it
STARTUP_ERROR = 2  # a stage's exit code for "can't run as configured": trying again will not help
# below Redis and the CPU stages: what wakes up for a millisecond must not wait for a GEMM's time slice
COMPUTE_NICENESS = 5
JOBS_NICENESS = 5  # batches have time


@dataclass(slots=True)
class Child:
    """A process to be kept alive."""

    name: str
    start: Callable[[], "subprocess.Popen[bytes]"]
    process: "subprocess.Popen[bytes] | None" = None
    started_at: float = 0.0
    restart_at: float = 0.0
    delay_s: float = FIRST_RESTART_S
    num_failures: int = 0  # exits with an error of its own, in a row
    num_kills: int = 0  # by a signal, in a row


@dataclass(slots=True)
class Launcher:
    settings: UpSettings
    servers: list[Child] = field(default_factory=list)  # the embedded one and its watchman
    stages: list[Child] = field(default_factory=list)
    # started when the others are ready, so that no request waits for them
    jobs: list[Child] = field(default_factory=list)
    models: list[ModelFiles] = field(default_factory=list)
    is_announced: bool = False  # everything has been ready once, so its settings are good
    is_stopping: bool = False
    exit_code: int = 0
    lifeline: Lifeline = field(init=False)
    redis_url: str = field(init=False)

    def run(self) -> int:
        """Until a signal, or until a stage can't run as configured. Returns the exit code."""
        self._prepare()
        signal.signal(signal.SIGTERM, lambda *_: self._ask_to_stop())
        signal.signal(signal.SIGINT, lambda *_: self._ask_to_stop())
        started_at = time.monotonic()
        try:
            while not self.is_stopping:
                self._keep_alive()
                if not self.is_announced and (replica := self._ready_replica()) is not None:
                    self.is_announced = True
                    self._announce(replica, time.monotonic() - started_at)
                    self.stages += self.jobs
                time.sleep(0.1)
        finally:
            self._stop()
        return self.exit_code

    def _prepare(self) -> None:
        """Check what can be checked before anything starts; then list the processes."""
        settings = self.settings
        check_exposure(settings)
        check_keys(settings)
        check_device(settings)
        self._open(settings.model)
        # before the ports: those of an earlier launcher's gateways are free then
        self.lifeline = Lifeline(settings.data_dir)
        check_ports(settings)
        if not settings.model:
            self._open([default_model()])
        environment = self._environment()
        self.redis_url = settings.redis_url
        if settings.redis_url == DEFAULT_REDIS_URL:
            place, inherited = settings.data_dir, self.lifeline.of_redis
            path = socket_path(place)
            password = password_for(place, settings.redis_port)
            memory = settings.redis_memory or default_memory()
            start_redis = partial(
                start_server, place, port=settings.redis_port, password=password, max_memory=memory, inherited=inherited
            )
            self.servers = [
                Child("watchman", partial(self.lifeline.start_watchman, path, password)),
                Child(REDIS, start_redis),
            ]
            self.redis_url = environment["PENSTOCK_REDIS_URL"] = url_of(settings.data_dir)
        for files in self.models:
            own = environment | {
                "PENSTOCK_MODEL": str(files.weights),
                "PENSTOCK_SERVED_MODEL_NAME": ",".join((files.name, *files.aliases)),
            }
            suffix = f" of {files.name}" if len(self.models) > 1 else ""
            for stage, count in (("sampler", settings.samplers), ("tokenizer", settings.tokenizers), ("compute", 1)):
                self.stages += [self._child(stage, number, own, suffix) for number in range(count)]
        self.stages += [self._child("gateway", number, environment) for number in range(settings.gateways)]
        self.jobs = [self._child("jobs", number, environment) for number in range(settings.jobs)]

    def _open(self, models: list[str]) -> None:
        """Read what is known of them without their weights. Raises StartupError for what can't be
        served: here, once.
        """
        self.models = [
            open_model(model, self.settings.names_of(number), weights=True) for number, model in enumerate(models)
        ]
        names = [name for each in self.models for name in (each.name, *each.aliases)]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise StartupError(f"--served-model-name: {doubled[0]} would name two models")
        check_memory(self.settings, self.models)

    def _environment(self) -> dict[str, str]:
        """Every setting that the stages know, as PENSTOCK_*; and one thread for each stage but compute."""
        own = {"gateways", "tokenizers", "samplers", "jobs", "data_dir", "redis_port", "redis_memory"}
        own |= {"replica_id", "model", "served_model_name", "api_key"}
        files_url = self.settings.files_url or str(self.settings.data_dir.absolute() / "files")
        environment = environment_of(self.settings, own) | {"PENSTOCK_FILES_URL": files_url}
        os.environ.pop("PENSTOCK_API_KEY", None)  # for the gateways only
        return {**os.environ, **environment}

    def _child(self, stage: str, number: int, environment: dict[str, str], suffix: str = "") -> Child:
        own = environment | {LIFELINE: str(self.lifeline.launcher_lives)}
        own.pop("PENSTOCK_REPLICA_ID", None)
        if stage == "gateway":
            own["PENSTOCK_PORT"] = str(self.settings.port + number)
            if self.settings.api_key:
                own["PENSTOCK_API_KEY"] = self.settings.api_key.get_secret_value()
        if stage != "compute":
            own |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

        inherited = self.lifeline.of_stage

        def start() -> "subprocess.Popen[bytes]":
            command = [sys.executable, "-m", f"services.{stage}"]
            niceness = {"compute": COMPUTE_NICENESS, "jobs": JOBS_NICENESS}.get(stage, 0)
            return subprocess.Popen(
                command, env=own, start_new_session=True, pass_fds=inherited, preexec_fn=partial(run_behind, niceness)
            )

        return Child((stage if number == 0 else f"{stage}-{number + 1}") + suffix, start)

    def _keep_alive(self) -> None:
        """Start what is not running, Redis first; a dead process comes back after a growing pause.
        Raises StartupError for a Redis that can't start.
        """
        now = time.monotonic()
        for child in self.servers + self.stages:
            if child.process is not None and (code := child.process.poll()) is not None:
                # it has logged why; later it is Redis, or a file, that will be there again
                if code == STARTUP_ERROR and not self.is_announced:
                    self.exit_code, self.is_stopping = code, True
                    return
                if now - child.started_at > STABLE_AFTER_S:
                    child.delay_s, child.num_failures, child.num_kills = FIRST_RESTART_S, 0, 0
                child.num_failures += code > 0  # whom a signal ended may start well
                child.num_kills = child.num_kills + 1 if code < 0 else 0
                if child.num_kills >= MAX_KILLS and not self.is_announced:
                    raise StartupError(why_killed(child.name, -code))
                if child.name == REDIS and child.num_failures >= MAX_REDIS_FAILURES:
                    self._explain_redis()
                log.warning("process died, restarting", name=child.name, exit_code=code, in_s=child.delay_s)
                child.restart_at, child.process = now + child.delay_s, None
                child.delay_s = min(child.delay_s * 2, LONGEST_RESTART_S)
            if child.process is None and now >= child.restart_at:
                child.process, child.started_at = child.start(), now
                self.lifeline.note(child.name, child.process.pid)

    def _explain_redis(self) -> None:
        """Say why Redis does not start. Raises StartupError at the beginning, and for a broken
        file; later it may be a full disk, which passes.
        """
        why = why_it_ended(self.settings.data_dir)
        if not self.is_announced or BROKEN_FILE.search(why):
            raise StartupError(f"the embedded Redis can't start: {why}")
        log.error("the embedded Redis can't start", reason=why)

    @property
    def _url(self) -> str:
        host = "127.0.0.1" if self.settings.host in ("0.0.0.0", "::") else self.settings.host
        return f"{'http' if self.settings.tls_certificate is None else 'https'}://{host}:{self.settings.port}"

    def _ready_replica(self) -> Replica | None:
        """Compute's replica of the first model, once all models are served."""
        try:
            # a certificate is rarely this address's, and this is our own gateway
            if httpx.get(f"{self._url}/ready", timeout=1.0, trust_env=False, verify=False).status_code != 200:
                return None
            with connect(self.redis_url) as client:
                served = look(client)
        except (httpx.HTTPError, redis.RedisError):
            return None
        replicas = [served.of("compute", files.name) for files in self.models]
        return replicas[0][0] if all(replicas) else None

    def _announce(self, replica: Replica, seconds: float) -> None:
        print(
            f"\nPenstock serves {', '.join(files.name for files in self.models)} at {self._url}/v1 (ready after "
            f"{seconds:.1f} s; Ctrl-C stops it)\n",
            flush=True,
        )
        path, body = example(self.models[0], replica)
        key = ' -H "Authorization: Bearer $PENSTOCK_API_KEY"' if wants_keys(self.settings) else ""
        print(f"  curl {self._url}{path}{key} -H 'Content-Type: application/json' \\\n    -d '{body}'\n", flush=True)

    def _ask_to_stop(self) -> None:
        if not self.is_stopping:
            print("\nstopping …", file=sys.stderr, flush=True)
        self.is_stopping = True

    def _stop(self) -> None:
        """All stages at once, then Redis: whatever they still hand over is written before it goes."""
        terminate(self.stages)
        for child in self.servers:
            terminate([child])


def why_killed(name: str, number: int) -> str:
    """The line for a process that a signal ended again and again while it started."""
    by = signal.Signals(number).name if number in [*signal.Signals] else f"signal {number}"
    what = f"{name} has been ended {MAX_KILLS} times by {by} while it started"
    if number != signal.SIGKILL:
        return what
    free = size_text(free_host_memory())
    return (
        f"{what}, as the system does where memory runs out ({free} are free): a smaller --kv-cache-memory, "
        "--quantization w8a8 or w4, or a smaller model"
    )


def default_model() -> str:
    """A real model, fetched once; where it can't be had, the demo, and a line that says so."""
    try:
        pull(DEFAULT_MODEL)
    except StartupError as error:
        print(f"penstock: {error}. Serving the demo model instead", file=sys.stderr, flush=True)
        return "demo"
    return DEFAULT_MODEL


def example(files: ModelFiles, replica: Replica) -> tuple[str, str]:
    """A path and a body to send to it, that this model answers. replica: compute's."""
    if replica.labels or replica.is_encoder:
        path = "/v1/classify" if replica.labels else "/v1/embeddings"
        return path, f'{{"model": "{files.name}", "input": "A hydroelectric power plant is near."}}'
    if not files.has_chat_template:
        return (
            "/v1/completions",
            f'{{"model": "{files.name}", "prompt": "A hydroelectric power plant is", "max_tokens": 40}}',
        )
    question = "What is Penstock?" if files.name == "penstock-demo" else "What is a hydroelectric power plant?"
    return (
        "/v1/chat/completions",
        f'{{"model": "{files.name}", "messages": [{{"role": "user", "content": "{question}"}}]}}',
    )


def terminate(children: list[Child]) -> None:
    """SIGTERM, and SIGKILL for what is still there after STOP_TIMEOUT_S."""
    processes = [child.process for child in children if child.process is not None and child.process.poll() is None]
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def up(settings: UpSettings) -> int:
    """Run the launcher. Raises StartupError."""
    return Launcher(settings).run()
