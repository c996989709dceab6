"""The FastAPI application: routes, lifespan, error mapping, health."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError

from services.gateway.admission import STAGES
from services.gateway.context import Context
from services.gateway.errors import HANDLERS
from services.gateway.middleware import BodyLimit, RequestId
from services.gateway.openai.routes import router


def build_app(context: Context) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reading = asyncio.create_task(context.pipeline.subscriptions.run())
        await asyncio.to_thread(context.stage.join)
        yield
        await asyncio.to_thread(context.stage.leave)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        with suppress(RedisError):
            await context.client.delete(context.pipeline.subscriptions.stream.key)
        await context.client.aclose()

    app = FastAPI(title="Penstock", description="Large language models, served as a durable pipeline. OpenAI's API.", lifespan=lifespan)
    app.state.context = context
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(BodyLimit, max_bytes=context.settings.max_body_bytes)
    app.add_middleware(RequestId)
    app.include_router(router)
    app.add_api_route("/health", health)
    app.add_api_route("/ready", ready)
    app.add_api_route("/metrics", metrics)
    return app


async def health(request: Request) -> JSONResponse:
    """200 if Redis answers and every live compute replica has come round its loop lately: a recent step, not a live socket."""
    context: Context = request.app.state.context
    problems = []
    try:
        await asyncio.wait_for(context.client.ping(), timeout=2)
    except (RedisError, OSError, TimeoutError):
        problems.append("redis does not answer")
    computes = context.stage.registry.of("compute")
    if not computes:
        problems.append("no compute replica is alive")
    problems += [f"{each.replica_id} has not finished a step for {each.idle_s:.0f} s" for each in computes if each.idle_s > context.settings.stuck_after_s]
    steps = {each.replica_id: {"last_step_s_ago": round(each.idle_s, 3), "steps": each.load.get("steps", 0)} for each in computes}
    return JSONResponse({"status": "ok" if not problems else "failing", "problems": problems, "compute": steps}, 200 if not problems else 503)


async def ready(request: Request) -> JSONResponse:
    """200 if every stage has a live replica."""
    context: Context = request.app.state.context
    replicas = {stage: len(context.stage.registry.of(stage)) for stage in STAGES}
    is_ready = all(replicas.values())
    headers = {} if is_ready else {"Retry-After": "2"}
    return JSONResponse({"status": "ready" if is_ready else "waiting", "replicas": replicas, "time": int(time.time())}, 200 if is_ready else 503, headers)


async def metrics(request: Request) -> Response:
    """Prometheus's text format."""
    context: Context = request.app.state.context
    return Response(await context.metrics.render(context.client), media_type="text/plain; version=0.0.4")
