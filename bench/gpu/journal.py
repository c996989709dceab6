"""The journal of a run, on disk as it comes: a run that is killed leaves what it had, and the next
one goes on from there.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.gpu.check import Check
from bench.gpu.models import FlightCheck, ModelCheck
from bench.gpu.recordings import RecordingCheck
from bench.gpu.speed import Ceilings, KernelTime, Served, StepTime
from shared.process.errors import StartupError

Found = Check | ModelCheck | FlightCheck | RecordingCheck | Ceilings | KernelTime | StepTime | Served
KINDS: dict[str, type[Found]] = {
    each.__name__: each
    for each in (Check, ModelCheck, FlightCheck, RecordingCheck, Ceilings, KernelTime, StepTime, Served)
}
DID_NOT_END = "it did not end: its process died, or was killed"


def replace_text(path: Path, text: str) -> None:
    """So that whoever reads it finds the one or the other."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    os.replace(new, path)


@dataclass(slots=True)
class Entry:
    """A case that was begun."""

    part: str
    name: str
    run: str  # in which
    limit_s: float  # in which it should end
    seconds: float = 0.0
    error: str = DID_NOT_END  # empty: none
    holds: bool = False
    found: list[tuple[str, dict[str, Any]]] | None = None  # of KINDS, by their names


class Journal:
    """A file of JSON, whole at all times."""

    def __init__(self, path: Path, on: dict[str, str], run: str) -> None:
        """on: device and versions; run: of this start of the benchmark, however many processes it
        takes. Raises StartupError where the file is of others.
        """
        self.path = path
        self.on = on
        self.run = run
        self.entries: dict[str, Entry] = {}
        if path.exists():
            try:
                held = json.loads(path.read_text())
                known, entries = held["on"], [Entry(**each) for each in held["cases"]]
            except (ValueError, KeyError, TypeError) as error:
                raise StartupError(f"{path} is no file of this benchmark ({error!r}): choose another --out") from None
            if known != on:
                raise StartupError(
                    f"{path} is of {' '.join(known.values())}, this is {' '.join(on.values())}: choose another --out"
                )
            self.entries = {each.name: each for each in entries}

    def is_settled(self, name: str) -> bool:
        """Whether it has held, or has been begun in this run: what has failed before is tried again, once."""
        entry = self.entries.get(name)
        return entry is not None and (entry.holds or entry.run == self.run)

    def begin(self, part: str, name: str, limit_s: float) -> None:
        self.entries.pop(name, None)  # the last begun is the last
        self.entries[name] = Entry(part, name, self.run, limit_s)
        self.write()

    def note(self, name: str, began_at: float, found: list[Found]) -> None:
        """The lines before the end."""
        entry = self.entries[name]
        entry.seconds = round(time.perf_counter() - began_at, 2)
        entry.found = [(type(each).__name__, asdict(each)) for each in found]
        self.write()

    def end(self, name: str, began_at: float, found: list[Found], error: str = "") -> Entry:
        """began_at: perf_counter, s."""
        self.note(name, began_at, found)
        entry = self.entries[name]
        entry.error, entry.holds = error, not error and all(getattr(each, "holds", True) for each in found)
        self.write()
        return entry

    def of_kind(self, kind: type[Any]) -> Iterator[Any]:
        """The results of one kind."""
        for entry in self.entries.values():
            yield from (kind(**fields) for name, fields in entry.found or () if KINDS[name] is kind)

    def of_this_run(self) -> list[Entry]:
        return [each for each in self.entries.values() if each.run == self.run]

    def write(self) -> None:
        replace_text(
            self.path,
            json.dumps({"on": self.on, "cases": [asdict(each) for each in self.entries.values()]}, indent=1) + "\n",
        )
