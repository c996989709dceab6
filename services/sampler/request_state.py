"""The sampler's state of a request: its text so far, its stop strings, its logprobs. All of it
follows from the token log.

`append` is the one way forward, for a token just decided and for one replayed from the log alike,
so a replica that takes a request over has the same state as the replica that had it.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace
from tokenizers import Tokenizer

from services.sampler.detokenizer import Detokenizer
from shared.model.decision import DRAW
from shared.model.prediction import PredictionFollower
from shared.process.clock import Clock
from shared.process.errors import Lost
from shared.process.telemetry import get_logger
from shared.wire.logprobs import PromptLogprobs, TokenLogprob
from shared.wire.messages import FinishReason, RequestError, SequenceIntro, TokenEvent
from shared.wire.token_log import parse_log

log = get_logger("penstock.sampler")

LOST_LOG = "Redis has lost a part of this request's tokens"
OTHER_DRAW = "a version that draws tokens by another rule began this answer: send the request again for a whole one"
NO_TEXT = "the text of the answer could not be made"


class StopMatcher:
    """Finds stop strings, across token borders: it holds text back for as long as that may be the
    beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may go to the client now, and the stop string that ended it, if one did.
        Nothing is fed after a match."""
        self._held += text
        matches = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if matches:
            at, stop = min(matches)
            released, self._held = self._held[:at], ""
            return released, stop
        keep = self._longest_beginning()
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released, None

    def flush(self) -> str:
        """Release what is still held, once no more text can come."""
        released, self._held = self._held, ""
        return released

    def _longest_beginning(self) -> int:
        """The length of the longest end of the held text that begins a stop string; at most the
        longest stop less one."""
        for length in range(min(len(self._held), max(map(len, self.stops), default=1) - 1), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self.stops):
                return length
        return 0


@dataclass(slots=True)
class LogprobHolder:
    """Holds logprobs until the text of their tokens is released, for a stop string may still cut it
    off. Each has the first and the last character of its token's text, counted from the answer's
    beginning."""

    # of the prompt, which precede the answer in the text that the client gets
    num_echo_chars: int = 0
    held: list[tuple[int, int, TokenLogprob]] = field(default_factory=list)

    @property
    def last(self) -> TokenLogprob | None:
        """The last token's logprob, if it is still held."""
        return self.held[-1][2] if self.held else None

    def hold(self, logprob: TokenLogprob, first: int, last: int) -> None:
        """Keep it until the text up to `last` is released."""
        self.held.append((first, last, replace(logprob, text_offset=self.num_echo_chars + first)))

    def release(self, num_released: int, *, at_end: bool) -> tuple[TokenLogprob, ...]:
        """The logprobs of the tokens whose text is out. At the end, those that begin in the cut-off
        stop string are dropped."""
        ready = [entry for entry in self.held if entry[1] <= num_released or (at_end and entry[0] < num_released)]
        self.held = [] if at_end else self.held[len(ready) :]
        return tuple(logprob for _, _, logprob in ready)


@dataclass(slots=True)
class RequestState:
    """One request. Only the StepDecider and the replay of its log change it, and the service, which
    knows its reader."""

    intro: SequenceIntro
    detokenizer: Detokenizer
    matcher: StopMatcher
    gateway_id: str | None  # where events go: the gateway that asked, or the one that resumed
    touched_at: float  # monotonic, s
    begun_at: float  # wall clock, s
    position: int = 0  # tokens decided
    last_token_id: int = -1  # the token at that position; -1: none yet
    lost: str = ""  # why the log can't be followed any more, in words for the client
    is_shortened: bool = False  # the log has lost what was decided last
    num_chars: int = 0  # of text that came out of the detokenizer
    num_released: int = 0  # of those, released to the client
    logprobs: LogprobHolder = field(default_factory=LogprobHolder)
    fingerprint: str = ""  # of the compute replica that made the last token
    prediction: PredictionFollower | None = None  # of the answer, if the client has one
    last_event: TokenEvent | None = None
    num_replayed_tokens: int = 0  # decided before this replica had it

    @classmethod
    def begin(cls, intro: SequenceIntro, tokenizer: Tokenizer, clock: Clock) -> "RequestState":
        """The state before the first token."""
        detokenizer = Detokenizer(
            tokenizer, intro.prompt_tail.tolist(), skip_special_tokens=intro.params.skip_special_tokens
        )
        prediction = (
            PredictionFollower(intro.prediction_token_ids.tolist()) if len(intro.prediction_token_ids) else None
        )
        logprobs = LogprobHolder(len(intro.echo_text or ""))
        return cls(
            intro,
            detokenizer,
            StopMatcher(intro.params.stop),
            intro.gateway_id,
            touched_at=clock.monotonic(),
            begun_at=clock.wall(),
            logprobs=logprobs,
            prediction=prediction,
        )

    @property
    def is_finished(self) -> bool:
        return self.last_event is not None and self.last_event.finish_reason is not None

    def append(
        self, token_id: int, logprob: TokenLogprob | None, prompt_logprobs: PromptLogprobs | None = None
    ) -> TokenEvent:
        """Append the token that was decided. Returns its event, with the text that may go to the client;
        the first event has what the request asked about its prompt."""
        self.position += 1
        self.last_token_id = token_id
        if self.prediction is not None:
            self.prediction.take(token_id)
        params = self.intro.params
        end = self._end_of_token(token_id)
        if end is not None and not params.include_stop_str_in_output:
            released = ""
            if logprob is not None:
                self.logprobs.hold(replace(logprob, is_end=True), self.num_chars, self.num_chars)
        else:
            released, matched = self._add_text(token_id, logprob)
            if matched is not None:
                end = Finish("stop", matched)
            elif end is None and self.position >= (params.max_tokens or 1):
                end = Finish("length")
        if end is not None and not isinstance(end.stop_reason, str):
            rest, end = self._flush_text(end)
            released += rest
        self.num_released += len(released)
        ready = (
            self.logprobs.release(self.num_released, at_end=end is not None) if params.logprobs is not None else None
        )
        event = TokenEvent(
            request_id=self.intro.request_id,
            position=self.position,
            token_id=token_id,
            text=self._with_echo(released),
            num_prompt_tokens=self.intro.num_prompt_tokens,
            num_cached_tokens=self.intro.num_cached_tokens,
            logprobs=ready,
            finish_reason=end.reason if end is not None else None,
            stop_reason=end.stop_reason if end is not None else None,
            withheld=self.logprobs.last,
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=self.intro.prompt_token_ids if self.position == 1 else None,
            draw=DRAW if self.position == 1 else None,
            fingerprint=self.intro.fingerprint if self.intro.fingerprint != self.fingerprint else "",
            prediction_tokens=(self.prediction.num_accepted, self.prediction.num_rejected)
            if self.prediction is not None and end is not None
            else (),
        )
        self.fingerprint = self.intro.fingerprint
        self.last_event = event
        return event

    def end_after_prompt(self, prompt_logprobs: PromptLogprobs | None) -> TokenEvent:
        """Return the last event of a request for no tokens."""
        event = TokenEvent(
            request_id=self.intro.request_id,
            position=0,
            token_id=None,
            text=self.intro.echo_text or "",
            num_prompt_tokens=self.intro.num_prompt_tokens,
            num_cached_tokens=self.intro.num_cached_tokens,
            finish_reason="length",
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=self.intro.prompt_token_ids,
        )
        self.last_event = event
        return event

    def failure(self, reason: str) -> TokenEvent:
        """Return the last event of a request that can't continue."""
        error = RequestError(reason)
        return TokenEvent(
            self.intro.request_id,
            self.position,
            None,
            "",
            self.intro.num_prompt_tokens,
            finish_reason="error",
            error=error,
        )

    def replay(self, event: TokenEvent) -> None:
        """Append the token of one entry of the log."""
        fingerprint = event.fingerprint or self.fingerprint
        if event.token_id is not None:
            own = event.withheld or (event.logprobs[-1] if event.logprobs else None)
            self.append(event.token_id, own)
        self.fingerprint, self.last_event = fingerprint, event

    def _end_of_token(self, token_id: int) -> "Finish | None":
        """The end, if the token itself is one."""
        if token_id in self.intro.eos_token_ids:
            return Finish("stop")
        return Finish("stop", token_id) if token_id in self.intro.params.stop_token_ids else None

    def _add_text(self, token_id: int, logprob: TokenLogprob | None) -> tuple[str, str | None]:
        """The text that the token releases, and the stop string that it completes; its logprob is
        held."""
        start = self.num_chars
        text = self.detokenizer.add(token_id)
        released = self._feed(text)
        if logprob is not None:
            # text before it is U+FFFD, for bytes of earlier tokens
            if text.endswith(logprob.token):
                start = self.num_chars - len(logprob.token)
            self.logprobs.hold(logprob, start, self.num_chars)
        return released

    def _flush_text(self, end: "Finish") -> tuple[str, "Finish"]:
        """The text that was held back and that nothing can complete any more; and the end, which a
        stop string in that text may change."""
        released, matched = self._feed(self.detokenizer.flush())
        return (released + self.matcher.flush(), end) if matched is None else (released, Finish("stop", matched))

    def _feed(self, text: str) -> tuple[str, str | None]:
        """The text that passes the stop matcher, which sleeps until min_tokens are there, and the
        stop string that it found."""
        self.num_chars += len(text)
        if not self.intro.params.stop or self.position < self.intro.params.min_tokens:
            return text, None
        released, matched = self.matcher.feed(text)
        return (
            released + matched if matched is not None and self.intro.params.include_stop_str_in_output else released,
            matched,
        )

    def _with_echo(self, released: str) -> str:
        return (self.intro.echo_text or "") + released if self.position == 1 else released


class Finish(NamedTuple):
    """Why a sequence ends with a token; stop_reason: the token or the string that stopped it, where
    the request asked for that one."""

    reason: FinishReason
    stop_reason: str | int | None = None


def catch_up(state: RequestState, entries: Any) -> None:
    """Replay entries of a state's log. A log that can't be replayed is that request's error alone."""
    try:
        events = parse_log(entries, state.position)
        for event in events:
            state.replay(event)
        is_begun_here = state.intro.params.is_greedy or not events or events[0].position != 1 or events[0].draw == DRAW
        if not is_begun_here and not state.is_finished:
            state.lost = OTHER_DRAW
    except Lost as error:
        state.lost = f"{LOST_LOG}: {error}"
    except Exception as error:  # a tokenizer's own failure on these tokens
        log.exception("request failed", request_id=state.intro.request_id)
        state.lost = f"{NO_TEXT}: {error}"
