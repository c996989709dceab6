"""`python -m services.gateway`: settings, objects, run."""

import asyncio
import signal
import socket

import redis.asyncio
import uvicorn
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.gateway.admission import Admission
from services.gateway.app import build_app
from services.gateway.context import Context
from services.gateway.generation import Pipeline
from services.gateway.metrics import Metrics
from services.gateway.subscriptions import Subscriptions
from shared.errors import StartupError
from shared.settings import GatewaySettings, load_settings
from shared.stage import Stage, run_stage, start_logging

DRAIN_S = 5  # after SIGTERM, for running responses; what is cut off can be resumed at another gateway


class DrainingServer(uvicorn.Server):
    """Leaves the registry first, and lets the requests of connections that it cuts off go on: they can be resumed."""

    def __init__(self, config: uvicorn.Config, context: Context) -> None:
        super().__init__(config)
        self.context = context

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.context.pipeline.is_draining = True
        await asyncio.to_thread(self.context.stage.leave)
        await super().shutdown(sockets)


def main() -> None:
    settings = load_settings(GatewaySettings)
    start_logging(settings)
    stage = Stage("gateway", settings)
    stage.transport.wait_until_up(settings.redis_timeout_s)
    client = redis.asyncio.Redis.from_url(settings.redis_url, retry=Retry(NoBackoff(), 0), socket_connect_timeout=5, socket_timeout=30)
    metrics = Metrics(stage)
    context = Context(settings, stage, client, Admission(stage, settings, metrics), Pipeline(stage, client, Subscriptions(stage, client)), metrics)
    config = uvicorn.Config(
        build_app(context), host=settings.host, port=settings.port, log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN_S, lifespan="on"
    )
    server = DrainingServer(config, context)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them once more when it is done: that is to be no failure
        signal.signal(number, lambda *_: None)
    try:
        server.run()
    except SystemExit:  # uvicorn's way to say that it could not start
        raise StartupError(f"could not listen on {settings.host}:{settings.port}: is the port taken?") from None


if __name__ == "__main__":
    run_stage(main)
