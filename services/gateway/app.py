"""The FastAPI application: routes, lifespan, error mapping, health."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
from redis.exceptions import RedisError

from services.gateway.api.anthropic.routes import router as anthropic
from services.gateway.api.batches.routes import router as batches
from services.gateway.api.files.routes import router as files
from services.gateway.api.llamacpp.routes import router as llamacpp
from services.gateway.api.models import router as models
from services.gateway.api.ollama.embed import router as ollama_embeddings
from services.gateway.api.ollama.routes import router as ollama
from services.gateway.api.openai.embeddings import router as embeddings
from services.gateway.api.openai.routes import router
from services.gateway.api.openai.tokens import router as tokens_router
from services.gateway.api.pooling.routes import router as pooling
from services.gateway.api.prompt_modules import router as prompt_modules
from services.gateway.api.responses.routes import router as responses
from services.gateway.bodies import BODIES
from services.gateway.cells import Cells
from services.gateway.console.pages import add_playground
from services.gateway.console.routes import router as live
from services.gateway.console.watch import LiveView
from services.gateway.context import GatewayContext
from services.gateway.generation.canceller import LAST_TRY_S
from services.gateway.generation.log_reader import LogReader
from services.gateway.generation.subscriptions import exit_on_failure
from services.gateway.generation.unattended import Unattended
from services.gateway.http.auth import Auth
from services.gateway.http.docs import describe_bodies
from services.gateway.http.errors import HANDLERS
from services.gateway.http.middleware import (
    BodyLimit,
    CutOff,
    HeadRequests,
    Ignored,
    Observed,
    OneHost,
    RequestId,
    Slash,
)
from services.gateway.http.origins import Origins, SameOrigin, let_in_by_default
from services.gateway.telemetry.metrics import seen_in
from services.requests.bodies.ignored import HEADER
from services.requests.store.admission.append_only_file import AppendOnlyFile
from services.requests.store.client import persist
from shared.process.stages import PIPELINE
from shared.wire.registry import unlike_replicas
from shared.wire.streams import BATCHES_RUNNING

TOLD_DEATHS = 3  # of workers of batches
STORAGE_TIMEOUT_S = 1.0
LEAST_FREE_BYTES = 64 << 20  # for files


@asynccontextmanager
async def working(cells: Cells[GatewayContext], _: FastAPI) -> AsyncIterator[None]:
    """The gateway's life: its helpers, and in each cell its tasks and its place in the registry, begun and ended."""
    shared = cells.home
    await shared.bodies.helpers.start()
    await shared.grammars.helpers.start()
    async with AsyncExitStack() as stack:
        for context in cells.contexts:
            await stack.enter_async_context(working_in(context, is_home=context is shared))
        yield
    await shared.bodies.helpers.stop()
    await shared.grammars.helpers.stop()
    await shared.images.helpers.stop()
    await shared.pipeline.answer_checker.helpers.stop()


@asynccontextmanager
async def working_in(context: GatewayContext, *, is_home: bool) -> AsyncIterator[None]:
    """The gateway's life in one cell. It serves others while one that is not home is away."""
    pipeline = context.pipeline
    work = {
        "reader": pipeline.subscriptions.run(),
        "log reader": LogReader(pipeline.subscriptions, context.client, context.settings.ping_interval_s).run(),
        "canceller": pipeline.canceller.run(),
        "memory": context.admission.memory.run(),
        "append-only file": AppendOnlyFile(context.client).run(),
    }
    if (known := context.admission.known) is not None:
        if is_home:
            await persist(known.look)  # before the first request
        work |= {
            "known replicas": known.run(),
            "unattended requests": Unattended(known, context.client, context.settings.wait_for_replicas_s).run(),
        }
    tasks = [asyncio.create_task(exit_on_failure(name, each)) for name, each in work.items()]
    await asyncio.to_thread(context.stage.join, is_needed=is_home)
    yield
    await asyncio.to_thread(context.stage.leave)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pipeline.canceller.finish()
    with suppress(RedisError, OSError):
        async with asyncio.timeout(LAST_TRY_S):
            await context.client.delete(pipeline.subscriptions.stream.key)
    await context.client.aclose()
    await context.store.followers.aclose()


def build_app(cells: Cells[GatewayContext], watch: LiveView) -> FastAPI:
    context = cells.home
    # /docs with Swagger UI's files from a package: the machine need not reach the internet, nor its
    # users' browsers a CDN
    app = FastAPIOffline(
        title="Penstock",
        description="Large language models, served as a durable pipeline. OpenAI's API.",
        lifespan=partial(working, cells),
    )
    app.state.cells = cells
    app.state.watch = watch
    app.router.redirect_slashes = False
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(
        BodyLimit, max_bytes=context.settings.max_body_bytes, max_file_bytes=context.settings.max_file_bytes
    )
    app.add_middleware(HeadRequests)
    app.add_middleware(Ignored, is_strict=context.settings.strict_fields)
    app.add_middleware(Auth, keys=context.keys)
    by_default = let_in_by_default(context.settings, has_keys=not context.keys.is_open)
    app.add_middleware(SameOrigin, named=context.settings.allow_origin, by_default=by_default)
    app.add_middleware(OneHost)
    app.add_middleware(Slash)
    app.add_middleware(CutOff)
    app.add_middleware(RequestId)
    app.add_middleware(Observed, metrics=context.metrics, tracer=context.stage.tracer)
    app.add_middleware(
        Origins,
        allow_origins=context.settings.allow_origin,
        allow_origin_regex=by_default,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,  # a page that may use the gateway may do so from the web, too
        expose_headers=["X-Request-Id", "Retry-After", HEADER],
    )
    add_routes(app)
    describe_bodies(app, BODIES)
    return app


def add_routes(app: FastAPI) -> None:
    """Add every endpoint."""
    app.include_router(router)
    app.include_router(models)
    app.include_router(embeddings)
    app.include_router(pooling)
    app.include_router(responses)
    app.include_router(prompt_modules)
    app.include_router(files)
    app.include_router(batches)
    app.include_router(anthropic)
    app.include_router(ollama)
    app.include_router(ollama_embeddings)
    app.include_router(llamacpp)
    app.include_router(live)
    add_playground(app)
    app.include_router(tokens_router)
    app.add_api_route("/health", health)
    app.add_api_route("/v1/health", health)
    app.add_api_route("/ready", ready)
    app.add_api_route("/metrics", metrics)


def own_problems(context: GatewayContext) -> list[str]:
    """The reasons why this gateway can't serve a cell: its reader's, or the heartbeat's, which writes
    and so notices a Redis that takes no writes."""
    problems = list(context.pipeline.subscriptions.problems)
    if context.stage.problem:
        problems.append(f"redis can't serve: {context.stage.problem}")
    return problems


def by_cell(cells: Cells[GatewayContext], problems_of: Callable[[GatewayContext], list[str]]) -> list[str]:
    """The problems of all cells; where there are several, each says in which it is."""
    mark = "{cell}: {problem}" if len(cells.contexts) > 1 else "{problem}"
    return [
        mark.format(cell=context.cell, problem=problem)
        for context in cells.contexts
        for problem in problems_of(context)
    ]


async def warnings(context: GatewayContext, num_batches: int) -> list[str]:
    """Warnings for the operator that keep no interactive request from being served: files, and
    workers of batches."""
    notes, workers = unlike_replicas(context.stage.registry.of("compute")), context.stage.registry.of("jobs")
    if num_batches and not workers:
        notes.append(f"batches wait ({num_batches}), and no worker of batches is alive")
    if (num_deaths := int(max((worker.load.deaths or 0 for worker in workers), default=0))) >= TOLD_DEATHS:
        notes.append(f"workers of batches die again and again: {num_deaths} within ten minutes")
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(STORAGE_TIMEOUT_S):
            free = await asyncio.to_thread(context.files.storage.free_bytes)
        if free is not None and free < LEAST_FREE_BYTES:
            notes.append(f"the files folder is full: {free >> 20} MiB are free")
    return notes


async def health(request: Request) -> JSONResponse:
    """200 if Redis serves, this gateway reads its events, and every live compute replica has come
    round its loop lately: recent steps, not live sockets."""
    cells: Cells[GatewayContext] = request.app.state.cells
    context = cells.home
    subscriptions = context.pipeline.subscriptions
    problems, num_batches = by_cell(cells, own_problems), 0
    try:
        async with asyncio.timeout(2):
            num_batches = await context.client.scard(BATCHES_RUNNING)
    except (RedisError, OSError):
        problems.append("redis does not answer")
    problems += by_cell(cells, cell_problems)
    computes = [
        each
        for cell in cells.contexts
        for each in seen_in(cell.cell, cell.stage, is_home=cell is context)
        if each.stage == "compute"
    ]
    steps = {
        compute.replica_id: {"last_step_s_ago": round(compute.idle_s, 3), "steps": compute.load.steps or 0}
        for compute in computes
    }
    reader = {"last_read_s_ago": round(subscriptions.silent_s, 3), "problem": subscriptions.backoff.problem or None}
    notes = await warnings(context, num_batches)
    body = {
        "status": "ok" if not problems else "failing",
        "problems": problems,
        "warnings": notes,
        "reader": reader,
        "compute": steps,
    }
    return JSONResponse(body, 200 if not problems else 503)


def cell_problems(context: GatewayContext) -> list[str]:
    """The reasons why a cell can't serve, other than this gateway's own."""
    problems, registry = (
        [context.admission.memory.problem] if context.admission.memory.problem else [],
        context.stage.registry,
    )
    computes = registry.of("compute")
    if not context.registry.of("compute"):
        problems.append("no compute replica is alive")
    problems += [
        f"{compute.replica_id} has not finished a step for {compute.idle_s:.0f} s"
        for compute in computes
        if compute.idle_s > context.settings.stuck_after_s
    ]
    return problems + [
        f"{replica.replica_id}: {replica.problem}"
        for replica in registry.replicas
        if replica.problem and replica.replica_id != context.stage.replica_id
    ]


async def ready(request: Request) -> JSONResponse:
    """200 if some cell has a live replica of every stage, or one that requests may wait for, and this
    gateway reads its events."""
    cells: Cells[GatewayContext] = request.app.state.cells
    replicas = {stage: sum(len(context.stage.registry.of(stage)) for context in cells.contexts) for stage in PIPELINE}
    problems = by_cell(cells, own_problems)
    is_ready = any(
        not own_problems(context) and all(context.registry.of(stage) for stage in PIPELINE)
        for context in cells.contexts
    )
    headers = {} if is_ready else {"Retry-After": "2"}
    body = {
        "status": "ready" if is_ready else "waiting",
        "replicas": replicas,
        "problems": problems,
        "time": int(time.time()),
    }
    return JSONResponse(body, 200 if is_ready else 503, headers)


async def metrics(request: Request) -> Response:
    """Prometheus's text format."""
    cells: Cells[GatewayContext] = request.app.state.cells
    return Response(
        await cells.home.metrics.render([context.client for context in cells.contexts]),
        media_type="text/plain; version=0.0.4",
    )
