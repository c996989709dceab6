"""The longest pause of a stream by fault: how long a reader waited while it lasted, or after it."""

from dataclasses import dataclass, field

SHORTEST_S = 1.0  # below this it is no pause
AFTERMATH_S = (
    5.0  # after a fault has ended, a pause that begins is still its own: a lease runs out, a process starts again
)
LATE_S = 60.0  # so long after the last fault, a pause for which nothing else can be blamed is called its own
NO_FAULT = "no fault"


@dataclass(slots=True)
class Span:
    """A fault, from its beginning to its end; None while it lasts."""

    name: str
    began: float
    ended: float | None = None

    def touches(self, since: float, until: float) -> bool:
        return self.began <= until and (self.ended is None or self.ended + AFTERMATH_S >= since)


@dataclass(slots=True)
class Longest:
    """Pauses of one kind of fault, in s."""

    pause_s: float = 0.0
    alone_s: float = 0.0  # while no other kind of fault lasted
    outlasting_s: float = 0.0  # from the end of the last fault that touched the pause to the pause's end


@dataclass(slots=True)
class Pauses:
    """The faults and pauses of a run. Times are the history's."""

    spans: dict[int, Span] = field(default_factory=dict)  # by the fault's number
    longest: dict[str, Longest] = field(default_factory=dict)  # by the fault's name

    def begin(self, number: int, name: str, at: float) -> None:
        self.spans[number] = Span(name, at)

    def end(self, number: int, at: float) -> None:
        self.spans[number].ended = at

    def add(self, since: float, until: float) -> float:
        """A stream was silent from since to until. Returns how long it stayed silent after the last
        fault had ended.
        """
        if until - since < SHORTEST_S:
            return 0.0
        touching = [span for span in self.spans.values() if span.touches(since, until)]
        if not touching and (
            ended := [
                span for span in self.spans.values() if span.ended is not None and since - LATE_S <= span.ended <= since
            ]
        ):
            touching = [max(ended, key=lambda span: span.ended or 0.0)]
        ends = [until if span.ended is None else min(span.ended, until) for span in touching]
        outlasting_s = until - max([since, *ends])
        names = {span.name for span in touching} or {NO_FAULT}
        for name in names:
            longest = self.longest.setdefault(name, Longest())
            longest.pause_s = max(longest.pause_s, until - since)
            longest.outlasting_s = max(longest.outlasting_s, outlasting_s)
            if len(names) == 1:
                longest.alone_s = max(longest.alone_s, until - since)
        return outlasting_s

    def table(self, counts: dict[str, int]) -> str:
        """A line for each kind of fault, with how often it was drawn."""
        lines = [f"{'fault':28}{'drawn':>6}{'longest pause, s':>18}{'alone':>8}{'after its end':>15}"]
        for name in sorted({*counts, *self.longest}):
            longest = self.longest.get(name, Longest())
            lines.append(
                f"{name:28}{counts.get(name, 0):>6}{longest.pause_s:>18.1f}{longest.alone_s:>8.1f}{longest.outlasting_s:>15.1f}"  # noqa: E501
            )
        return "\n".join(lines)
