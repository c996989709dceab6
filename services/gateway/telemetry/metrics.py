"""The page /metrics: this gateway's own counts and times here, and the pipeline's
state (pipeline_state.py).

Names are vLLM's where the meaning is the same, with our prefix; docs/reference/metrics.md has them all. A
request here is a sequence: a response has one for each prompt and choice. What a gateway counts
itself adds up over gateways; what it tells of other replicas, every gateway tells, by `replica`.
"""

import asyncio
import statistics
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from redis.exceptions import RedisError

from services.gateway.telemetry.pipeline_state import PipelineState
from services.requests.store.batches.figures import BatchFigures
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.telemetry import get_logger
from shared.wire.load import Load
from shared.wire.messages import RequestError
from shared.wire.replica import Replica
from shared.wire.stage import Stage
from shared.wire.streams import BATCH_FIGURES, BATCHES_RUNNING, DEAD_LETTER, inflight_key, prompts, requests

RECENT_TTFTS, RECENT_S = 100, 300.0  # the TTFT that a gateway announces is the median of so many, no older than that
log = get_logger("penstock.gateway")

# From a small model's step on a GPU to a queue before a laptop's CPU
TOKEN_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
)  # of one token


@dataclass(slots=True)
class ModelTokens:
    """Counts of what happens at every token of one model, in plain numbers: prometheus_client's own
    take a lock for each, and cost more than the token's text. The event loop's thread counts, and
    renders."""

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
        self.by_model: dict[str, ModelTokens] = {}

    def of(self, model: str) -> ModelTokens:
        return self.by_model.setdefault(model, ModelTokens())

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "penstock_generation_tokens", "Tokens generated, as they reach the gateway", labels=["model_name"]
        )
        gaps = HistogramMetricFamily(
            "penstock_inter_token_latency_seconds",
            "Between the tokens of a sequence, as they reach the gateway; tokens that compute publishes together have "
            "none between them",
            labels=["model_name"],
        )
        for model, counts in self.by_model.items():
            tokens.add_metric([model], counts.num_tokens)
            within = [sum(counts.num_gaps[: place + 1]) for place in range(len(counts.num_gaps))]
            bounds = [*map(floatToGoString, TOKEN_SECONDS), "+Inf"]
            gaps.add_metric([model], list(zip(bounds, within, strict=True)), counts.gaps_s)
        yield tokens
        yield gaps


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
CHOICES = (1, 2, 5, 10, 20, 50, 100)
FINISH_REASONS = ("stop", "length", "cancelled", "error")
REJECTIONS = ("server_full", "stage_missing", "rate_limit_exceeded")
REDIS_PATIENCE_S = 2.0  # of a scrape: Prometheus waits for 10 s by default


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """A model's own: looked up once, used for every token."""

    success: dict[str, CounterMetric]  # by finish reason
    prompt_tokens: CounterMetric
    prompt_tokens_cached: CounterMetric
    tokens: ModelTokens
    ttft: Histogram
    tpot: Histogram
    e2e: Histogram
    tokenize: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    num_prompt_tokens: Histogram
    num_generation_tokens: Histogram
    num_prefill_tokens: Histogram
    max_tokens: Histogram
    n: Histogram


class Metrics:
    def __init__(self, stages: Mapping[str, Stage], clock: Clock = SYSTEM_CLOCK) -> None:
        """stages: this gateway's, by cell, home first."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.stages = stages
        self.clock = clock
        self.registry = CollectorRegistry()
        self.success = self._counter(
            "request_success",
            "Sequences that ended: stop, length, cancelled (the client disconnected, or cancelled), error",
            "finished_reason",
        )
        self.errors = self._counter(
            "request_errors",
            "Sequences that ended with an error, by its code and HTTP status; 4xx: the request's own fault",
            "code",
            "status",
        )
        self.rejected = self._counter(
            "requests_rejected",
            "Responses that were not admitted: 429 (server_full, rate_limit_exceeded, storage_limit_exceeded) or 503 "
            "(redis_nearly_full, stage_missing)",
            "reason",
        )
        self.background = self._counter(
            "background_responses", "Responses begun here that no gateway reads: the other counts are without them"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of sequences that ended")
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens of ended sequences that the prefix cache had"
        )
        self.tokens = TokenFigures()
        self.registry.register(self.tokens)
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From submission to a sequence's first token", SECONDS
        )
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "(E2E - TTFT) / (tokens - 1) of a sequence", TOKEN_SECONDS
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "From submission to the end of a sequence", SECONDS)
        self.tokenize = self._histogram(
            "request_tokenize_time_seconds",
            "From submission until the prompt is tokens, the tokenizers' queue included",
            SECONDS,
        )
        self.queue = self._histogram(
            "request_queue_time_seconds", "From the prompt's tokens until compute begins the sequence", SECONDS
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "From compute's beginning to the first token", SECONDS
        )
        self.decode = self._histogram("request_decode_time_seconds", "From the first token to the last", SECONDS)
        self.inference = self._histogram(
            "request_inference_time_seconds", "From compute's beginning to the last token", SECONDS
        )
        self.num_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence", TOKENS)
        self.num_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a sequence", TOKENS
        )
        self.num_prefill_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a sequence that were not cached", TOKENS
        )
        self.max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens of a sequence, where the client set it", TOKENS
        )
        self.n = self._histogram("request_params_n", "Sequences of a response for each of its prompts", CHOICES)
        self.http_requests = CounterMetric(
            "penstock_http_requests",
            "HTTP requests, by route and status; 499: the client disconnected before the answer began",
            ["method", "path", "status"],
            registry=self.registry,
        )
        self._of: dict[str, ModelMetrics] = {}
        self.num_output_tokens = 0  # of all models, as the registry has them
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=RECENT_TTFTS)  # when, and s

    def _counter(self, name: str, text: str, *labels: str) -> CounterMetric:
        return CounterMetric(f"penstock_{name}", text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"penstock_{name}", text, ["model_name"], buckets=buckets, registry=self.registry)

    def of(self, model: str) -> ModelMetrics:
        """The figures of a served model, by its own name."""
        if (figures := self._of.get(model)) is None:
            names = [name for name in ModelMetrics.__slots__ if name not in ("success", "tokens")]
            success = {reason: self.success.labels(model, reason) for reason in FINISH_REASONS}
            figures = self._of[model] = ModelMetrics(
                success, tokens=self.tokens.of(model), **{name: getattr(self, name).labels(model) for name in names}
            )
            for reason in REJECTIONS:
                self.rejected.labels(model, reason)
        return figures

    def refused(self, model: str, reason: str) -> None:
        self.rejected.labels(model, reason).inc()

    def failed(self, model: str, error: RequestError) -> None:
        """A sequence ended with this error."""
        self.of(model).success["error"].inc()
        self.errors.labels(
            model, error.code or ("invalid_value" if error.status == 400 else "internal_error"), str(error.status)
        ).inc()

    def token(self, figures: ModelMetrics, count: int = 1) -> None:
        """Count tokens that came."""
        figures.tokens.num_tokens += count
        self.num_output_tokens += count

    def first_token(self, figures: ModelMetrics, seconds: float) -> None:
        """A sequence's first token came so long after its submission."""
        figures.ttft.observe(seconds)
        self._ttfts.append((self.clock.monotonic(), seconds))

    def load(self) -> Load:
        """Figures for the registry, where penstock status reads them. Safe from any thread."""
        since = self.clock.monotonic() - RECENT_S
        recent = [seconds for at, seconds in list(self._ttfts) if at > since]
        return Load(output_tokens=self.num_output_tokens, ttft_s=statistics.median(recent) if recent else None)

    async def render(self, clients: Sequence[Any]) -> bytes:
        """The Prometheus text format, over all cells. clients: of each one's Redis, home first. What
        a Redis would have to say is missing while it is away; the rest is there."""
        replicas = [
            each
            for number, (cell, stage) in enumerate(self.stages.items())
            for each in seen_in(cell, stage, is_home=number == 0)
        ]
        models = sorted({replica.model for replica in replicas if replica.stage == "compute" and replica.model})
        for model in models:
            self.of(model)  # so that its series begin with 0
        answers = await asyncio.gather(*(self._ask(client, models) for client in clients))
        replies = [answer for answer in answers if answer is not None]
        lengths, in_flight = Counter[str](), {model: (0, 0) for model in models if replies}
        for own_lengths, own, _ in replies:
            lengths.update(own_lengths)
            in_flight = {
                model: (count + own[model][0], tokens + own[model][1]) for model, (count, tokens) in in_flight.items()
            }
        batches = answers[0][2] if answers[0] is not None else None
        snapshot = CollectorRegistry()
        snapshot.register(
            PipelineState(tuple(replicas), dict(lengths), in_flight, batches, is_redis_up=len(replies) == len(clients))
        )
        return generate_latest(self.registry) + generate_latest(snapshot)

    async def _ask(
        self, client: Any, models: list[str]
    ) -> tuple[dict[str, int], dict[str, tuple[int, int]], BatchFigures] | None:
        """The figures of a cell; None while its Redis is away."""
        try:
            async with asyncio.timeout(REDIS_PATIENCE_S):
                return await self._read_figures(client, models)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("redis does not say how long the queues are", error=error)
            return None

    async def _read_figures(
        self, client: Any, models: list[str]
    ) -> tuple[dict[str, int], dict[str, tuple[int, int]], BatchFigures]:
        keys = [*(stream(model).key for model in models for stream in (requests, prompts)), DEAD_LETTER]
        async with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.xlen(key)
            for model in models:
                pipe.hlen(inflight_key(model))
                pipe.hget(inflight_key(model), "")
            pipe.scard(BATCHES_RUNNING)
            pipe.hgetall(BATCH_FIGURES)
            *replies, num_batches, figures = await pipe.execute()
        held = iter(replies[len(keys) :])
        in_flight = {
            model: (max(num - 1, 0), int(tokens or 0)) for model, num, tokens in zip(models, held, held, strict=True)
        }
        return dict(zip(keys, replies, strict=False)), in_flight, BatchFigures.read(num_batches, figures)


def seen_in(cell: str, stage: Stage, *, is_home: bool) -> list[Replica]:
    """The replicas of a cell, as /metrics tells them apart. Gateways are in every cell, and count once."""
    if is_home:
        return list(stage.registry.replicas)
    return [
        replace(replica, replica_id=f"{cell}/{replica.replica_id}")
        for replica in stage.registry.replicas
        if replica.stage != "gateway"
    ]
