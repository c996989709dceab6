"""A run's history: requests, events and faults, each with its time. One JSON object a line.

Every record has `t`, in seconds since the run began, and `is`, its kind:

    run       seed, arguments, most_pause_s (or null), most_growth_mib by stage
    request   id, name, kind, path, body, stream, expects, continues
    send      id, to, after: a connection to a gateway. after: the event id behind which it goes on,
              or null: from the beginning
    reply     id, status, why: the head of the answer. why: the error's words
    event     id, event_id, data: a server-sent event as it came, with its JSON decoded
    body      id, data: a whole answer
    break     id, why: the connection ended before the answer did, and the client goes on
    drop      id, why: the client itself closed the connection
    end       id, how, why. how: done, error, lost (the client gave up), left (it went away),
              taken over, hung, ended (where no text was expected)
    round     number, at (begin, healed, over), may_lose: a fault of it may lose acknowledged data
    fault     number, name, at (begin, end), says
    memory    mib: resident memory by process (`stage pid`), with its helpers'
    finding   says: something else that was wrong, such as keys left in Redis

A request's name stands for one body: its first whole answer is the reference for the others.
`expects` is text (the reference's), refusal (4xx), clear end (no internal error) or end (any).
`continues` is the id of the request whose stream it takes over.

`python -m tests.chaos.check FILE` reads a history and judges it again.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tests.chaos.judge import Judge, Request
from tests.chaos.tally import Journal, Outcome


@dataclass(slots=True)
class History:
    """Writes the records of a run, and has them judged as they are written. Close it."""

    path: Path
    judge: Judge = field(default_factory=Judge)
    num_requests: int = 0
    num_faults: int = 0
    _started_at: float = field(default_factory=time.monotonic)
    _file: TextIO = field(init=False)

    def __post_init__(self) -> None:
        self._file = self.path.open("w")

    def write(self, what: str, **fields: Any) -> Outcome | None:
        """One record. Returns the judge's outcome, if it ends a request."""
        record = {"t": round(time.monotonic() - self._started_at, 4), "is": what, **fields}
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        if what == "round":
            self._file.flush()  # of a run that is killed, the rounds before are there
        return self.judge.take(record)

    def ask(
        self,
        name: str,
        kind: str,
        path: str,
        body: Any,
        *,
        is_stream: bool,
        expects: str = "text",
        continues: "Asked | None" = None,
    ) -> "Asked":
        """A request begins."""
        self.num_requests += 1
        before = None if continues is None else continues.number
        self.write(
            "request",
            id=self.num_requests,
            name=name,
            kind=kind,
            path=path,
            body=body,
            stream=is_stream,
            expects=expects,
            continues=before,
        )
        return Asked(self, self.num_requests, self.judge.requests[self.num_requests])

    def find(self, what: str) -> None:
        """Something is wrong that no request shows."""
        self.write("finding", says=what)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's place in the history."""

    history: History
    number: int
    request: Request

    @property
    def journal(self) -> Journal:
        return self.request.journal

    def note(self, what: str, **fields: Any) -> None:
        self.history.write(what, id=self.number, **fields)

    def end(self, how: str, why: str = "") -> Outcome | None:
        """How it ended, as its client sees it. Returns the judge's outcome; None if it had ended
        before.
        """
        return self.history.write("end", id=self.number, how=how, why=why)
