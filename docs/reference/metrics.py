"""The page of metrics: names, kinds, labels and help as /metrics gives them."""

from collections.abc import Iterable
from typing import Any

from prometheus_client import Counter, Histogram

from docs.reference.markdown import HEAD, code, paragraph, sentence, table
from services.gateway.telemetry.metrics import Metrics, TokenFigures
from services.gateway.telemetry.pipeline_state import PipelineState
from services.requests.store.batches.figures import BatchFigures
from shared.process.stage_settings import StageSettings
from shared.wire.replica import Replica
from shared.wire.stage import Stage

INTRODUCTION = """`GET /metrics` of any gateway gives all of these. [Observe](../operate/observe.md) says how to
scrape and read them. A histogram has the
series `_bucket`, `_count` and `_sum`."""

OWN = "Each gateway counts these itself. Sums over gateways are right as they are."
SHARED = """Every gateway reports the same values of all replicas. With several gateways, take `max by (replica,
model_name)` first. Figures of batches are
in Redis, not in a worker; take `max` of them."""


def page() -> str:
    own = Metrics({"home": Stage("gateway", StageSettings(redis_url="unix:///nowhere"))})
    counted = [row(each, family) for source in vars(own).values() for each, family in families(source)]
    told = [
        row(family, family)
        for family in PipelineState((Replica("compute", "c", "here", 1, 0.0),), {}, {}, BatchFigures()).collect()
    ]
    head = ["name", "kind", "labels", "what it is"]
    parts = ["# Metrics\n\n", HEAD, paragraph(INTRODUCTION)]
    for title, text, rows in (
        ("Counted by each gateway", OWN, counted),
        ("Told by every gateway, of all replicas", SHARED, told),
    ):
        parts += [f"\n## {title}\n\n", paragraph(text), "\n", table(head, rows)]
    return "".join(parts)


def families(source: Any) -> list[tuple[Any, Any]]:
    """Its metrics, each behind what has its labels; none, if it is no source of metrics."""
    if isinstance(source, TokenFigures):
        return [(family, family) for family in source.collect()]
    return [(source, next(iter(source.describe())))] if isinstance(source, Counter | Histogram) else []


def row(source: Any, family: Any) -> list[str]:
    """One metric. source: what has its labels."""
    labels: Iterable[str] = source._labelnames
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return [code(name), family.type, ", ".join(code(label) for label in labels), sentence(family.documentation)]
