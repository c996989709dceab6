"""The tally of a run: how each request ended, what was wrong, and the figures of the table at the end."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

# answered: with its known text. excused: one clear error that this round's faults explain. ended:
# one end, and no text was promised. left: the client went away. All others are wrong. cancelled: by
# us, while its client read, or meant to. paused: silent for too long, with no fault to explain it.
Kind = Literal[
    "answered",
    "excused",
    "ended",
    "left",
    "error",
    "lost",
    "hung",
    "doubled",
    "missing",
    "different",
    "cancelled",
    "paused",
]
FINE = ("answered", "excused", "ended", "left")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, as its client saw it."""

    kind: Kind
    message: str = ""


@dataclass(slots=True)
class Journal:
    """A client's steps for one request, line by line: what one wants to read when it has hung."""

    name: str
    started_at: float  # as all times here, of the history
    response_ids: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def note(self, at: float, line: str) -> None:
        self.lines.append(f"{at - self.started_at:7.2f} s  {line}")

    def text(self) -> str:
        shown = self.lines if len(self.lines) <= 40 else [*self.lines[:10], "   …", *self.lines[-28:]]
        return "\n".join(f"    {line}" for line in [*self.response_ids, *shown])


@dataclass(slots=True)
class Tally:
    """The figures of a run."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (kind of request, outcome)
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # by message: those that ended a request, excused or not
    wrong: list[str] = field(default_factory=list)  # every finding, in words
    num_retries: int = 0
    num_resumes: int = 0
    longest_pause_s: float = 0.0
    rss_growth_mib: dict[str, float] = field(default_factory=dict)  # by stage, the most that any of its processes grew

    def end(self, request_kind: str, outcome: Outcome, journal: Journal) -> None:
        self.outcomes[request_kind, outcome.kind] += 1
        if outcome.message and outcome.kind in ("error", "excused", "lost", "ended", "cancelled", "paused"):
            self.errors[f"{outcome.kind}: {outcome.message[:100]}"] += 1
        if outcome.kind not in FINE:
            self.find(f"{outcome.kind}: {request_kind}, {journal.name}: {outcome.message}\n{journal.text()}")

    def find(self, finding: str) -> None:
        """Something is wrong."""
        self.wrong.append(finding)
        print(f"WRONG  {finding}", flush=True)

    def total(self, *kinds: str) -> int:
        return sum(count for (_, outcome), count in self.outcomes.items() if outcome in kinds)

    def table(self) -> str:
        """Requests by kind, faults by name, errors by message."""
        shown = [kind for kind in Kind.__args__ if self.total(kind)]  # type: ignore[attr-defined]
        lines = [f"{'requests':20}" + "".join(f"{kind:>11}" for kind in shown)]
        for name in sorted({name for name, _ in self.outcomes}):
            lines.append(f"{name:20}" + "".join(f"{self.outcomes[name, kind] or '':>11}" for kind in shown))
        lines.append(f"{'all':20}" + "".join(f"{self.total(kind):>11}" for kind in shown))
        lines += [
            "",
            "faults              " + ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items())),
        ]
        lines += [f"{count:5} x  {message}" for message, count in self.errors.most_common(20)]
        growth = ", ".join(f"{stage} {mib:+.0f} MiB" for stage, mib in sorted(self.rss_growth_mib.items()))
        lines += [
            "",
            f"{self.num_retries} sent again, {self.num_resumes} resumed; longest pause of a stream "
            f"{self.longest_pause_s:.1f} s",
            f"memory of processes that lived long enough to tell: {growth or 'there was none'}",
        ]
        return "\n".join(lines)

    def document(self, **more: Any) -> str:
        """The run in one line of JSON."""
        counts = {kind: self.total(kind) for kind in Kind.__args__}  # type: ignore[attr-defined]
        fields = {
            "ok": not self.wrong,
            **more,
            "requests": counts,
            "faults": dict(self.faults),
            "errors": dict(self.errors),
            "num_wrong": len(self.wrong),
            "num_retries": self.num_retries,
            "num_resumes": self.num_resumes,
            "longest_pause_s": round(self.longest_pause_s, 2),
            "rss_growth_mib": {stage: round(mib, 1) for stage, mib in self.rss_growth_mib.items()},
        }
        return json.dumps(fields)
