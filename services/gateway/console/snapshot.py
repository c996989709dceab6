"""The pipeline at a moment, as JSON for those who watch: replicas, queues, and each compute's
sequences and blocks. Pure; watch.py asks Redis."""

import time
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from shared.model.wire_struct import as_dict
from shared.process.stages import SERVING
from shared.wire.replica import Replica
from shared.wire.views import ComputeView

MAX_REPLICAS_SHOWN = 64  # of all stages


@dataclass(frozen=True, slots=True)
class Queue:
    """A group stream."""

    stage: str  # that reads it
    model: str
    num_waiting: int  # entries that no replica has read
    num_taken: int  # entries that a replica works on


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """The figures of the pipeline that Redis gave."""

    queues: Sequence[Queue]
    views: Sequence[ComputeView]
    num_in_flight: int  # sequences that were admitted and have not ended
    num_dead_letters: int


def snapshot(
    replicas: tuple[Replica, ...], figures: PipelineFigures, *, here: str, killed: Set[str], can_kill: bool
) -> dict[str, Any]:
    """here: this gateway's replica id. killed: whose leases still run. can_kill: of the replicas on this machine."""
    order = sorted(
        replicas,
        key=lambda each: (
            SERVING.index(each.stage) if each.stage in SERVING else len(SERVING),
            each.started_at,
            each.replica_id,
        ),
    )
    own_host = next((replica.host for replica in replicas if replica.replica_id == here), "")
    return {
        "time": time.time(),
        "gateway": here,
        "can_kill": can_kill,
        "num_in_flight": figures.num_in_flight,
        "num_dead_letters": figures.num_dead_letters,
        "num_replicas": len(replicas),
        "replicas": [
            replica_shown(each, is_killed=each.replica_id in killed, can_kill=can_kill and each.host == own_host)
            for each in order[:MAX_REPLICAS_SHOWN]
        ],
        "queues": [asdict(queue) for queue in figures.queues],
        "caches": [as_dict(view) for view in figures.views],
    }


def replica_shown(replica: Replica, *, is_killed: bool, can_kill: bool) -> dict[str, Any]:
    load = replica.load
    return {
        "stage": replica.stage,
        "replica_id": replica.replica_id,
        "model": replica.model,
        "host": replica.host,
        "pid": replica.pid,
        "num_ranks": 1 + len(replica.ranks),
        "up_s": round(time.time() - replica.started_at, 1),
        "idle_s": round(replica.idle_s, 2),
        "problem": replica.problem,
        "is_killed": is_killed,
        "can_kill": can_kill and not is_killed,
        "load": {
            name: value
            for name, value in load.figures().items()
            if not name.startswith(("step_", "iteration_", "predicted_"))
        },
        "step_s": load.step_s,
    }
