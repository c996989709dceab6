"""Redis' memory against its limit, and what is done where it comes near: first room is made, then
batches pause, then new requests are refused.

What runs always goes on: the rest of the memory is for its tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Shares of maxmemory
CROWDED = 0.7  # token logs of ended requests go early
BATCHES_PAUSE = 0.75
NEARLY_FULL = 0.8  # gateways take no new requests


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes."""

    used: int  # as Redis compares it with the limit
    limit: int  # 0: none

    @property
    def share(self) -> float:
        return self.used / self.limit if self.limit else 0.0


def memory_of(info: Mapping[str, Any]) -> Memory:
    """Memory in use, from the reply to INFO memory. Buffers for replicas and for the append-only
    file do not count."""
    return Memory(
        int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0)), int(info.get("maxmemory", 0))
    )
