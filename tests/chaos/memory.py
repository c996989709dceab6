"""How much have the processes grown? Resident memory, of each process that lived from one round's end to another's."""

from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.cluster import Cluster

MIB = 1 << 20


@dataclass(slots=True)
class Memory:
    """The first figure of each process, after a round: it has loaded what it loads."""

    first: dict[int, float] = field(default_factory=dict)  # MiB by pid

    def grown(self, cluster: Cluster) -> dict[str, float]:
        """By stage, by how many MiB that process of it grew which grew most."""
        growth: dict[str, float] = {}
        for slot in cluster.slots:
            if slot.process is None or (size := resident_mib(slot.process.pid)) is None:
                continue
            if slot.process.pid in self.first:
                growth[slot.stage] = max(growth.get(slot.stage, -1e9), size - self.first[slot.process.pid])
            self.first.setdefault(slot.process.pid, size)
        return growth


def resident_mib(pid: int) -> float | None:
    """None for a process that is gone, or where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    line = next((line for line in fields.splitlines() if line.startswith("VmRSS:")), None)
    return int(line.split()[1]) * 1024 / MIB if line else None
