"""Counts of what happens at every token, in plain numbers: prometheus_client's own take a lock for
each, and cost more than the token's text. The event loop's thread counts, and it renders."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)  # of one token


@dataclass(slots=True)
class TokenCounts:
    """The counts of one model."""

    num_tokens: int = 0
    # between two tokens of a sequence: how many times within each bound, and beyond the last
    num_gaps: list[int] = field(default_factory=lambda: [0] * (len(TOKEN_SECONDS) + 1))
    gaps_s: float = 0.0  # their sum

    def gap(self, seconds: float) -> None:
        """A token came so long after the one before it."""
        self.num_gaps[bisect_left(TOKEN_SECONDS, seconds)] += 1
        self.gaps_s += seconds


class TokenFigures(Collector):
    """The counts of all models, as /metrics shows them."""

    def __init__(self) -> None:
        self.by_model: dict[str, TokenCounts] = {}

    def of(self, model: str) -> TokenCounts:
        return self.by_model.setdefault(model, TokenCounts())

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("penstock_generation_tokens", "Tokens generated, as they reach the gateway", labels=["model_name"])
        gaps = HistogramMetricFamily(
            "penstock_inter_token_latency_seconds",
            "Between the tokens of a sequence, as they reach the gateway; tokens that compute publishes together have none between them",
            labels=["model_name"],
        )
        for model, counts in self.by_model.items():
            tokens.add_metric([model], counts.num_tokens)
            within = [sum(counts.num_gaps[: place + 1]) for place in range(len(counts.num_gaps))]
            bounds = [*map(floatToGoString, TOKEN_SECONDS), "+Inf"]
            gaps.add_metric([model], list(zip(bounds, within, strict=True)), counts.gaps_s)
        yield tokens
        yield gaps
