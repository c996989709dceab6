"""The figures that a replica announces about its work, and the snapshot that the loop leaves for the
heartbeat's thread to send, with a view of this replica if it is watched."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.compute.cache.block_manager import BlockManager
from services.compute.exchange.active import ActiveRequest
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Sequence
from services.compute.speculation.speculation import Speculation, Tally
from services.compute.telemetry.step_meter import StepMeter
from shared.wire.load import Load
from shared.wire.views import MAX_BLOCKS_SHOWN, MAX_SEQUENCES_SHOWN, ComputeView, SequenceView


@dataclass(frozen=True, slots=True)
class Snapshot:
    entry_ids: tuple[bytes, ...] = ()  # of active requests, which stay this replica's
    view: ComputeView | None = None


def load_figures(
    meter: StepMeter, scheduler: Scheduler, speculation: Speculation, *, num_active: int, **totals: Any
) -> Load:
    """The figures of a replica with num_active active requests. totals: numbers that its loop counts."""
    blocks, peaks, cost = scheduler.block_manager, scheduler.admission.peaks, scheduler.step_cost.cost
    return replace(
        meter.load(),
        running=len(scheduler.running),
        waiting=num_active - len(scheduler.running),
        max_num_seqs=scheduler.max_num_seqs,
        preemptions=scheduler.num_preemptions,
        kv_cache_usage=blocks.num_used_blocks / blocks.num_blocks,
        prefix_cache_queries=scheduler.prefixes.num_queries,
        prefix_cache_hits=scheduler.prefixes.num_hits,
        predicted_peaks=None if peaks is None else peaks.num_predictions,
        predicted_peaks_exceeded=None if peaks is None else peaks.num_exceeded,
        predicted_peak_ratio_sum=None if peaks is None else peaks.sum_of_ratios,
        step_cost_fixed_s=None if cost is None else cost.fixed_s,
        step_cost_per_token_s=None if cost is None else cost.per_token_s,
        step_cost_per_context_token_s=None if cost is None else cost.per_context_token_s,
        **speculation.figures(),
        **totals,
    )


def make_view(
    replica_id: str,
    active: Iterable[ActiveRequest],
    running: Container[int],
    blocks: BlockManager,
    tallies: Mapping[int, Tally],
) -> ComputeView:
    """`running` and `tallies` have handles."""
    everything = list(active)
    shown = sorted(everything, key=lambda request: (request.sequence.handle not in running, request.sequence.rank))[
        :MAX_SEQUENCES_SHOWN
    ]
    views = [
        view_of(request, tallies.get(request.sequence.handle, Tally()), is_running=request.sequence.handle in running)
        for request in shown
    ]
    return ComputeView(
        replica_id,
        blocks.block_size,
        blocks.num_blocks,
        blocks.num_used_blocks,
        len(blocks.evictable),
        len(everything),
        tuple(views),
    )


def view_of(active: ActiveRequest, tally: Tally, *, is_running: bool) -> SequenceView:
    sequence: Sequence = active.sequence
    block_ids = sequence.kv.block_table
    return SequenceView(
        request_id=sequence.request.request_id,
        is_running=is_running,
        sampler_id=active.sampler_id,
        priority=sequence.request.priority,
        num_prompt_tokens=sequence.num_prompt_ids,
        num_cached_tokens=sequence.num_cached_tokens,
        num_computed_tokens=sequence.request.layout.num_tokens_in(sequence.kv.num_computed),
        num_output_tokens=sequence.tokens.num_output,
        num_undecided_tokens=sequence.tokens.num_undecided,
        num_preemptions=sequence.num_preemptions,
        num_blocks=len(block_ids),
        block_runs=runs_of(block_ids[:MAX_BLOCKS_SHOWN]),
        created_at=active.message.created_at,
        tokenized_at=active.message.tokenized_at,
        taken_at=active.taken_at,
        scheduled_at=active.scheduled_at,
        num_accepted_tokens=tally.num_accepted_tokens,
    )


def runs_of(block_ids: list[int]) -> tuple[int, ...]:
    """Runs of consecutive ids, flat: first id, count, first id, count, …"""
    if not block_ids:
        return ()
    ids = np.array(block_ids)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1))
    counts = np.diff(np.append(starts, len(ids)))
    return tuple(np.stack((ids[starts], counts), axis=1).ravel().tolist())
