"""Context: the objects that a gateway's routes work with, built once at the start."""

from dataclasses import dataclass

import redis
import redis.asyncio

from services.gateway.admission import Admission
from services.gateway.bodies import BodyReader
from services.gateway.generation import Pipeline
from services.gateway.grammars import GrammarChecker
from services.gateway.live.watch import Watch
from services.gateway.metrics import Metrics
from services.gateway.record import ResponseRecord
from services.gateway.responses.stored import Store
from shared.settings import GatewaySettings
from shared.stage import Stage
from shared.telemetry import get_logger

log = get_logger("penstock.gateway")


@dataclass(frozen=True, slots=True)
class Context:
    settings: GatewaySettings
    stage: Stage
    client: "redis.asyncio.Redis"
    bodies: BodyReader
    grammars: GrammarChecker
    admission: Admission
    pipeline: Pipeline
    metrics: Metrics
    store: Store
    watch: Watch

    def log_submitted(self, record: ResponseRecord, user: str | None, request_id: str) -> None:
        log.info(
            "request submitted", response_id=record.response_id, kind=record.kind, num_sequences=record.num_prompts * record.n,
            x_request_id=request_id, user=(user or "-")[:128],
        )  # fmt: skip
