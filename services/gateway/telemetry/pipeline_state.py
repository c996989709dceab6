"""The pipeline's state at the moment of a scrape, as Redis and the registry tell it: the same at
every gateway, by replica."""

import itertools
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.requests.store.batches.figures import BatchFigures
from shared.process.stages import STAGES
from shared.wire.load import Load
from shared.wire.replica import Replica

COMPUTE_GAUGES = {
    "running": ("penstock_num_requests_running", "Sequences that have a place in compute's steps"),
    "waiting": ("penstock_num_requests_waiting", "Sequences that wait in compute for a place"),
    "step_cost_fixed_s": (
        "penstock_step_cost_fixed_seconds",
        "What a step costs whatever is in it, as learned from recent steps",
    ),
    "step_cost_per_token_s": ("penstock_step_cost_per_token_seconds", "What each token computed adds"),
    "step_cost_per_context_token_s": (
        "penstock_step_cost_per_context_token_seconds",
        "What each token adds whose KV is read",
    ),
    "kv_cache_usage": ("penstock_kv_cache_usage_perc", "Share of the KV cache that sequences hold, 1 is all"),
}
COMPUTE_COUNTERS = {
    "preemptions": ("penstock_num_preemptions", "Sequences that gave their blocks back, to be computed again"),
    "prefix_cache_queries": ("penstock_prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("penstock_prefix_cache_hits", "Prompt tokens found there"),
    "kv_disk_tokens": ("penstock_kv_disk_tokens", "Tokens whose keys and values were read from the file of --kv-disk"),
    "kv_disk_blocks_written": ("penstock_kv_disk_blocks_written", "Blocks of keys and values written to it"),
    "kv_disk_blocks_dropped": (
        "penstock_kv_disk_blocks_dropped",
        "Blocks that were not, for too many waited to be written",
    ),
    "kv_disk_passed_over": (
        "penstock_kv_disk_passed_over",
        "Sequences that were not looked up in that file, since computing is faster",
    ),
    "images_encoded": ("penstock_images_encoded", "Images that became embeddings"),
    "images_found": ("penstock_images_found", "Images of sequences whose embeddings were there already"),
    "image_encoder_s": ("penstock_image_encoder_seconds", "Time that the part of the model took that sees"),
    "offered": ("penstock_offered_requests", "Requests that were given to a compute replica since it has their prefix"),
    "stolen": (
        "penstock_stolen_requests",
        "Requests that another compute replica took, since they waited longer than the prefix saves",
    ),
    "prompt_tokens": (
        "penstock_computed_prompt_tokens",
        "Tokens computed in chunks: prompts, and what was computed again",
    ),
    "output_tokens": ("penstock_computed_generation_tokens", "Tokens decided"),
    "steps": ("penstock_steps", "Compute's steps"),
    "predicted_peaks": ("penstock_predicted_kv_peaks", "Predicted peaks of KV memory that were followed to their end"),
    "predicted_peaks_exceeded": (
        "penstock_predicted_kv_peaks_exceeded",
        "Those that the real peak went beyond: 1 in 100, at a confidence of 0.99",
    ),
    "surplus_tokens": ("penstock_surplus_tokens", "Tokens computed ahead that were decided otherwise, or after an end"),
    "spec_decode_drafts": ("penstock_spec_decode_num_drafts", "Times that a sequence had drafts in a step"),
    "spec_decode_draft_tokens": ("penstock_spec_decode_num_draft_tokens", "Tokens that were drafted"),
    "spec_decode_accepted_tokens": ("penstock_spec_decode_num_accepted_tokens", "Drafted tokens that were drawn"),
    "claimed": ("penstock_claimed_requests", "Requests taken over from replicas that died or left"),
    "predicted_peak_ratio_sum": ("penstock_predicted_kv_peak_ratio_sum", "Sum of real / predicted over those peaks"),
}
OTHER_COUNTERS = {
    ("tokenizer", "requests"): ("penstock_tokenized_requests", "Requests that tokenizers have handed on or answered"),
    ("sampler", "tokens"): ("penstock_sampled_tokens", "Rows that samplers have decided or answered from a log"),
    ("sampler", "rebuilt"): (
        "penstock_rebuilt_sequences",
        "Sequences that samplers were introduced to, new ones and those taken over",
    ),
}
JOBS_GAUGES = {
    "batches": ("penstock_jobs_batches_running", "Batches that a worker has under way"),
    "sequences": ("penstock_jobs_sequences_running", "Their sequences in the pipeline"),
    "max_sequences": (
        "penstock_jobs_max_sequences",
        "As many as it may have there now: fewer while others have some, 0 while Redis is nearly full",
    ),
}


class PipelineState(Collector):
    """Queue lengths and replicas at the moment of a scrape. While Redis is away, only the replicas
    that were alive last."""

    def __init__(
        self,
        replicas: tuple[Replica, ...],
        lengths: dict[str, int],
        in_flight: dict[str, tuple[int, int]],
        batches: BatchFigures | None,
        *,
        is_redis_up: bool = True,
    ) -> None:
        """lengths: of streams, by key. in_flight: requests and estimated tokens, by model. batches:
        None, if Redis did not say. is_redis_up: whether it answered, in every cell."""
        self.replicas = replicas
        self.lengths = lengths
        self.in_flight = in_flight
        self.batches = batches
        self.is_redis_up = is_redis_up

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "penstock_redis_up", "1: Redis answered this gateway just now, in every cell", value=self.is_redis_up
        )
        queue = GaugeMetricFamily(
            "penstock_stage_queue_depth", "Entries of a stream, waiting or being worked on", labels=["stream"]
        )
        for key, length in self.lengths.items():
            queue.add_metric([key], length)
        yield queue
        num_requests = GaugeMetricFamily(
            "penstock_requests_in_flight",
            "Sequences that were admitted and have not ended, over all gateways",
            labels=["model_name"],
        )
        num_tokens = GaugeMetricFamily(
            "penstock_tokens_in_flight", "Their prompt and output tokens, estimated", labels=["model_name"]
        )
        for model, held in self.in_flight.items():
            num_requests.add_metric([model], held[0])
            num_tokens.add_metric([model], held[1])
        yield num_requests
        yield num_tokens
        yield from self._replicas()
        compute = [
            replica for replica in self.replicas if replica.stage == "compute" and replica.load.steps is not None
        ]
        # which have some of compute's figures
        encoders = [replica for replica in self.replicas if replica.stage == "encoder"]
        for kind, table in ((GaugeMetricFamily, COMPUTE_GAUGES), (CounterMetricFamily, COMPUTE_COUNTERS)):
            for key, (name, text) in table.items():
                yield _by_replica(kind, name, text, [*compute, *encoders], key)
        for (stage, key), (name, text) in OTHER_COUNTERS.items():
            yield _by_replica(
                CounterMetricFamily, name, text, [each for each in self.replicas if each.stage == stage], key
            )
        yield from _steps(compute)
        for key, (name, text) in JOBS_GAUGES.items():
            yield _by_replica(
                GaugeMetricFamily, name, text, [each for each in self.replicas if each.stage == "jobs"], key
            )
        if self.batches is not None:
            yield from self.batches.families()

    def _replicas(self) -> Iterator[Metric]:
        alive = GaugeMetricFamily("penstock_replicas", "Live replicas of a stage", labels=["stage"])
        for stage in STAGES:
            alive.add_metric([stage], sum(replica.stage == stage for replica in self.replicas))
        yield alive
        idle = GaugeMetricFamily(
            "penstock_replica_idle_seconds",
            "Since a replica's loop last came round: large means stuck",
            labels=["stage", "replica"],
        )
        problem = GaugeMetricFamily(
            "penstock_replica_problem",
            "1: something keeps the replica from Redis; /health says what",
            labels=["stage", "replica"],
        )
        for replica in self.replicas:
            idle.add_metric([replica.stage, replica.replica_id], replica.idle_s)
            problem.add_metric([replica.stage, replica.replica_id], bool(replica.problem))
        yield idle
        yield problem


def _by_replica(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, replicas: list[Replica], key: str
) -> Metric:
    family = kind(name, text, labels=["replica", "model_name"])
    for replica in replicas:
        if (value := getattr(replica.load, key)) is not None:
            family.add_metric(_labels(replica), value)
    return family


def _steps(compute: list[Replica]) -> Iterator[Metric]:
    """Compute's figures of its steps by part, by number of tokens, and by place in a draft."""
    parts = CounterMetricFamily(
        "penstock_step_seconds", "Time of compute's steps, by part", labels=["replica", "model_name", "part"]
    )
    tokens = HistogramMetricFamily(
        "penstock_iteration_tokens_total", "Tokens computed in a step", labels=["replica", "model_name"]
    )
    places = CounterMetricFamily(
        "penstock_spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were drawn, by their place in the draft",
        labels=["replica", "model_name", "position"],
    )
    for replica in compute:
        for part, seconds in replica.load.step_s.items():
            parts.add_metric([*_labels(replica), part], seconds)
        for place, count in replica.load.accepted_by_place.items():
            places.add_metric([*_labels(replica), place], count)
        tokens.add_metric(_labels(replica), _cumulated(replica.load), sum_value=replica.load.iteration_tokens or 0)
    yield parts
    yield places
    yield tokens


def _labels(replica: Replica) -> list[str]:
    return [replica.replica_id, replica.model or ""]


def _cumulated(load: Load) -> list[tuple[str, float]]:
    """The buckets of a step's tokens as Prometheus wants them: each counts all below its end."""
    ends = ["+Inf" if end == "inf" else end for end in load.steps_by_tokens]
    return list(zip(ends, itertools.accumulate(load.steps_by_tokens.values()), strict=True))
