"""Tables of runs of a fleet."""

from dataclasses import dataclass

import numpy as np

from services.simulator.fleet import Run
from services.simulator.replica import Outcomes
from services.simulator.simulator import percentiles
from shared.model.arrays import Array

NUM_ROWS, WIDTH = 24, 50  # of the plot
COLUMNS = {
    "requests/s": 12,
    "goodput": 9,
    "good": 8,
    "TTFT p50": 10,
    "p90": 8,
    "p99, s": 8,
    "TPOT p50": 10,
    "p90 ": 8,
    "p99, ms": 9,
    "hours": 8,
    "cost": 9,
    "ended": 9,
    "handed over": 13,
}
ENDS = ("loading", "busy", "idle")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that a request has to meet to count: s."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in numbers."""

    qps: float  # requests/s
    goodput: float  # requests/s that meet the limits
    share: float  # of the requests, those that meet them
    ttft: list[float]  # s, at PERCENTILES
    tpot: list[float]  # s
    hours: float  # of replicas


def latencies(outcomes: Outcomes) -> tuple[Array, Array]:
    """The requests' TTFT and TPOT, [n] float64, s: from arrival to the first token, and from there
    for each token to the last."""
    requests, first_at = outcomes.requests, np.array(outcomes.first_at)
    gaps = np.maximum(1, np.array([each.num_output_tokens for each in requests]) - 1)
    return first_at - np.array([each.arrived_at for each in requests]), (np.array(outcomes.last_at) - first_at) / gaps


def figures(run: Run, limits: Limits) -> Figures:
    ttft, tpot = latencies(run.outcomes)
    num_good = int(((ttft <= limits.ttft_s) & (tpot <= limits.tpot_s)).sum())
    return Figures(
        len(ttft) / run.seconds,
        num_good / run.seconds,
        num_good / len(ttft),
        percentiles(ttft),
        percentiles(tpot),
        run.replica_s / 3600,
    )


def table(runs: dict[str, Run], limits: Limits, price: float) -> str:
    """A line for each run. price: of a replica, for an hour."""
    width = max(len(name) for name in runs)
    lines = [f"{'':{width}}" + "".join(f"{head:>{size}}" for head, size in COLUMNS.items())]
    for name, run in runs.items():
        found = figures(run, limits)
        cells = [
            f"{found.qps:.2f}",
            f"{found.goodput:.2f}",
            f"{found.share:.1%}",
            *(f"{value:.2f}" for value in found.ttft),
        ]
        cells += [*(f"{value * 1000:.1f}" for value in found.tpot), f"{found.hours:.1f}", f"{found.hours * price:.2f}"]
        cells += ["/".join(str(run.num_ended[each]) for each in ENDS), str(run.num_handed_over)]
        lines.append(
            f"{name:{width}}" + "".join(f"{cell:>{size}}" for cell, size in zip(cells, COLUMNS.values(), strict=True))
        )
    return "\n".join(
        [*lines, "ended: replicas that loaded / were busy / were idle; handed over: the requests they had"]
    )


def plot(run: Run) -> str:
    """The replicas over time: # is ready, . loads."""
    largest = max((each.num_ready + each.num_loading for each in run.moments), default=0)
    scale = min(1.0, WIDTH / max(1, largest))
    lines = [f"{'time, s':>9}{'ready':>7}{'loading':>9}{'lag':>7}{'pending':>9}  replicas"]
    for each in run.moments[:: max(1, -(-len(run.moments) // NUM_ROWS))]:
        num_marks, num_ready = round((each.num_ready + each.num_loading) * scale), round(each.num_ready * scale)
        bar = "#" * num_ready + "." * (num_marks - num_ready)
        lines.append(f"{each.at:9,.0f}{each.num_ready:7}{each.num_loading:9}{each.lag:7,}{each.pending:9,}  {bar}")
    return "\n".join(lines)
