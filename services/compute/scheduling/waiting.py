"""WaitingQueue: the sequences that have no place yet, by rank."""

import heapq
from collections.abc import Iterator

from services.compute.sequence import Sequence


class WaitingQueue:
    """A heap with removal: what was removed stays in the heap until it comes to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._by_handle: dict[int, Sequence] = {}
        self._num_with_deadline = 0

    def __len__(self) -> int:
        return len(self._by_handle)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._by_handle.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.handle in self._by_handle

    def push(self, sequence: Sequence) -> None:
        self._by_handle[sequence.handle] = sequence
        self._num_with_deadline += sequence.deadline is not None
        heapq.heappush(self._heap, (sequence.rank, sequence.handle, sequence))

    def head(self, among: frozenset[int] | None = None) -> Sequence | None:
        """The one whose turn it is, of all or of some handles."""
        if among is not None:
            return min((self._by_handle[each] for each in among if each in self._by_handle), key=lambda each: (each.rank, each.handle), default=None)
        if not self._by_handle:
            return None
        while self._heap[0][1] not in self._by_handle:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def remove(self, sequence: Sequence) -> None:
        del self._by_handle[sequence.handle]
        self._num_with_deadline -= sequence.deadline is not None
        if self._heap[0][2] is sequence:
            heapq.heappop(self._heap)

    def expired(self, now: float) -> list[Sequence]:
        """Those that have not begun, and whose deadline is over."""
        if not self._num_with_deadline:
            return []
        return [sequence for sequence in self if sequence.deadline is not None and sequence.deadline <= now and not sequence.has_begun]
