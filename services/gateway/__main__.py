"""`python -m services.gateway`: settings, objects, run."""

import logging
import signal
from dataclasses import replace

import uvicorn

from services.gateway.app import build_app
from services.gateway.console.watch import Watch
from services.gateway.context import Context
from services.gateway.generation.canceller import Canceller
from services.gateway.generation.generation import Pipeline
from services.gateway.generation.places import MAX_FOLLOWERS, Reading
from services.gateway.generation.subscriptions import Subscriptions
from services.gateway.generation.takeover import Takeover
from services.gateway.http.auth import KeyRing
from services.gateway.http.bodies import BodyReader
from services.gateway.http.handshake import shaken
from services.gateway.http.protocol import is_news, patient
from services.gateway.http.server import DRAIN_S, LAST_WORDS_S, DrainingServer, backlog_of, check_tls, listen, raise_file_limit
from services.gateway.telemetry.metrics import Metrics
from services.requests.admission.admission import Admission
from services.requests.admission.known import KnownReplicas
from services.requests.admission.redis_memory import RedisMemory
from services.requests.batches.jobs import Jobs
from services.requests.batches.store import BatchStore
from services.requests.client import connect
from services.requests.files.storage import Storage
from services.requests.files.store import FileStore
from services.requests.grammars.checker import GrammarChecker
from services.requests.images.fetch import ImageFetcher
from services.requests.images.reader import ImageReader
from services.requests.responses.stored import Store
from services.requests.tenants.api_keys import check_exposure
from shared.process.errors import StartupError
from shared.process.settings import GatewaySettings, load_settings
from shared.wire.line import Pipeline as RedisPipeline
from shared.wire.registry import UnlikeReplicas
from shared.wire.stage import Stage, run_stage, start_logging


def build(settings: GatewaySettings, keys: KeyRing) -> Context:
    stage = Stage("gateway", settings)
    stage.transport.wait_until_up(settings.redis_timeout_s)
    client = connect(settings)
    metrics = Metrics(stage)
    known = KnownReplicas(stage, client) if settings.wait_for_replicas_s else None
    admission = Admission(stage, client, settings, RedisMemory(client), metrics.refused, known)
    subscriptions = Subscriptions(stage, client)
    pipeline = Pipeline(client, admission, subscriptions, Canceller(client), Takeover(stage, client))

    unlike = UnlikeReplicas()

    def announce_load(_: RedisPipeline) -> None:
        unlike.tell(stage.registry)
        stage.load = replace(metrics.load(), running=subscriptions.num_sequences)

    stage.on_heartbeat = announce_load
    bodies = BodyReader(settings.body_timeout_s, settings.max_body_memory, settings.max_body_bytes, "services.gateway.bodies")
    store = Store(client, connect(settings, max_connections=MAX_FOLLOWERS), settings.ping_interval_s, pipeline.answers)
    files = FileStore(client, Storage(settings.files_url))
    return Context(
        settings=settings, stage=stage, client=client, bodies=bodies, grammars=GrammarChecker(), admission=admission, pipeline=pipeline, metrics=metrics,
        store=store, keys=keys, files=files, images=ImageReader(files, ImageFetcher(settings.image_host), settings.max_held_size), batches=BatchStore(client),
        jobs=Jobs(settings.redis_url), reading=Reading(client),
    )  # fmt: skip


def main() -> None:
    settings = load_settings(GatewaySettings)
    start_logging(settings)
    check_exposure(settings)
    tls = check_tls(settings)
    keys = KeyRing(settings)
    sockets = listen(settings.host, settings.port)
    raise_file_limit()
    context = build(settings, keys)
    subscriptions = context.pipeline.subscriptions
    watch = Watch(context.stage, context.client, subscriptions, can_kill=settings.chaos_demo)

    def drain() -> None:
        for each in (subscriptions, context.store, watch):
            each.drain()

    logging.getLogger("uvicorn.error").addFilter(is_news)
    protocol = patient(settings)
    config = uvicorn.Config(
        build_app(context, watch),
        http=shaken(protocol, tls) if tls is not None else protocol,  # type: ignore[arg-type]
        loop="auto" if tls is None else "asyncio",  # uvloop begins to read before a handshake can, and loses how it begins
        ws="none",
        backlog=backlog_of(settings.max_connections),
        log_level="warning",
        log_config=None,  # our own
        access_log=False,
        lifespan="on",
        timeout_keep_alive=settings.keep_alive_timeout_s,
        timeout_graceful_shutdown=int(DRAIN_S + LAST_WORDS_S) + 2,
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them once more when it is done: that is to be no failure
        signal.signal(number, lambda *_: None)
    try:
        DrainingServer(config, context.stage.leave, drain).run(sockets)
    except SystemExit:  # uvicorn's way to say that it could not start; it has logged why
        raise StartupError("the gateway could not start") from None


if __name__ == "__main__":
    run_stage(main)
