"""Quarantine: which of the requests that a dead replica left killed it?

Blame needs a part in the step that was running, and lack of progress. Before a request's first step
it is written down that it runs. Of what is claimed, a request that only waited, or whose log has
grown since it began to run, is above suspicion, and goes on at once. The others are suspects. They
are tried when those have gone on: in steps of their own, by turns with everybody else's, a few at a
time and then alone. The choices of one prompt are tried as one. Who gets a token is free. Who was
in a trial step alone MAX_ALONE times, and each time the replica died, is the poison: it gets one
clear error.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from services.compute.sequence import Sequence
from shared.wire.line import Pipeline
from shared.wire.streams import LOG_TTL_S, attempts_key
from shared.wire.transport import Transport

GROUP_SIZE = 8  # suspects that are begun together the first time
MAX_ALONE = 2

Record = tuple[str, bytes]  # a key, and what is written there


@dataclass(frozen=True, slots=True)
class Attempts:
    """A request that runs, or was claimed, as Redis remembers it."""

    num_begun: int = 0  # trials in which a replica died, or may be dying, since its log last grew
    num_logged: int = 0  # tokens in its log then
    has_run: bool = False  # it has been in a step since: a death may be its doing

    @property
    def is_poison(self) -> bool:
        return self.num_begun > MAX_ALONE

    def record(self, request_id: str) -> Record:
        return attempts_key(request_id), msgpack.packb([self.num_begun, self.num_logged, self.has_run])


@dataclass(slots=True)
class Trial:
    """A suspect that runs apart from all others."""

    sequence: Sequence
    attempts: Attempts  # before this trial
    num_tokens: int  # that it had, decided
    is_blamed: bool  # for a death that happens now, as Redis has it
    # its grammar is compiled, which may be what kills: blamed until its first step is over
    is_preparing: bool

    @property
    def record(self) -> Record:
        return replace(self.attempts, num_begun=self.attempts.num_begun + self.is_blamed).record(self.sequence.request.request_id)


@dataclass(slots=True)
class Quarantine:
    transport: Transport
    # by handle: they wait; and whether they have grammars
    suspects: dict[int, tuple[Sequence, Attempts, bool]] = field(default_factory=dict)
    begun: dict[int, Trial] = field(default_factory=dict)  # suspects that run
    # claimed, above suspicion, and the tokens they had
    recovering: dict[int, tuple[Sequence, int]] = field(default_factory=dict)

    def judge(self, request_ids: list[str], num_logged: list[int]) -> list[Attempts | None]:
        """Judge claimed requests: how often each was tried without progress, None for one above
        suspicion; and write down that they were claimed."""
        keys = [attempts_key(each) for each in request_ids]
        remembered: Any = self.transport.persist(lambda: self.transport.client.mget(keys))
        verdicts: list[Attempts | None] = []
        for packed, count in zip(remembered, num_logged, strict=True):
            known = Attempts(*msgpack.unpackb(packed)) if packed is not None else Attempts()
            verdicts.append(replace(known, num_logged=count) if known.has_run and count <= known.num_logged else None)
        self._write([(each or Attempts(0, count)).record(name) for name, count, each in zip(request_ids, num_logged, verdicts, strict=True)])
        return verdicts

    def hold(self, sequence: Sequence, attempts: Attempts, *, is_prepared: bool = False) -> None:
        """The sequence is a suspect: it waits here until it is begun."""
        self.suspects[sequence.handle] = (sequence, attempts, is_prepared)

    def watch(self, sequence: Sequence) -> None:
        """A claimed sequence above suspicion: suspects wait until it has gone on."""
        self.recovering[sequence.handle] = (sequence, sequence.tokens.num_decided)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self.suspects.pop(sequence.handle, None)
        self.begun.pop(sequence.handle, None)
        self.recovering.pop(sequence.handle, None)

    def step(self, add: Callable[[Sequence], None]) -> frozenset[int]:
        """Before each step: free who has gone on, and begin the next suspects by `add`. Returns the
        handles that run apart."""
        for handle in [handle for handle, (sequence, count) in self.recovering.items() if sequence.tokens.num_decided > count]:
            del self.recovering[handle]
        for handle in [handle for handle, trial in self.begun.items() if trial.sequence.tokens.num_decided > trial.num_tokens]:
            del self.begun[handle]
        if self.suspects and not self.begun and not self.recovering:
            self._begin(add)
        return frozenset(self.begun)

    def blame(self, handles: Iterable[int]) -> None:
        """Before each step, with the handles that are in it: write down whom a death would be
        blamed on, as far as it changes."""
        if not self.begun:
            return
        running, changed = frozenset(handles), []
        units = {unit_of(trial.sequence) for handle, trial in self.begun.items() if handle in running}
        for handle, trial in self.begun.items():
            trial.is_preparing = trial.is_preparing and handle not in running
            if trial.is_blamed != (unit_of(trial.sequence) in units or trial.is_preparing):
                trial.is_blamed = not trial.is_blamed
                changed.append(trial.record)
        if changed:
            self._write(changed)

    def told(self, sequences: Iterable[Sequence], *, has_run: bool) -> list[Record]:
        """The records to write before these sequences do something that may kill, and (has_run
        False) after it went well before any step."""
        return [
            Attempts(0, each.tokens.num_decided - each.tokens.num_prompt, has_run).record(each.request.request_id)
            for each in sequences
            if each.handle not in self.begun
        ]

    def _begin(self, add: Callable[[Sequence], None]) -> None:
        """The suspects that were tried least, together if they never were; those with grammars
        or images last, for others would wait while they are prepared."""
        handles = sorted(self.suspects, key=lambda handle: (self.suspects[handle][2], self.suspects[handle][1].num_begun))
        _, attempts, is_prepared = self.suspects[handles[0]]
        alike = [each for each in handles if self.suspects[each][1].num_begun == attempts.num_begun and self.suspects[each][2] == is_prepared]
        units = {unit_of(self.suspects[each][0]) for each in alike[: 1 if attempts.num_begun else GROUP_SIZE]}
        chosen = [each for each in alike if unit_of(self.suspects[each][0]) in units]
        for handle in chosen:
            sequence, attempts, is_prepared = self.suspects.pop(handle)
            self.begun[handle] = Trial(sequence, attempts, sequence.tokens.num_decided, is_blamed=is_prepared, is_preparing=is_prepared)
        if is_prepared:
            self._write([self.begun[handle].record for handle in chosen])
        for handle in chosen:
            add(self.begun[handle].sequence)

    def _write(self, records: list[Record]) -> None:
        def fill(pipe: Pipeline) -> None:
            queue_records(pipe, records)

        self.transport.run(fill)


def unit_of(sequence: Sequence) -> str | int:
    """Choices of one prompt are tried together."""
    return sequence.request.group_id or sequence.handle


def queue_records(pipe: Pipeline, records: Iterable[Record]) -> None:
    for key, value in records:
        pipe.set(key, value, ex=LOG_TTL_S)
