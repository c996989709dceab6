"""The figures that a replica announces about its work."""

from dataclasses import replace
from typing import Any

from services.compute.scheduling.scheduler import Scheduler
from services.compute.speculation.speculation import Speculation
from services.compute.telemetry.step_meter import StepMeter
from shared.wire.load import Load


def load_figures(meter: StepMeter, scheduler: Scheduler, speculation: Speculation, *, num_active: int, **totals: Any) -> Load:
    """The figures of a replica with so many active requests; totals: numbers that its loop counts."""
    blocks, peaks, cost = scheduler.block_manager, scheduler.admission.calibration, scheduler.step_cost.cost
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
