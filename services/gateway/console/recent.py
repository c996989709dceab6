"""RecentRequests: the way of recent requests through the pipeline, put together from successive
views. Plain data.

What a compute replica shows has the moments at which a request was tokenized, taken up and first
scheduled; what this gateway answers, it knows the first and the last token of as well (the same
moments that spans and metrics are made of). The rest is as exact as the views are frequent.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from services.gateway.generation.subscription import Subscription
from services.gateway.telemetry.timeline import Timeline
from shared.wire.views import ComputeView, SequenceView

MAX_REQUESTS = 24
MAX_STAYS = 8  # of a request; of more, the first are forgotten

Phase = Literal["tokenizing", "waiting", "prefill", "decode", "lost"]


@dataclass(slots=True)
class Stay:
    """A request's time at one compute replica. Wall clock, s; 0: not yet."""

    replica_id: str
    taken_at: float
    scheduled_at: float
    num_tokens_before: int  # of its output, when it came
    decoding_since: float = 0.0
    seen_at: float = 0.0  # last


@dataclass(slots=True)
class RecentRequest:
    """One request's way so far."""

    request_id: str
    model: str
    created_at: float
    tokenized_at: float
    num_prompt_tokens: int = 0  # 0: unknown
    num_output_tokens: int = 0
    num_preemptions: int = 0
    sampler_id: str | None = None
    ended_at: float = 0.0
    is_lost: bool = False  # its replica has died, and no other has it yet
    stays: list[Stay] = field(default_factory=list)

    def spans(self, now: float) -> Iterator[tuple[Phase, str | None, float, float]]:
        """Phase, compute replica, beginning and end: without gaps, up to the request's end or to
        now."""
        yield "tokenizing", None, self.created_at, self.tokenized_at
        at: float = self.tokenized_at
        for number, stay in enumerate(self.stays):
            is_last = number == len(self.stays) - 1
            until = (self.ended_at or now) if is_last and not self.is_lost else stay.seen_at
            if number:
                yield "lost", None, at, stay.taken_at
                at = stay.taken_at
            yield "waiting", stay.replica_id, at, stay.scheduled_at or until
            if stay.scheduled_at:
                yield "prefill", stay.replica_id, stay.scheduled_at, stay.decoding_since or until
            if stay.decoding_since:
                yield "decode", stay.replica_id, stay.decoding_since, until
            at = until
        if self.is_lost:
            yield "lost", None, at, now


class RecentRequests:
    """The recent requests as they were seen, the newest first."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, RecentRequest] = OrderedDict()

    def lost(self) -> list[RecentRequest]:
        """The requests at no replica. The caller must find out whether they have ended."""
        return [request for request in self._requests.values() if request.is_lost]

    def see(self, now: float, views: Iterable[ComputeView], models: Mapping[str, str]) -> None:
        """Take in what compute shows. models: of the live replicas; what is at none of them has
        ended, or was lost with its replica and will be claimed."""
        seen = set()
        for view in views:
            if view.replica_id in models:
                for sequence in view.sequences:
                    seen.add(sequence.request_id)
                    self._see(now, view.replica_id, models[view.replica_id], sequence)
        for request in self._requests.values():
            if not request.ended_at and request.stays and request.request_id not in seen:
                request.is_lost = request.stays[-1].replica_id not in models
                if not request.is_lost:
                    request.ended_at = request.stays[-1].seen_at

    def _see(self, now: float, replica_id: str, model: str, sequence: SequenceView) -> None:
        request = self._requests.get(sequence.request_id)
        if request is None:
            request = self._add(RecentRequest(sequence.request_id, model, sequence.created_at, sequence.tokenized_at))
        num_output = sequence.num_output_tokens - sequence.num_undecided_tokens
        if not request.stays or request.stays[-1].replica_id != replica_id:
            before = request.num_output_tokens if request.stays else 0
            request.stays.append(Stay(replica_id, sequence.taken_at, sequence.scheduled_at, before))
            if num_output > before:  # its beginning was not seen
                request.stays[-1].decoding_since = sequence.scheduled_at or now
            del request.stays[:-MAX_STAYS]
        stay = request.stays[-1]
        stay.scheduled_at, stay.seen_at = sequence.scheduled_at, now
        if num_output > stay.num_tokens_before:
            stay.decoding_since = stay.decoding_since or now
        request.num_prompt_tokens, request.num_output_tokens = sequence.num_prompt_tokens, num_output
        request.num_preemptions, request.sampler_id = sequence.num_preemptions, sequence.sampler_id
        request.is_lost, request.ended_at = False, 0.0

    def hear(self, subscriptions: Iterable[Subscription]) -> None:
        """Take in what this gateway knows of the responses that are, or were, read here. What came
        and went between two looks is here alone."""
        for subscription in subscriptions:
            for request_id, timeline in subscription.timelines.items():
                if timeline.submitted_at and timeline.scheduled_at and timeline.first_token_at:
                    is_over = request_id not in subscription.unfinished
                    self._hear(
                        request_id, subscription.model, timeline, subscription.positions[request_id], is_over=is_over
                    )

    def _hear(self, request_id: str, model: str, timeline: Timeline, position: int, *, is_over: bool) -> None:
        request = self._requests.get(request_id)
        if request is None:
            request = self._add(RecentRequest(request_id, model, timeline.submitted_at, timeline.tokenized_at))
        if not request.stays:
            request.stays.append(Stay(timeline.compute_id, timeline.tokenized_at, timeline.scheduled_at, 0))
            request.num_output_tokens = position
        first = request.stays[0]
        if first.scheduled_at == timeline.scheduled_at:  # not the one that claimed it later
            first.decoding_since = timeline.first_token_at
        if is_over:
            request.ended_at = timeline.ended_at or timeline.first_token_at
            request.num_output_tokens, request.is_lost = position, False

    def _add(self, request: RecentRequest) -> RecentRequest:
        self._requests[request.request_id] = request
        while len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)
        return request

    def shown(self, now: float) -> list[dict[str, Any]]:
        """The requests as JSON."""
        return [
            {
                "request_id": request.request_id,
                "num_prompt_tokens": request.num_prompt_tokens,
                "num_output_tokens": request.num_output_tokens,
                "num_preemptions": request.num_preemptions,
                "sampler_id": request.sampler_id,
                "is_over": request.ended_at > 0,
                "spans": [
                    {"phase": phase, "replica_id": replica_id, "started_at": start, "ended_at": max(start, end)}
                    for phase, replica_id, start, end in request.spans(now)
                    if end > start
                ],
            }
            for request in sorted(self._requests.values(), key=lambda each: each.created_at, reverse=True)
        ]
