"""Redis, for asyncio."""

from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from shared.settings import StageSettings

REDIS_TIMEOUT_S = 10.0  # for an answer: beyond the reader's blocking read, and what a client waits for a 503


def connect(settings: StageSettings, **options: Any) -> "redis.asyncio.Redis":
    return redis.asyncio.Redis.from_url(settings.redis_url, retry=Retry(NoBackoff(), 0), socket_connect_timeout=5, socket_timeout=REDIS_TIMEOUT_S, **options)
