"""Quarantine: which of the requests that a dead replica left killed it?

A request is blamed for a death if it had a part in the step that was running, and has made no progress.
Before a request's first step, Redis is told that it runs. Of the requests that are claimed, one that
only waited, or whose log has grown since it began to run, is above suspicion, and goes on at once. The
others are suspects. They are tried when those have gone on: in steps of their own, by turns with all
other sequences, a few at a time and then alone. The choices of one prompt are tried as one. A suspect
that gets a token is free. One that was alone in a trial step MAX_ALONE times, and each time the replica
died, is the poison: it gets one clear error.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from services.compute.exchange.active import ActiveRequest, Attempts, Record, Recovery, Suspect, Trial, queue_records
from services.compute.sequence import Sequence
from shared.wire.streams import attempts_key
from shared.wire.transport import Transport

GROUP_SIZE = 8  # suspects that are begun together the first time
MAX_ALONE = 2


def is_poison(attempts: Attempts) -> bool:
    return attempts.num_begun > MAX_ALONE


@dataclass(slots=True)
class Quarantine:
    """Each request's part is its `quarantine`."""

    transport: Transport
    active: Mapping[int, ActiveRequest]  # by handle: the service's
    is_in_use: bool = False  # False: no request has a part

    @property
    def suspects(self) -> list[ActiveRequest]:
        """The requests that wait for their trial."""
        return (
            [active for active in self.active.values() if isinstance(active.quarantine, Suspect)]
            if self.is_in_use
            else []
        )

    @property
    def trials(self) -> dict[int, Trial]:
        """The trials that run, by handle."""
        if not self.is_in_use:
            return {}
        return {
            handle: active.quarantine for handle, active in self.active.items() if isinstance(active.quarantine, Trial)
        }

    def judge(self, request_ids: list[str], num_logged: list[int]) -> list[Attempts | None]:
        """Judge claimed requests: how often each was tried without progress, None for one above
        suspicion; and write down that they were claimed."""
        keys = [attempts_key(request_id) for request_id in request_ids]
        remembered: Any = self.transport.persist(lambda: self.transport.client.mget(keys))
        verdicts: list[Attempts | None] = []
        for packed, count in zip(remembered, num_logged, strict=True):
            known = Attempts(*msgpack.unpackb(packed)) if packed is not None else Attempts()
            verdicts.append(replace(known, num_logged=count) if known.has_run and count <= known.num_logged else None)
        self._write(
            [
                (verdict or Attempts(0, count)).record(name)
                for name, count, verdict in zip(request_ids, num_logged, verdicts, strict=True)
            ]
        )
        return verdicts

    def hold(self, active: ActiveRequest, attempts: Attempts, *, is_prepared: bool = False) -> None:
        """The request is a suspect: it waits until its trial begins."""
        active.quarantine = Suspect(attempts, is_prepared)
        self.is_in_use = True

    def watch(self, active: ActiveRequest) -> None:
        """A claimed request above suspicion: suspects wait until it has gone on."""
        active.quarantine = Recovery(active.sequence.tokens.num_decided)
        self.is_in_use = True

    def step(self, add: Callable[[Sequence], None]) -> frozenset[int]:
        """Before each step: free the requests that have gone on, and begin the next trials; `add` begins a
        suspect. Returns the handles that run apart."""
        if not self.is_in_use:
            return frozenset()
        for active in self.active.values():
            if (
                isinstance(active.quarantine, Trial | Recovery)
                and active.sequence.tokens.num_decided > active.quarantine.num_tokens
            ):
                active.quarantine = None
        parts = [active.quarantine for active in self.active.values() if active.quarantine is not None]
        self.is_in_use = bool(parts)
        if parts and all(isinstance(part, Suspect) for part in parts):
            self._begin(add)
        return frozenset(self.trials)

    def blame(self, handles: Iterable[int]) -> None:
        """Before each step, with the handles that are in it: write down which requests a death would be
        blamed on, as far as it changes."""
        trials = self.trials
        if not trials:
            return
        running, changed = frozenset(handles), []
        units = {unit_of(self.active[handle].sequence) for handle in trials if handle in running}
        for handle, trial in trials.items():
            sequence = self.active[handle].sequence
            trial.is_preparing = trial.is_preparing and handle not in running
            if trial.is_blamed != (unit_of(sequence) in units or trial.is_preparing):
                trial.is_blamed = not trial.is_blamed
                changed.append(trial.record(sequence.request.request_id))
        if changed:
            self._write(changed)

    def records_of(self, requests: Iterable[ActiveRequest], *, has_run: bool) -> list[Record]:
        """The records to write before these requests do something that may kill, and (has_run False) after
        it went well before any step."""
        return [
            Attempts(0, active.sequence.tokens.num_decided - active.sequence.tokens.num_prompt, has_run).record(
                active.message.request_id
            )
            for active in requests
            if not isinstance(active.quarantine, Trial)
        ]

    def _begin(self, add: Callable[[Sequence], None]) -> None:
        """Begin the suspects that were tried least, together if they never were; those with grammars or
        images last, for others would wait while they are prepared."""
        by_order: dict[tuple[bool, int], list[ActiveRequest]] = {}
        for active in self.suspects:
            assert isinstance(active.quarantine, Suspect)
            by_order.setdefault((active.quarantine.is_prepared, active.quarantine.attempts.num_begun), []).append(
                active
            )
        is_prepared, num_begun = order = min(by_order)
        units = {unit_of(active.sequence) for active in by_order[order][: 1 if num_begun else GROUP_SIZE]}
        chosen = [active for active in by_order[order] if unit_of(active.sequence) in units]
        for active in chosen:
            assert isinstance(active.quarantine, Suspect)
            num_tokens = active.sequence.tokens.num_decided
            active.quarantine = Trial(
                active.quarantine.attempts, num_tokens, is_blamed=is_prepared, is_preparing=is_prepared
            )
        if is_prepared:
            self._write([trial.record(self.active[handle].message.request_id) for handle, trial in self.trials.items()])
        for active in chosen:
            add(active.sequence)

    def _write(self, records: list[Record]) -> None:
        self.transport.run(lambda pipe: queue_records(pipe, records))


def unit_of(sequence: Sequence) -> str | int:
    """Choices of one prompt are tried together."""
    return sequence.request.group_id or sequence.handle
