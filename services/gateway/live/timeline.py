"""Timeline: the way of recent requests through the pipeline, put together from one snapshot after the other. Plain data."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from shared.views import ComputeView, SequenceView

MAX_REQUESTS = 24
MAX_SPANS = 40  # of a request; of more, the first are forgotten

Phase = Literal["before", "waiting", "prefill", "decode", "lost"]


@dataclass(slots=True)
class Span:
    """A phase of a request, at one replica."""

    phase: Phase
    replica_id: str | None  # the compute replica; None: before it came to one, or between two
    started_at: float  # wall clock, s
    ended_at: float


@dataclass(slots=True)
class Course:
    """One request's way so far."""

    request_id: str
    model: str
    created_at: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    sampler_id: str | None = None
    is_over: bool = False
    spans: list[Span] = field(default_factory=list)


class Timeline:
    """What was seen of requests; the newest first. As exact as the snapshots are frequent."""

    def __init__(self) -> None:
        self._courses: OrderedDict[str, Course] = OrderedDict()

    def lost(self) -> list[Course]:
        """Those that are at no replica, of which somebody must find out whether they have ended."""
        return [course for course in self._courses.values() if not course.is_over and course.spans[-1].phase == "lost"]

    def after(self, now: float, views: Iterable[ComputeView], models: Mapping[str, str]) -> list[dict[str, Any]]:
        """Take in a snapshot. models: of the live compute replicas; what is at none of them was lost with its replica, and will be claimed, or has ended."""
        live, seen = set(models), set()
        for view in views:
            if view.replica_id not in live:
                continue
            for sequence in view.sequences:
                seen.add(sequence.request_id)
                self._see(now, view.replica_id, models[view.replica_id], sequence)
        for course in self._courses.values():
            if not course.is_over and course.request_id not in seen:
                self._miss(now, course, live)
        while len(self._courses) > MAX_REQUESTS:
            self._courses.popitem(last=False)
        return [asdict(course) for course in reversed(self._courses.values())]

    def _see(self, now: float, replica_id: str, model: str, sequence: SequenceView) -> None:
        course = self._courses.get(sequence.request_id)
        if course is None:
            course = Course(sequence.request_id, model, sequence.created_at, sequence.num_prompt_tokens)
            course.spans.append(Span("before", None, sequence.created_at or now, now))
            self._courses[sequence.request_id] = course
        course.num_cached_tokens, course.num_output_tokens = sequence.num_cached_tokens, sequence.num_output_tokens
        course.num_preemptions, course.sampler_id, course.is_over = sequence.num_preemptions, sequence.sampler_id, False
        self._extend(course, now, phase_of(sequence), replica_id)

    def _miss(self, now: float, course: Course, live: set[str]) -> None:
        """It ended where it was; or its replica died, and nobody has claimed it yet."""
        if course.spans[-1].replica_id in live:
            course.is_over = True
        else:
            self._extend(course, now, "lost", None)

    def _extend(self, course: Course, now: float, phase: Phase, replica_id: str | None) -> None:
        last = course.spans[-1]
        last.ended_at = now
        if (last.phase, last.replica_id) != (phase, replica_id):
            course.spans.append(Span(phase, replica_id, now, now))
            del course.spans[:-MAX_SPANS]


def phase_of(sequence: SequenceView) -> Phase:
    if not sequence.is_running:
        return "waiting"
    return "decode" if sequence.num_output_tokens else "prefill"
