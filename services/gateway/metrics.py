"""What /metrics shows: this gateway's own counts and times, and the pipeline's state as Redis and the registry tell it.

Names are vLLM's where the meaning is the same, with our prefix. Every gateway shows the whole pipeline, so one scrape is enough; the
figures of one gateway alone carry its replica id.
"""

import itertools
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.openai.formats import Choice
from shared.messages import Replica, TokenEvent
from shared.stage import Stage
from shared.streams import DEAD_LETTER, inflight_key, prompts, requests

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
E2E_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

COMPUTE_GAUGES = {
    "running": ("penstock_num_requests_running", "Sequences that have a place in compute's steps"),
    "waiting": ("penstock_num_requests_waiting", "Sequences that wait in compute for a place"),
    "step_cost_fixed_s": ("penstock_step_cost_fixed_seconds", "What a step costs whatever is in it, as learned from recent steps"),
    "step_cost_per_token_s": ("penstock_step_cost_per_token_seconds", "What each token computed adds"),
    "step_cost_per_context_token_s": ("penstock_step_cost_per_context_token_seconds", "What each token adds whose KV is read"),
    "kv_cache_usage": ("penstock_kv_cache_usage_perc", "Share of the KV cache that sequences hold, 1 is all"),
}
COMPUTE_COUNTERS = {
    "preemptions": ("penstock_num_preemptions", "Sequences that gave their blocks back, to be computed again"),
    "prefix_cache_queries": ("penstock_prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("penstock_prefix_cache_hits", "Prompt tokens found there"),
    "prompt_tokens": ("penstock_computed_prompt_tokens", "Tokens computed in chunks: prompts, and what was computed again"),
    "output_tokens": ("penstock_computed_generation_tokens", "Tokens decided"),
    "steps": ("penstock_steps", "Compute's steps"),
    "predicted_peaks": ("penstock_predicted_kv_peaks", "Predicted peaks of KV memory that were followed to their end"),
    "predicted_peaks_exceeded": ("penstock_predicted_kv_peaks_exceeded", "Those that the real peak went beyond: 1 in 100, at a confidence of 0.99"),
    "predicted_peak_ratio_sum": ("penstock_predicted_kv_peak_ratio_sum", "Sum of real / predicted over those peaks"),
}
STEP_PARTS = ("schedule", "forward", "reduce", "publish", "wait")


class Metrics:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.registry = CollectorRegistry()
        self.requests = Counter("penstock_request_success", "Sequences that ended, by reason", ["finished_reason"], registry=self.registry)
        self.cancelled = Counter("penstock_requests_cancelled", "Sequences whose client went away", registry=self.registry)
        self.background = Counter(
            "penstock_background_responses",
            "Responses begun here that no gateway reads: the other counts are without them",
            registry=self.registry,
        )
        self.rejected = Counter("penstock_requests_rejected", "Requests refused with 429 or 503", registry=self.registry)
        self.prompt_tokens = Counter("penstock_prompt_tokens", "Prompt tokens of ended responses", registry=self.registry)
        self.output_tokens = Counter("penstock_generation_tokens", "Tokens generated", registry=self.registry)
        self.ttft = Histogram(
            "penstock_time_to_first_token_seconds", "From submission to a response's first token", buckets=TTFT_BUCKETS, registry=self.registry
        )
        self.itl = Histogram(
            "penstock_inter_token_latency_seconds", "Between the tokens of a sequence, as they reach the gateway", buckets=ITL_BUCKETS, registry=self.registry
        )
        self.e2e = Histogram("penstock_e2e_request_latency_seconds", "From submission to the end of a response", buckets=E2E_BUCKETS, registry=self.registry)

    async def render(self, client: Any) -> bytes:
        """The Prometheus text format."""
        models = sorted({replica.model for replica in self.stage.registry.of("compute") if replica.model})
        keys = [*(stream(model).key for model in models for stream in (requests, prompts)), DEAD_LETTER]
        async with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.xlen(key)
            for model in models:
                pipe.hlen(inflight_key(model))
                pipe.hget(inflight_key(model), "")
            replies = await pipe.execute()
        lengths = dict(zip(keys, replies, strict=False))
        held = iter(replies[len(keys) :])
        in_flight = {model: (max(num - 1, 0), int(tokens or 0)) for model, num, tokens in zip(models, held, held, strict=True)}
        snapshot = CollectorRegistry()
        snapshot.register(PipelineState(self.stage.registry.replicas, lengths, in_flight))
        return generate_latest(self.registry) + generate_latest(snapshot)


class PipelineState(Collector):
    """Queue lengths and replicas at the moment of a scrape."""

    def __init__(self, replicas: tuple[Replica, ...], lengths: dict[str, int], in_flight: dict[str, tuple[int, int]]) -> None:
        self.replicas = replicas
        self.lengths = lengths
        self.in_flight = in_flight  # requests and estimated tokens, by model

    def collect(self) -> Iterator[Metric]:
        queue = GaugeMetricFamily("penstock_stage_queue_depth", "Entries of a stream, waiting or being worked on", labels=["stream"])
        for key, length in self.lengths.items():
            queue.add_metric([key], length)
        yield queue
        num_requests = GaugeMetricFamily(
            "penstock_requests_in_flight", "Sequences that were admitted and have not ended, over all gateways", labels=["model_name"]
        )
        num_tokens = GaugeMetricFamily("penstock_tokens_in_flight", "Their prompt and output tokens, estimated", labels=["model_name"])
        for model, held in self.in_flight.items():
            num_requests.add_metric([model], held[0])
            num_tokens.add_metric([model], held[1])
        yield num_requests
        yield num_tokens
        alive = GaugeMetricFamily("penstock_replicas", "Live replicas of a stage", labels=["stage"])
        for stage in ("gateway", "tokenizer", "compute", "sampler"):
            alive.add_metric([stage], sum(replica.stage == stage for replica in self.replicas))
        yield alive
        compute = [replica for replica in self.replicas if replica.stage == "compute" and "steps" in replica.load]
        for kind, table in ((GaugeMetricFamily, COMPUTE_GAUGES), (CounterMetricFamily, COMPUTE_COUNTERS)):
            for key, (name, text) in table.items():
                family = kind(name, text, labels=["replica"])
                for replica in compute:
                    if key in replica.load:
                        family.add_metric([replica.replica_id], replica.load[key])
                yield family
        parts = CounterMetricFamily("penstock_step_seconds", "Time of compute's steps, by part", labels=["replica", "part"])
        tokens = HistogramMetricFamily("penstock_iteration_tokens_total", "Tokens computed in a step", labels=["replica"])
        for replica in compute:
            for part in STEP_PARTS:
                parts.add_metric([replica.replica_id, part], replica.load[f"step_{part}_s"])
            tokens.add_metric([replica.replica_id], _cumulated(replica.load), sum_value=replica.load["iteration_tokens"])
        yield parts
        yield tokens


def _cumulated(load: dict[str, float]) -> list[tuple[str, float]]:
    """The buckets of a step's tokens as Prometheus wants them: each counts all below its end."""
    prefix = "iteration_tokens_"
    ends = [key.removeprefix(prefix) for key in load if key.startswith(prefix)]
    return list(zip(["+Inf" if end == "inf" else end for end in ends], itertools.accumulate(load[prefix + end] for end in ends), strict=True))


class Measured:
    """The clock of one response. One that is resumed has no submission to count from."""

    def __init__(self, metrics: Metrics, *, is_resumed: bool = False) -> None:
        self.metrics = metrics
        self.is_resumed = is_resumed
        self.started_at = time.monotonic()
        self.has_begun = False
        self._token_at: dict[int, float] = {}  # by sequence

    def event(self, index: int, event: TokenEvent) -> None:
        """An event of the sequence with this index."""
        if event.token_id is not None:
            self._token(index)
        if event.finish_reason is not None:
            self.metrics.requests.labels(event.finish_reason).inc()

    def _token(self, index: int) -> None:
        now = time.monotonic()
        if index in self._token_at:
            self.metrics.itl.observe(now - self._token_at[index])
        self._token_at[index] = now
        if not self.has_begun and not self.is_resumed:
            self.metrics.ttft.observe(now - self.started_at)
        self.has_begun = True
        self.metrics.output_tokens.inc()

    def whole(self, choices: list[Choice]) -> None:
        """Answers that came all at once, as those of a search do."""
        for choice in choices:
            self.metrics.requests.labels(choice.finish_reason).inc()
            self.metrics.output_tokens.inc(choice.num_output_tokens)
        self.finish(choices, num_cancelled=0)

    def finish(self, choices: list[Choice], *, num_cancelled: int) -> None:
        """The response has ended here; num_cancelled of its sequences because nobody reads them any more."""
        if not self.is_resumed:
            self.metrics.e2e.observe(time.monotonic() - self.started_at)
        self.metrics.cancelled.inc(num_cancelled)
        self.metrics.prompt_tokens.inc(sum(choice.num_prompt_tokens for choice in choices))
