"""StepWriter: a decided step goes to its logs, to the gateways and to compute, in one round
trip."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from services.sampler.rows import FAILED, Decided, moments_of
from shared.process.clock import Clock
from shared.wire.line import Pipeline
from shared.wire.messages import Moments, StepCandidates, StepDecisions, StepEvents, TokenEvent, encode
from shared.wire.streams import DirectStream, decisions, events
from shared.wire.token_log import write_end, write_step

# what the log holds in place of an entry, as its id and event; None if it has lost what came before
Held = tuple[bytes, bytes] | None
AFTER_REFUSED = (b"", b"")  # unknown: the entry was refused unseen, for it follows one that was refused
Refused = dict[tuple[int, int], Held]  # by handle and position


class StepWriter:
    """Writes what this sampler has decided. send: makes one round trip of what is queued, and
    returns the replies."""

    def __init__(
        self, model: str, sampler_id: str, send: Callable[[Callable[[Pipeline], None]], list[Any]], clock: Clock
    ) -> None:
        self.model = model
        self.sampler_id = sampler_id
        self.send = send
        self.clock = clock

    def write(self, step: StepCandidates, decided: list[Decided]) -> Refused:
        """Append the rows' entries to their logs, and `tell` of them. Returns the entries that the
        logs refused; if there are any, no event or decision was sent."""
        new = [row for row in decided if row.payload]
        refused = self._send(step, decided, [(row.event, row.payload) for row in new if row.event is not None])
        return {new[index - 1].key: held for index, held in refused}

    def tell(self, step: StepCandidates, decided: list[Decided]) -> None:
        """Send events and decisions of rows whose tokens the logs hold, and write the ends without
        a token."""
        self._send(step, decided, [])

    def _send(
        self, step: StepCandidates, decided: list[Decided], entries: list[tuple[TokenEvent, bytes]]
    ) -> list[tuple[int, Held]]:
        now = self.clock.wall()
        messages = [*self._events(step, decided, now), (decisions(step.compute_id), self._decisions(step, decided))]
        ends = [
            (row.end, row.state.gateway_id, self._moments(step, [row], now)) for row in decided if row.end and row.state
        ]

        def fill(pipe: Pipeline) -> None:
            for end, gateway_id, moments in ends:
                write_end(pipe, self.model, end, gateway_id, moments)
            write_step(pipe, self.model, entries, messages)

        return [(index, (held[0], held[1]) if held else None) for index, held in self.send(fill)[len(ends)]]

    def _events(
        self, step: StepCandidates, decided: list[Decided], now: float
    ) -> list[tuple[DirectStream, StepEvents]]:
        """Each gateway's events, in the order of the rows."""
        payloads: dict[str, list[bytes]] = defaultdict(list)
        for row in decided:
            if row.state is not None and row.state.gateway_id is not None and row.event is not None:
                payloads[row.state.gateway_id].append(row.payload or encode(row.event))
        return [
            (
                events(gateway_id),
                StepEvents(
                    tuple(each), self._moments(step, [row for row in decided if row.is_notable(gateway_id)], now)
                ),
            )
            for gateway_id, each in payloads.items()
        ]

    def _moments(self, step: StepCandidates, decided: list[Decided], now: float) -> tuple[Moments, ...]:
        return moments_of(decided, step.compute_id, self.sampler_id, now)

    def _decisions(self, step: StepCandidates, decided: list[Decided]) -> StepDecisions:
        tokens = [
            row.event.token_id if row.event is not None and row.event.token_id is not None else row.code
            for row in decided
        ]
        ends = [row.code == FAILED if row.event is None else row.event.finish_reason is not None for row in decided]
        return StepDecisions(
            sampler_id=self.sampler_id,
            step=step.step,
            handles=np.array([row.handle for row in decided], np.int32),
            positions=np.array([row.position for row in decided], np.int32),
            token_ids=np.array(tokens, np.int32),
            is_finished=np.array(ends, np.uint8),
        )
