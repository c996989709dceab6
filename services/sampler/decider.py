"""StepDecider: the outcome of each row of a step. It changes only the states that it is given.

Deciding is idempotent. A row whose position is already in the log is answered from the log, whether
this replica decided it, another one did, or compute came back from a crash and asks again. Compute
runs ahead: a row says which token it was computed on, and is passed over if the log holds another
there.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from services.sampler.detokenizer import spell
from services.sampler.request_state import NO_TEXT, RequestState
from services.sampler.rows import LOST, UNKNOWN, Decided
from shared.model.decision import Draws, decide, pad, pick
from shared.model.token_table import TokenTable
from shared.process.clock import Clock
from shared.process.telemetry import get_logger
from shared.wire.logprobs import TokenLogprob, TopLogprob
from shared.wire.messages import StepCandidates, TokenEvent, encode

log = get_logger("penstock.sampler")

# by handle and position: what the log holds there, nothing, or why that can't be read
Logged = Mapping[tuple[int, int], TokenEvent | str | None]


class StepDecider:
    """Appends a step's tokens to the states of its requests."""

    def __init__(self, tokens: TokenTable, clock: Clock) -> None:
        self.tokens = tokens
        self.clock = clock

    def decide(self, step: StepCandidates, states: Sequence[RequestState | None], logged: Logged) -> list[Decided]:
        """Each row's next token: the draw for all rows at once, then text and stop strings row by
        row, of a sequence in the order of its positions.

        states: of each row's request, None for an unknown one. logged: the events before the last
        of their states that rows ask for.
        """
        token_ids, logits = draw(step, states)
        previous = step.previous_token_ids.tolist() or [None] * len(states)
        decided: list[Decided] = []
        # handles whose sequences have ended, or whose logs hold other tokens than the next rows
        # were computed on
        over, astray = set[int](), set[int]()
        token_before: dict[int, int | None] = {}  # that the log holds, by handle, of the row before
        for row, (handle, position, state) in enumerate(
            zip(step.handles.tolist(), step.positions.tolist(), states, strict=True)
        ):
            if handle in over:
                continue
            if previous[row] is not None and token_before.get(handle, previous[row]) != previous[row]:
                astray.add(handle)
            result = settled(state, handle, position, logged)
            if result is None:
                assert state is not None
                if handle in astray or not is_next(state, position, previous[row]):
                    log.info(
                        "row skipped: it was computed on other tokens than the log's",
                        request_id=state.intro.request_id,
                        position=position,
                    )
                    astray.add(handle)
                    continue
                result = self._append(step, row, state, token_ids[row], logits[row])
            decided.append(result)
            if result.is_over or result.event is None:
                over.add(handle)
            else:
                token_before[handle] = result.event.token_id
        return decided

    def _append(self, step: StepCandidates, row: int, state: RequestState, token_id: int, logit: float) -> Decided:
        """Append the token to the state. A failure to make a request's text is that request's error
        alone."""
        handle, position = int(step.handles[row]), int(step.positions[row])
        state.touched_at = self.clock.monotonic()
        try:
            prompt = (
                spell(self.tokens, state.intro.prompt_logprobs)
                if position == 1 and state.intro.prompt_logprobs is not None
                else None
            )
            if state.intro.params.max_tokens == 0:
                return Decided(handle, position, state, end=state.end_after_prompt(prompt))
            event = state.append(token_id, self._logprob(step, row, state, token_id, logit), prompt)
            payload = encode(event)
        except Exception as error:  # a tokenizer's own failure on these tokens
            log.exception("request failed", request_id=state.intro.request_id)
            return Decided(handle, position, state, end=state.failure(f"{NO_TEXT}: {error}"))
        if position == 1 and (prompt is not None or state.intro.prompt_token_ids is not None):
            # from now on the log holds them
            state.intro = replace(state.intro, prompt_logprobs=None, prompt_token_ids=None)
        return Decided(handle, position, state, event, payload)

    def _logprob(
        self, step: StepCandidates, row: int, state: RequestState, token_id: int, logit: float
    ) -> TokenLogprob | None:
        """The token's logprob and the likeliest alternatives', if the request asked for them."""
        wanted = state.intro.params.logprobs
        if wanted is None:
            return None
        start, logsumexp = int(step.counts[:row].sum()), float(step.logsumexp[row])
        listed = range(start, start + min(wanted, int(step.counts[row])))
        top = tuple(
            TopLogprob(*self.tokens.describe(each), float(step.logits[at]) - logsumexp, each)
            for at in listed
            for each in (int(step.token_ids[at]),)
        )
        return TokenLogprob(*self.tokens.describe(token_id), logit - logsumexp, top, token_id=token_id)


def draw(step: StepCandidates, states: Sequence[RequestState | None]) -> tuple[list[int], list[float]]:
    """The token of each row and its logit."""
    logits, token_ids = pad(step.logits, step.counts, -np.inf), pad(step.token_ids, step.counts, 0)
    columns = np.zeros(len(states), np.int64)
    if step.num_kept.max(initial=1) > 1 or step.tail_mass.any():
        temperatures = np.array([1.0 if state is None else state.intro.params.temperature for state in states])
        if len(step.temperatures):
            temperatures = np.where(step.temperatures >= 0, step.temperatures, temperatures)
        seeds = np.array([0 if state is None else state.intro.params.seed for state in states], np.uint64)
        columns = decide(Draws(logits, token_ids, step.num_kept, step.tail_mass, temperatures, seeds, step.positions))
    chosen = pick(columns, step.counts, token_ids, step.tail_token_ids, step.tail_token_ids)
    return chosen.tolist(), pick(columns, step.counts, logits, step.tail_token_ids, step.tail_logits).tolist()


def settled(state: RequestState | None, handle: int, position: int, logged: Logged) -> Decided | None:
    """The outcome of a row that needs no draw: its request is unknown or lost, or the log holds its
    position, or an end before it, or has lost what it held. None: it has to be drawn."""
    if state is None:
        return Decided(handle, position, None, code=UNKNOWN)
    if state.is_shortened:
        return Decided(handle, position, None, code=LOST)
    if state.lost:
        return Decided(handle, position, state, end=state.failure(state.lost))
    if position > state.position and not state.is_finished:
        return None
    event = logged.get((handle, position), state.last_event)
    if event is None:
        return Decided(handle, position, None, code=LOST)
    if isinstance(event, str):
        return Decided(handle, position, state, end=state.failure(event))
    return Decided(handle, position, state, event=event)


def is_next(state: RequestState, position: int, previous_token_id: int | None) -> bool:
    """Whether a row continues the state: at the next position, computed on the last token."""
    return position == state.position + 1 and (previous_token_id is None or previous_token_id == state.last_token_id)
