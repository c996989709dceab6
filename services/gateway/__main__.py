"""`python -m services.gateway`: settings, objects, run."""

import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from redis.exceptions import RedisError

from services.gateway.app import build_app
from services.gateway.cells import Cells
from services.gateway.console.watch import LiveView
from services.gateway.context import GatewayContext
from services.gateway.generation.canceller import Canceller
from services.gateway.generation.generation import Pipeline
from services.gateway.generation.places import MAX_FOLLOWERS, Reading
from services.gateway.generation.subscriptions import Subscriptions
from services.gateway.generation.takeover import Takeover
from services.gateway.http.auth import KeyRing
from services.gateway.http.bodies import BodyReader
from services.gateway.http.handshake import shaken
from services.gateway.http.protocol import is_news, patient
from services.gateway.http.server import (
    DRAIN_S,
    LAST_WORDS_S,
    DrainingServer,
    backlog_of,
    check_tls,
    listen,
    raise_file_limit,
)
from services.gateway.telemetry.metrics import Metrics
from services.requests.dialects.responses.stored import Store
from services.requests.store.admission.admission import Admission
from services.requests.store.admission.known import KnownReplicas
from services.requests.store.admission.redis_memory import RedisMemory
from services.requests.store.batches.jobs import Jobs
from services.requests.store.batches.store import BatchStore
from services.requests.store.cells import HOME, Cell, cells_of
from services.requests.store.client import connect
from services.requests.store.files.storage import Storage
from services.requests.store.files.store import FileStore
from services.requests.store.tenants.api_keys import check_exposure
from services.requests.store.tenants.shared_limits import SharedLimits
from services.requests.workers.grammars.answers import AnswerChecker
from services.requests.workers.grammars.checker import GrammarChecker
from services.requests.workers.images.fetch import ImageFetcher
from services.requests.workers.images.reader import ImageReader
from shared.process.errors import StartupError
from shared.process.settings import GatewaySettings, load_settings
from shared.wire.line import Pipeline as RedisPipeline
from shared.wire.line import refusal_of
from shared.wire.load import Load
from shared.wire.registry import UnlikeReplicas
from shared.wire.stage import Stage, run_stage, start_logging
from shared.wire.transport import is_temporary


def build(settings: GatewaySettings, keys: KeyRing) -> Cells[GatewayContext]:
    """The gateway's objects: what all cells share, and each cell's own. Home's Redis must be there."""
    places, cells = cells_of(settings), Cells[GatewayContext]()
    settings_of = {place.name: settings.model_copy(update={"redis_url": place.redis_url}) for place in places}
    stages = {HOME: Stage("gateway", settings)} | {
        place.name: stage_in(place, settings_of[place.name]) for place in places[1:]
    }
    stages[HOME].transport.wait_until_up(settings.redis_timeout_s)
    metrics = Metrics(stages)
    clients = {place.name: connect(settings_of[place.name]) for place in places}
    home = clients[HOME]
    files = FileStore(home, Storage(settings.files_url))
    shared: dict[str, Any] = {
        "bodies": BodyReader(
            settings.body_timeout_s, settings.max_body_memory, settings.max_body_bytes, "services.gateway.bodies"
        ),
        "metrics": metrics,
        "grammars": GrammarChecker(),
        "keys": keys,
        "files": files,
        "home": home,
        "batches": BatchStore(home),
        "jobs": Jobs(settings.redis_url),
        "images": ImageReader(files, ImageFetcher(settings.image_host), settings.max_held_size),
        "reading": Reading(home),
        "cells": cells,
    }
    answers, others = AnswerChecker(), {place.mark: clients[place.name] for place in places[1:]}
    limits = SharedLimits(home, others) if others else None
    for place in places:
        stage, own, client, is_home = (
            stages[place.name],
            settings_of[place.name],
            clients[place.name],
            place.name == HOME,
        )
        known = KnownReplicas(stage, client) if settings.wait_for_replicas_s else None
        admission = Admission(
            stage, client, own, RedisMemory(client), metrics.refused, known, limits, "" if is_home else place.mark
        )
        subscriptions = Subscriptions(stage, client)
        stage.on_heartbeat = partial(
            announce, stage, metrics.load if is_home else Load, subscriptions, UnlikeReplicas()
        )
        cells.by_mark[place.mark] = GatewayContext(
            settings=own,
            stage=stage,
            client=client,
            admission=admission,
            cell=place.name,
            mark=place.mark if others else "",
            pipeline=Pipeline(client, admission, subscriptions, Canceller(client), Takeover(stage, client), answers),
            store=Store(client, connect(own, max_connections=MAX_FOLLOWERS), settings.ping_interval_s, answers),
            **shared,
        )
    return cells


def stage_in(cell: Cell, settings: GatewaySettings) -> Stage:
    """The gateway in a further cell, whose Redis may be away. Raises StartupError if it refuses."""
    try:
        stage = Stage("gateway", settings)
        stage.transport.client.ping()
    except StartupError as error:
        raise StartupError(f"--cell {cell.name}: {str(error).removeprefix('PENSTOCK_REDIS_URL is ')}") from None
    except (RedisError, OSError) as error:
        if not is_temporary(error):
            raise StartupError(f"--cell {cell.name}: {refusal_of(error)}") from None
    return stage


def announce(
    stage: Stage, load: Callable[[], Load], subscriptions: Subscriptions, unlike: UnlikeReplicas, _: RedisPipeline
) -> None:
    """Set the load that the heartbeat announces for this gateway in one cell."""
    unlike.tell(stage.registry)
    stage.load = replace(load(), running=subscriptions.num_sequences)


def main() -> None:
    settings = load_settings(GatewaySettings)
    start_logging(settings)
    check_exposure(settings)
    tls = check_tls(settings)
    keys = KeyRing(settings)
    sockets = listen(settings.host, settings.port)
    raise_file_limit()
    cells = build(settings, keys)
    home = cells.home
    watch = LiveView(home.stage, home.client, home.pipeline.subscriptions, can_kill=settings.chaos_demo)

    def leave() -> None:
        for context in cells.contexts:
            context.stage.leave()

    def drain() -> None:
        for context in cells.contexts:
            context.pipeline.subscriptions.drain()
            context.store.drain()
        watch.drain()

    logging.getLogger("uvicorn.error").addFilter(is_news)
    protocol = patient(settings)
    config = uvicorn.Config(
        build_app(cells, watch),
        http=shaken(protocol, tls) if tls is not None else protocol,  # type: ignore[arg-type]
        loop="auto"
        if tls is None
        else "asyncio",  # uvloop begins to read before a handshake can, and loses how it begins
        ws="none",
        backlog=backlog_of(settings.max_connections),
        log_level="warning",
        log_config=None,  # our own
        access_log=False,
        lifespan="on",
        timeout_keep_alive=settings.keep_alive_timeout_s,
        timeout_graceful_shutdown=int(DRAIN_S + LAST_WORDS_S) + 2,
    )
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # uvicorn raises them once more when it is done: that is to be no failure
        signal.signal(number, lambda *_: None)
    try:
        DrainingServer(config, leave, drain).run(sockets)
    except SystemExit:  # uvicorn's way to say that it could not start; it has logged why
        raise StartupError("the gateway could not start") from None


if __name__ == "__main__":
    run_stage(main)
