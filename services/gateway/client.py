"""Redis, for asyncio."""

import redis.asyncio
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from shared.settings import StageSettings

MAX_CONNECTIONS = 64
REDIS_TIMEOUT_S = 10.0  # for an answer: beyond the reader's blocking read, and what a client waits for a 503


def connect(settings: StageSettings, max_connections: int = MAX_CONNECTIONS) -> "redis.asyncio.Redis":
    """A client whose commands wait for one of so many connections. (redis-py's own pool refuses a command when all are taken: by default the 101st at once.)"""
    pool = BlockingConnectionPool.from_url(
        settings.redis_url,
        max_connections=max_connections,
        timeout=REDIS_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        socket_connect_timeout=5,
        socket_timeout=REDIS_TIMEOUT_S,
    )
    return redis.asyncio.Redis.from_pool(pool)
