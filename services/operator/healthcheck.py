"""`python -m services.operator.healthcheck STAGE`: is this host's replica of the stage alive? For a
container's health check: exit code 0 or 1.

Alive means in the registry: ready for work, and its loop came round lately. A live socket proves neither.
"""

import socket
import sys

import redis

from shared.process.errors import StartupError
from shared.process.settings import load_settings
from shared.process.stage_settings import StageSettings
from shared.wire.registry import look
from shared.wire.transport import connect


def main(stage: str) -> int:
    try:
        replicas = look(connect(load_settings(StageSettings, []).redis_url)).of(stage)
    except (redis.RedisError, StartupError) as error:
        sys.stderr.write(f"redis: {error}\n")
        return 1
    if not any(replica.host == socket.gethostname() for replica in replicas):
        sys.stderr.write(f"no {stage} on this host is in the registry\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
