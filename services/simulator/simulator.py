"""Replay: a trace through a real Scheduler, with a clock that moves by what each step costs."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from services.compute.scheduling.offline import run_step
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import ScheduledBatch
from services.simulator.trace import TraceRequest
from shared.model.sampling_params import SamplingParams

PERCENTILES = (50, 90, 99)
# made-up tokens are below: every model has them; no two prompts begin alike unless they should
VOCABULARY = 1000


@dataclass(slots=True)
class SimulatedRequest:
    """The outcome of one request; times in s on the simulated clock."""

    request: TraceRequest
    first_at: float = 0.0
    last_at: float = 0.0

    @property
    def ttft(self) -> float:
        return self.first_at - self.request.arrived_at

    @property
    def tpot(self) -> float:
        return (self.last_at - self.first_at) / max(1, self.request.num_output_tokens - 1)


@dataclass(slots=True)
class ReplayResult:
    """Results of a replay."""

    timelines: list[SimulatedRequest]
    seconds: float = 0.0  # on the simulated clock, until the last token
    num_steps: int = 0
    num_sequence_steps: int = 0
    num_preemptions: int = 0
    scheduler_s: float = 0.0  # of real time, in the scheduler
    # between tokens of a sequence, where it is not one step
    gaps: list[float] = field(default_factory=list)
    # seconds, and sequences for which it was the time between tokens
    steps: list[tuple[float, int]] = field(default_factory=list)

    @property
    def qps(self) -> float:
        return len(self.timelines) / self.seconds

    def itl(self, percentile: float) -> float:
        """Percentiles of the time between tokens, over all tokens."""
        gaps = np.array([*self.gaps, *(seconds for seconds, _ in self.steps)])
        weights = np.array([1] * len(self.gaps) + [count for _, count in self.steps])
        if not weights.sum():
            return 0.0
        order = np.argsort(gaps)
        at = np.searchsorted(np.cumsum(weights[order]), weights.sum() * percentile / 100)
        return float(gaps[order][min(int(at), len(gaps) - 1)])


def replay(
    scheduler: Scheduler,
    requests: list[TraceRequest],
    step_seconds: Callable[[ScheduledBatch], float],
    *,
    max_total_tokens: int | None,
    progress: bool = False,
) -> ReplayResult:
    """Run all requests to their ends. step_seconds runs or estimates a step.

    max_total_tokens: what each request asks for, prompt and answer together; None: it knows its
    answer's length and asks for no more. Raises ValueError for a request that does not fit.
    """
    if max_total_tokens is not None:
        check_lengths(requests, max_total_tokens)
    arrivals = sorted(requests, key=lambda request: request.arrived_at)
    result = ReplayResult([SimulatedRequest(request) for request in arrivals])
    num_arrived = num_ended = 0

    def decide(batch: ScheduledBatch, sampled: list[Sequence]) -> list[int]:
        """The step takes its time, and each of its sequences gets a token then."""
        seconds = step_seconds(batch)
        record(result, sampled, result.seconds, result.seconds + seconds)
        result.seconds += seconds
        scheduler.step_cost.observe(batch.num_tokens, batch.num_context_tokens, seconds)
        return [0] * len(sampled)

    def is_over(sequence: Sequence) -> bool:
        nonlocal num_ended
        has_ended = sequence.tokens.num_output == arrivals[sequence.handle].num_output_tokens
        num_ended += has_ended
        return has_ended

    with tqdm(total=len(arrivals), desc="replaying", unit="request", disable=None if progress else True) as bar:
        while num_arrived < len(arrivals) or scheduler.num_unfinished:
            while num_arrived < len(arrivals) and arrivals[num_arrived].arrived_at <= result.seconds:
                scheduler.add(make_sequence(num_arrived, arrivals[num_arrived], max_total_tokens))
                num_arrived += 1
            started = time.perf_counter()
            batch = run_step(scheduler, decide, is_over=is_over)
            result.scheduler_s += time.perf_counter() - started
            if batch is None:
                result.seconds = arrivals[num_arrived].arrived_at
            bar.update(num_ended - bar.n)
    result.num_preemptions = scheduler.num_preemptions
    return result


def record(result: ReplayResult, sampled: list[Sequence], before: float, now: float) -> None:
    """Each of the step's sequences gets a token, and its time is noted."""
    num_usual = 0
    for sequence in sampled:
        timeline = result.timelines[sequence.handle]
        if sequence.tokens.num_output == 0:
            timeline.first_at = now
        elif timeline.last_at == before:
            num_usual += 1
        else:
            result.gaps.append(now - timeline.last_at)
        timeline.last_at = now
    result.steps.append((now - before, num_usual))
    result.num_steps += 1
    result.num_sequence_steps += len(sampled)


def check_lengths(requests: list[TraceRequest], max_total_tokens: int) -> None:
    """Raises ValueError for a request that is longer than it may ask for."""
    for request in requests:
        if request.num_prompt_tokens + request.num_output_tokens > max_total_tokens:
            raise ValueError(
                f"a request of {request.num_prompt_tokens} + {request.num_output_tokens} tokens is longer than "
                f"{max_total_tokens}"
            )


def make_sequence(number: int, request: TraceRequest, max_total_tokens: int | None) -> Sequence:
    """A sequence of the request's lengths; its tokens are made up."""
    num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
    shared = [at % VOCABULARY for at in range(request.num_shared_tokens)]
    tokens = [*shared, number % VOCABULARY, number // VOCABULARY % VOCABULARY, *[0] * num_prompt][:num_prompt]
    max_tokens = num_output if max_total_tokens is None else max_total_tokens - num_prompt
    return Sequence(
        Request(number, str(number), SamplingParams(max_tokens=max_tokens), arrived_at=request.arrived_at),
        Tokens(tokens, num_prompt),
    )


def percentiles(values: Iterable[float]) -> list[float]:
    """The values at PERCENTILES."""
    return [float(value) for value in np.percentile(np.array(list(values)), PERCENTILES)]
