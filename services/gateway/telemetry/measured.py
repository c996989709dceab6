"""Measured: the clock of one response, from its submission to its end. Makes its metrics, its line
in the log, and its part of the trace."""

from dataclasses import dataclass

from services.gateway.telemetry.metrics import Metrics, ModelMetrics
from services.gateway.telemetry.timeline import Timeline
from services.gateway.telemetry.traces import current_root
from services.requests.errors import CLIENT_CLOSED
from services.requests.store.record import ResponseRecord
from services.requests.text.answers.choice import Choice
from shared.process.telemetry import get_logger
from shared.wire.messages import RequestError, TokenEvent

log = get_logger("penstock.gateway")

HANDED_OVER = ("gateway_draining", "resumed_elsewhere")  # codes of errors with which a response ends here, and goes on


@dataclass(slots=True)
class SequenceClock:
    """Monotonic, s."""

    position: int  # of its last token
    num_tokens: int = 0  # that came
    first_at: float | None = None
    last_at: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None

    @property
    def tpot_s(self) -> float | None:
        return (
            (self.last_at - self.first_at) / (self.num_tokens - 1)
            if self.first_at is not None and self.num_tokens > 1
            else None
        )


class ResponseMeter:
    """Measures one response. A resumed one has no submission to count from: only its tokens and
    ends are counted."""

    def __init__(self, metrics: Metrics, *, is_resumed: bool = False) -> None:
        self.metrics, self.clock = metrics, metrics.clock
        self.is_resumed = is_resumed
        self.root = current_root()
        self.failure: RequestError | None = None  # with which the response ended
        self._started_at, self._submitted_at = self.clock.monotonic(), self.clock.wall()
        self._heard_at = 0.0  # wall clock: the first event
        self._clocks: list[SequenceClock] = []

    def begin(
        self, record: ResponseRecord, positions: list[int], timelines: list[Timeline], max_tokens: list[int | None]
    ) -> None:
        """The response is in the pipeline, and its events come from here.

        Of each sequence: the position that its events begin after, its timeline, and the max_tokens
        that the client set.
        """
        self.record, self.timelines = record, timelines
        self._figures: ModelMetrics = self.metrics.of(record.served_model)
        self._clocks = [SequenceClock(position) for position in positions]
        if not self.is_resumed:
            self._figures.n.observe(record.n)
            for wanted in max_tokens:
                if wanted:
                    self._figures.max_tokens.observe(wanted)
            for timeline in self.timelines:
                timeline.submitted_at = self._submitted_at

    def event(self, index: int, event: TokenEvent) -> None:
        """An event of the sequence with this index."""
        clock = self._clocks[index]
        self._heard_at = self._heard_at or self.clock.wall()
        if event.num_prompt_tokens:  # an end that a gateway wrote does not know it
            clock.num_prompt_tokens, clock.num_cached_tokens = event.num_prompt_tokens, event.num_cached_tokens
        # one that is read again, to be parsed, has been counted
        if event.token_id is not None and event.position > clock.position:
            clock.position = event.position
            self._token(clock)
        if event.finish_reason is not None and clock.finish_reason is None:
            self._end(index, event.finish_reason, event.error)

    def _token(self, clock: SequenceClock) -> None:
        now = self.clock.monotonic()
        clock.num_tokens += 1
        self.metrics.token(self._figures)
        if not self.is_resumed:
            if clock.first_at is None:
                clock.first_at = now
                self.metrics.first_token(self._figures, now - self._started_at)
            else:
                self._figures.tokens.gap(now - clock.last_at)
        clock.last_at = now

    def _end(self, index: int, reason: str, error: RequestError | None) -> None:
        figures, clock, timeline = self._figures, self._clocks[index], self.timelines[index]
        clock.finish_reason = reason
        if reason == "error":
            self.metrics.failed(self.record.served_model, error or RequestError("the request failed"))
        else:
            figures.success[reason].inc()
        figures.prompt_tokens.inc(clock.num_prompt_tokens)
        figures.prompt_tokens_cached.inc(clock.num_cached_tokens)
        if reason not in ("stop", "length"):
            return  # the time until a client gives up is no latency
        if clock.num_prompt_tokens:
            figures.num_prompt_tokens.observe(clock.num_prompt_tokens)
            figures.num_prefill_tokens.observe(clock.num_prompt_tokens - clock.num_cached_tokens)
        if self.is_resumed:
            return
        if clock.num_tokens:
            figures.num_generation_tokens.observe(clock.num_tokens)
        figures.e2e.observe(self.clock.monotonic() - self._started_at)
        times = (
            (figures.tpot, clock.tpot_s),
            (figures.tokenize, timeline.tokenize_s),
            (figures.queue, timeline.queue_s),
            (figures.prefill, timeline.prefill_s),
            (figures.decode, timeline.decode_s),
            (figures.inference, timeline.inference_s),
        )
        for histogram, seconds in times:
            if seconds is not None:
                histogram.observe(seconds)

    def whole(self, record: ResponseRecord, choices: list[Choice]) -> None:
        """Count answers that came all at once, such as a beam search's."""
        figures = self.metrics.of(record.served_model)
        for choice in choices:
            figures.success[choice.finish_reason if choice.finish_reason in figures.success else "stop"].inc()
            self.metrics.token(figures, choice.num_output_tokens)
            figures.prompt_tokens.inc(choice.num_prompt_tokens)
            figures.e2e.observe(self.clock.monotonic() - self._started_at)

    def finish(self) -> None:
        """The response has ended here: all of it, or its client has gone, or `failure` says why.
        Sequences that have not ended end with it, unless they go on elsewhere."""
        failure = self.failure
        is_elsewhere = failure.code in HANDED_OVER if failure is not None else self.record.resume_within_s > 0
        for index, clock in enumerate(self._clocks):
            if clock.finish_reason is None and not is_elsewhere:
                self._end(index, "cancelled" if failure is None else "error", failure)
        reasons = {clock.finish_reason for clock in self._clocks}
        status = failure.status if failure is not None else CLIENT_CLOSED if "cancelled" in reasons else 200
        self._say(status, "+".join(sorted(reason for reason in reasons if reason is not None)) or None)

    def _say(self, status: int, finish_reason: str | None) -> None:
        """One line, and the end of the trace. Of several sequences: sums of tokens, the longest
        times, the first token."""
        record, clocks, timelines = self.record, self._clocks, self.timelines
        firsts = [clock.first_at for clock in clocks if clock.first_at is not None]
        summary = {
            "status": status,
            "finish_reason": finish_reason,
            "error": self.failure.code if self.failure is not None else None,
            "num_prompt_tokens": sum(clock.num_prompt_tokens for clock in clocks),
            "num_cached_tokens": sum(clock.num_cached_tokens for clock in clocks),
            "num_output_tokens": sum(clock.num_tokens for clock in clocks),
        }
        times = {
            "tokenize_s": longest([timeline.tokenize_s for timeline in timelines]),
            "queue_s": longest([timeline.queue_s for timeline in timelines]),
            "prefill_s": longest([timeline.prefill_s for timeline in timelines]),
            "decode_s": longest([timeline.decode_s for timeline in timelines]),
            "ttft_s": min(firsts) - self._started_at if firsts else None,
            "tpot_s": longest([clock.tpot_s for clock in clocks]),
            "e2e_s": None if self.is_resumed else self.clock.monotonic() - self._started_at,
        }
        replicas = {
            "compute": joined([timeline.compute_id for timeline in timelines]),
            "sampler": joined([timeline.sampler_id for timeline in timelines]),
        }
        trace = {"trace_id": record.traceparent[3:35]} if record.traceparent else {}
        rounded = {name: None if seconds is None else round(seconds, 6) for name, seconds in times.items()}
        head = {
            "response_id": record.response_id,
            "kind": record.kind,
            "model": record.served_model,
            "num_sequences": len(clocks),
        }
        log.info("request ended", **head, **summary, **rounded, **replicas, is_resumed=self.is_resumed, **trace)
        self._trace(summary | {key: value for key, value in rounded.items() if value is not None})

    def _trace(self, summary: dict[str, str | int | float | None]) -> None:
        if self.root is None:
            return
        record = self.record
        own = {f"penstock.{name}": value for name, value in summary.items() if value is not None}
        if self._heard_at:
            self.root.record(
                "stream",
                self._heard_at,
                self.clock.wall(),
                {"penstock.is_resumed": self.is_resumed},
                parent=record.traceparent,
            )
        self.root.span.set_attributes(
            {"gen_ai.request.model": record.model, "gen_ai.response.id": record.response_id, **own}
        )


def longest(times: list[float | None]) -> float | None:
    return max((each for each in times if each is not None), default=None)


def joined(names: list[str]) -> str | None:
    return ",".join(sorted(set(names) - {""})) or None
