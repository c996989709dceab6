"""Code of every process of the pipeline: settings to objects, logging, signals, the registry,
draining. A library: it calls no stage.

A stage's `__main__` is its composition root:

    settings = load_settings(SamplerSettings)
    stage = Stage("sampler", settings)
    SamplerService(stage, …).run()
"""

import atexit
import gc
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from shared.process.errors import Recoverable, StartupError
from shared.process.stage_settings import StageSettings
from shared.process.telemetry import get_logger, setup_logging
from shared.process.tracing import open_tracer
from shared.wire.entries import RELEASED_MS
from shared.wire.line import DENIED, Pipeline, refusal_of
from shared.wire.load import Load
from shared.wire.registry import LEASE_S, Heartbeat, Registry
from shared.wire.replica import Replica
from shared.wire.transport import Transport

log = get_logger("penstock.stage")

# in the environment of a launcher's stage: the descriptor of a pipe that ends with the launcher
LIFELINE = "PENSTOCK_LIFELINE"
STOP_TIMEOUT_S = 10.0  # for a stage to stop after SIGTERM


class Stage:
    """One replica of one stage: its id, its connections, and whether it is stopping."""

    def __init__(
        self,
        name: str,
        settings: StageSettings,
        *,
        model: str | None = None,
        aliases: tuple[str, ...] = (),
        max_model_len: int | None = None,
        step_timeout_s: float | None = None,
    ) -> None:
        """step_timeout_s: how long a turn of the loop may take, but for waits for Redis, until the
        process ends; None: it does not."""
        self.name = name
        self.settings = settings
        self.model = model
        self.aliases = aliases
        self.max_model_len = max_model_len
        self.replica_id = settings.replica_id or f"{name}-{uuid.uuid4().hex[:12]}"
        self.stopping = threading.Event()
        self.transport = Transport(settings.redis_url, self.stopping)
        self.tracer = open_tracer(name, self.replica_id)
        # what the replica says of itself; its loop writes, the heartbeat reads
        self.load = Load()
        self.parsers: dict[str, str] = {}  # a tokenizer's, set before it joins
        self.sampling: dict[str, int | float] = {}  # the same
        self.fingerprint = ""  # compute's, the same
        self.is_encoder = False  # the same
        self.labels: tuple[str, ...] = ()  # the same
        self.is_multi_label = False  # the same
        self.sizes: dict[str, int] = {}  # the same
        self.kv_fingerprint, self.block_size = "", 0  # the same
        self.takes_images = False  # compute's
        self.ranks: tuple[str, ...] = ()  # the same
        self.weights: dict[str, str] = {}  # the same
        self._started_at = time.time()
        # when the loop came round last; the same, with no trouble with Redis
        self._alive_at = self._served_at = time.monotonic()
        # more for the heartbeat to send, every second
        self.on_heartbeat: Callable[[Pipeline], None] = lambda _: None
        own_line = Transport(settings.redis_url, self.stopping, LEASE_S)
        self._heartbeat = Heartbeat(
            own_line, self.describe, lambda pipe: self.on_heartbeat(pipe), lambda: self._served_at, step_timeout_s
        )

    def mark_alive(self) -> None:
        """The loop came round: the sign of life that /health shows."""
        self._alive_at = time.monotonic()
        if not self.transport.problem:
            self._served_at = self._alive_at

    @property
    def registry(self) -> Registry:
        """The live replicas, as of the last second."""
        return self._heartbeat.registry

    @property
    def sight_since(self) -> float:
        """Monotonic, s: since when this replica sees without a gap who is alive."""
        return self.registry.sight_since(time.monotonic())

    def claim_idle_ms(self, idle_ms: int) -> int:
        """The idle time from which this replica may claim an entry: idle_ms. After a gap in its own
        connection the others get that time to renew their entries; until then it claims only
        released ones."""
        return idle_ms if time.monotonic() - self.sight_since >= idle_ms / 1000 else RELEASED_MS

    def refresh(self) -> None:
        """Have the registry looked at again, soon."""
        self._heartbeat.refresh()

    @property
    def problem(self) -> str:
        """The error that keeps the loop or the heartbeat from Redis at the moment; empty: none."""
        return self.transport.problem or self._heartbeat.transport.problem

    def describe(self) -> Replica:
        return Replica(
            stage=self.name,
            replica_id=self.replica_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=self._started_at,
            model=self.model,
            max_model_len=self.max_model_len,
            # a loop that retries Redis is not stuck
            idle_s=time.monotonic()
            - max(self._alive_at, self.transport.backoff.failed_at, self._heartbeat.awake_since),
            load=self.load,
            aliases=self.aliases,
            problem=self.problem,
            parsers=self.parsers,
            fingerprint=self.fingerprint,
            is_encoder=self.is_encoder,
            sampling=self.sampling,
            labels=self.labels,
            is_multi_label=self.is_multi_label,
            sizes=self.sizes,
            kv_fingerprint=self.kv_fingerprint,
            block_size=self.block_size,
            takes_images=self.takes_images,
            ranks=self.ranks,
            weights=self.weights,
        )

    def catch_signals(self) -> None:
        """SIGTERM and SIGINT ask the loop to leave."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stopping.set())

    def join(self, *, is_needed: bool = True) -> None:
        """Enter the registry: from now on work may arrive. What is loaded by now stays: the garbage
        collector need not look at it again and again. is_needed: else it enters as soon as Redis is
        there."""
        gc.freeze()
        self.mark_alive()
        if is_needed:
            self.transport.wait_until_up(self.settings.redis_timeout_s)
            self.mark_alive()
            self.transport.persist(self._heartbeat.beat)
        else:
            self._heartbeat.refresh()
        self._heartbeat.start()
        log.info("ready", stage=self.name, replica_id=self.replica_id, model=self.model or "-")

    def leave(self) -> None:
        """Leave the registry; safe to call twice."""
        self._heartbeat.leave()


def run_stage(main: Callable[[], None]) -> NoReturn:
    """Run a stage's main, and end the process. A failure exits non-zero, so that a supervisor starts it
    again; a bad setting is one line."""
    if (lifeline := os.environ.pop(LIFELINE, None)) is not None:
        threading.Thread(target=leave_with_launcher, args=(int(lifeline),), name="lifeline", daemon=True).start()
    code = 0
    try:
        main()
    except StartupError as error:
        sys.stderr.write(f"penstock: {error}\n")
        code = error.exit_code
    except DENIED as error:
        sys.stderr.write(f"penstock: {refusal_of(error)}\n")
        code = 1
    except (Recoverable, KeyboardInterrupt):
        log.warning("stopped in the middle of something; its work will be claimed by another")
    except SystemExit as ended:  # with a number
        code = int(ended.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # The interpreter's end, but for its last part, which takes the modules down: OpenSSL dies there with SIGSEGV
    # if a thread uses TLS, and triton's bindings report what they have left.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def leave_with_launcher(lifeline: int) -> None:
    """Once the launcher is gone, end like on its SIGTERM, and after STOP_TIMEOUT_S like on its
    SIGKILL."""
    os.read(lifeline, 1)  # no process writes: this returns when the launcher ends
    log.warning("the launcher is gone, stopping")
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(STOP_TIMEOUT_S)
    os._exit(1)


def start_logging(settings: StageSettings, rank: int = 0) -> None:
    setup_logging(settings.log_level, settings.log_format, rank)
