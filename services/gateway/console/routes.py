"""The live view: the pipeline as a stream of snapshots; and with --chaos-demo, SIGKILL to a replica,
to show that the text goes on. Only a process that the gateway's own parent has started is killed."""

import asyncio
import os
import signal
from typing import Any
from urllib.parse import urlsplit

import orjson
from fastapi import APIRouter, Request, Response

from services.gateway.answering.responder import EventStream
from services.gateway.cells import Cells
from services.gateway.console.watch import LiveView
from services.gateway.context import GatewayContext
from shared.process.errors import Invalid
from shared.process.settings import is_loopback
from shared.process.telemetry import get_logger

router = APIRouter(prefix="/live")

MAX_BODY = 4096


@router.get("")
async def watch(request: Request) -> Response:
    """Server-sent events, a snapshot of the pipeline each: replicas, queues, sequences, KV blocks,
    recent requests. At most two a second."""
    watch = watch_of(request)
    watch.enter()
    return EventStream(watch.events(), watch.leave)


@router.post("/kill")
async def kill(request: Request) -> dict[str, Any]:
    """With --chaos-demo: SIGKILL to a replica that was started together with this gateway, `{"replica_id":
    …}`. 404 without."""
    cells: Cells[GatewayContext] = request.app.state.cells
    context = cells.home
    if not context.settings.chaos_demo:
        raise Invalid("nothing is killed here: start with --chaos-demo", code="chaos_demo_off", status=404)
    check_origin(request)
    replica_id = await read_replica_id(request)
    await kill_replica(context, watch_of(request), replica_id)
    return {"killed": replica_id}


def watch_of(request: Request) -> LiveView:
    watch: LiveView = request.app.state.watch
    return watch


async def read_replica_id(request: Request) -> str:
    """Raises Invalid."""
    body = await request.body()
    try:
        value = orjson.loads(body) if len(body) <= MAX_BODY else None
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("replica_id"), str):
        raise Invalid('the body must be {"replica_id": …}', param="replica_id")
    replica_id: str = value["replica_id"]
    return replica_id


log = get_logger("penstock.gateway")

LAST_WORDS_S = 0.2  # for the answer to go out, where the replica is this gateway itself
TIMEOUT_S = 5.0


def check_origin(request: Request) -> None:
    """Refuse pages of other sites, even one whose name leads here. Raises Invalid (403)."""
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    site = request.headers.get("sec-fetch-site", "same-origin")
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if not is_loopback(host) or site not in ("same-origin", "none") or kind != "application/json":
        raise Invalid(
            "only this gateway's own page on this machine may kill, with a body of type application/json",
            code="forbidden",
            status=403,
        )


async def kill_replica(context: GatewayContext, watch: LiveView, replica_id: str) -> None:
    """Raises Invalid: 404 for one that is not alive, 403 for one that is not of this machine and
    this launcher."""
    stage = context.stage
    here = stage.describe()
    found = next((replica for replica in stage.registry.replicas if replica.replica_id == replica_id), None)
    if found is None:
        raise Invalid(f"no replica {replica_id!r} is alive", param="replica_id", code="replica_not_found", status=404)
    if found.host != here.host or await parent_of(found.pid) != os.getppid():
        raise Invalid(
            f"{replica_id} was not started together with this gateway", param="replica_id", code="forbidden", status=403
        )
    log.warning("killing, as asked", replica_id=replica_id, pid=found.pid)
    watch.killed(replica_id)
    if found.pid == here.pid:
        asyncio.get_running_loop().call_later(LAST_WORDS_S, os.kill, found.pid, signal.SIGKILL)
    else:
        os.kill(found.pid, signal.SIGKILL)


async def parent_of(pid: int) -> int | None:
    """The parent of a process; None: there is no such process."""
    process = await asyncio.create_subprocess_exec(
        "ps",
        "-o",
        "ppid=",
        "-p",
        str(pid),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        return None
    return int(out) if out.strip() else None
