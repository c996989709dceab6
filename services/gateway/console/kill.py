"""--chaos-demo: SIGKILL to a replica, for all to see that the text goes on. Only to a process that
the gateway's own parent has started."""

import asyncio
import os
import signal
from urllib.parse import urlsplit

from fastapi import Request

from services.gateway.console.watch import Watch
from services.gateway.context import Context
from shared.process.errors import Invalid
from shared.process.settings import is_loopback
from shared.process.telemetry import get_logger

log = get_logger("penstock.gateway")

LAST_WORDS_S = 0.2  # for the answer to go out, where the replica is this gateway itself
TIMEOUT_S = 5.0


def check_origin(request: Request) -> None:
    """Refuse pages of other sites, even one whose name leads here. Raises Invalid (403)."""
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    site = request.headers.get("sec-fetch-site", "same-origin")
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if not is_loopback(host) or site not in ("same-origin", "none") or kind != "application/json":
        raise Invalid("only this gateway's own page on this machine may kill, with a body of type application/json", code="forbidden", status=403)


async def kill_replica(context: Context, watch: Watch, replica_id: str) -> None:
    """Raises Invalid: 404 for one that is not alive, 403 for one that is not of this machine and
    this launcher."""
    stage = context.stage
    here = stage.describe()
    found = next((each for each in stage.registry.replicas if each.replica_id == replica_id), None)
    if found is None:
        raise Invalid(f"no replica {replica_id!r} is alive", param="replica_id", code="replica_not_found", status=404)
    if found.host != here.host or await parent_of(found.pid) != os.getppid():
        raise Invalid(f"{replica_id} was not started together with this gateway", param="replica_id", code="forbidden", status=403)
    log.warning("killing, as asked", replica_id=replica_id, pid=found.pid)
    watch.killed(replica_id)
    if found.pid == here.pid:
        asyncio.get_running_loop().call_later(LAST_WORDS_S, os.kill, found.pid, signal.SIGKILL)
    else:
        os.kill(found.pid, signal.SIGKILL)


async def parent_of(pid: int) -> int | None:
    """The parent of a process; None: there is no such process."""
    process = await asyncio.create_subprocess_exec(
        "ps", "-o", "ppid=", "-p", str(pid), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        return None
    return int(out) if out.strip() else None
