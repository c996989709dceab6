"""Quarantine: which of the requests that a dead replica left killed it?

Blame needs lack of progress. Of what is claimed, a request whose log has grown since it was claimed before (or that has begun to, the first
time) is above suspicion, and goes on at once. The others are suspects: they run when everybody else has gone on, apart from all other
sequences, a few at a time, and then alone. Who gets a token is free. Who was begun alone MAX_ALONE times, and each time the replica died
before it got one, is the poison: it gets one clear error. Each begin is written down before it happens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from services.compute.sequence import Sequence
from shared.streams import LOG_TTL_S, attempts_key
from shared.transport import Pipeline, Transport

GROUP_SIZE = 8  # suspects that are begun together the first time
MAX_ALONE = 2


@dataclass(frozen=True, slots=True)
class Attempts:
    """What Redis remembers of a claimed request."""

    num_begun: int = 0  # in quarantine, since its log last grew
    num_logged: int = 0  # tokens in its log then

    @property
    def is_poison(self) -> bool:
        return self.num_begun > MAX_ALONE


@dataclass(slots=True)
class Quarantine:
    transport: Transport
    suspects: dict[int, tuple[Sequence, Attempts]] = field(default_factory=dict)  # by handle: they wait
    begun: dict[int, tuple[Sequence, int]] = field(default_factory=dict)  # suspects that run, apart from all others, and the tokens they had
    recovering: dict[int, tuple[Sequence, int]] = field(default_factory=dict)  # claimed, above suspicion, and the tokens they had

    def judge(self, request_ids: list[str], num_logged: list[int]) -> list[Attempts | None]:
        """For each claimed request how often it was tried without progress, None for one above suspicion; and write down that they were claimed."""
        keys = [attempts_key(each) for each in request_ids]
        remembered: Any = self.transport.persist(lambda: self.transport.client.mget(keys))
        verdicts: list[Attempts | None] = []
        for packed, count in zip(remembered, num_logged, strict=True):
            known = Attempts(*msgpack.unpackb(packed)) if packed is not None else None
            has_grown = count > (known.num_logged if known is not None else 0)
            verdicts.append(None if has_grown else Attempts(known.num_begun if known is not None else 0, count))
        records = [each or Attempts(0, count) for each, count in zip(verdicts, num_logged, strict=True)]
        self._remember(zip(request_ids, records, strict=True))
        return verdicts

    def hold(self, sequence: Sequence, attempts: Attempts) -> None:
        """The sequence is a suspect: it waits here until it is begun."""
        self.suspects[sequence.handle] = (sequence, attempts)

    def watch(self, sequence: Sequence) -> None:
        """A claimed sequence above suspicion: suspects wait until it has gone on."""
        self.recovering[sequence.handle] = (sequence, sequence.num_decided_tokens)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self.suspects.pop(sequence.handle, None)
        self.begun.pop(sequence.handle, None)
        self.recovering.pop(sequence.handle, None)

    def step(self, add: Callable[[Sequence], None]) -> frozenset[int] | None:
        """Before each step: free who has gone on, and begin the next suspects by `add`. Returns the handles that alone may run; None: all."""
        for running in (self.recovering, self.begun):
            for handle in [handle for handle, (sequence, count) in running.items() if sequence.num_decided_tokens > count]:
                del running[handle]
        if self.suspects and not self.begun and not self.recovering:
            self._begin(add)
        return frozenset(self.begun) if self.begun else None

    def _begin(self, add: Callable[[Sequence], None]) -> None:
        """The suspects that were tried least, together if they never were."""
        fewest = min(attempts.num_begun for _, attempts in self.suspects.values())
        chosen = [handle for handle, (_, attempts) in self.suspects.items() if attempts.num_begun == fewest][: GROUP_SIZE if fewest == 0 else 1]
        taken = {handle: self.suspects.pop(handle) for handle in chosen}
        self._remember((sequence.request_id, Attempts(attempts.num_begun + 1, attempts.num_logged)) for sequence, attempts in taken.values())
        for handle, (sequence, _) in taken.items():
            self.begun[handle] = (sequence, sequence.num_decided_tokens)
            add(sequence)

    def _remember(self, records: Iterable[tuple[str, Attempts]]) -> None:
        packed = [(request_id, msgpack.packb([each.num_begun, each.num_logged])) for request_id, each in records]

        def fill(pipe: Pipeline) -> None:
            for request_id, record in packed:
                pipe.set(attempts_key(request_id), record, ex=LOG_TTL_S)

        self.transport.run(fill)
