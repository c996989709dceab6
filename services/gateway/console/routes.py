"""The live view: the pipeline as a stream of snapshots; and with --chaos-demo, killing a replica of
it."""

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from services.gateway.answering.responder import EventStream
from services.gateway.cells import Cells
from services.gateway.console.kill import check_origin, kill_replica
from services.gateway.console.watch import Watch
from services.gateway.context import Context
from shared.process.errors import Invalid

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
    """With --chaos-demo: SIGKILL to a replica that was started beside this gateway, `{"replica_id":
    …}`. 404 without."""
    cells: Cells[Context] = request.app.state.cells
    context = cells.home
    if not context.settings.chaos_demo:
        raise Invalid("nothing is killed here: start with --chaos-demo", code="chaos_demo_off", status=404)
    check_origin(request)
    replica_id = await read_replica_id(request)
    await kill_replica(context, watch_of(request), replica_id)
    return {"killed": replica_id}


def watch_of(request: Request) -> Watch:
    watch: Watch = request.app.state.watch
    return watch


async def read_replica_id(request: Request) -> str:
    """Raises Invalid."""
    body = await request.body()
    try:
        said = orjson.loads(body) if len(body) <= MAX_BODY else None
    except orjson.JSONDecodeError:
        said = None
    if not isinstance(said, dict) or not isinstance(said.get("replica_id"), str):
        raise Invalid('the body must be {"replica_id": …}', param="replica_id")
    replica_id: str = said["replica_id"]
    return replica_id
