"""How much has a process grown? From samples of its memory, without the time it takes to warm up."""

from dataclasses import dataclass, field
from statistics import median

WARM_UP = 0.25  # the share of a process's samples that are its warm-up
FEWEST = 8  # samples, below which nothing is said


@dataclass(slots=True)
class Growth:
    """The samples of a run, in MiB, in the order of time, by process: `stage pid`."""

    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, mib: dict[str, float]) -> None:
        for process, size in mib.items():
            self.samples.setdefault(process, []).append(size)

    def by_stage(self) -> dict[str, float]:
        """The most that any process of each stage grew, for the stages with a process that lived
        long enough to tell.
        """
        found: dict[str, float] = {}
        for process, samples in self.samples.items():
            if len(samples) >= FEWEST:
                stage = process.split()[0]
                found[stage] = max(found.get(stage, -1e9), grown(samples))
        return found


def grown(samples: list[float]) -> float:
    """MiB by which the last quarter lies above the quarter after the warm-up, by their medians: one
    sample says nothing.
    """
    steady = samples[int(len(samples) * WARM_UP) :]
    part = max(1, len(steady) // 4)
    return median(steady[-part:]) - median(steady[:part])
