"""WaitingQueue: the sequences that have no place yet, and which of them is next."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator

from services.compute.sequence import Sequence

Entry = tuple[float, int, Sequence]  # rank, handle: no two are equal


class WaitingQueue:
    """A heap for each tenant and priority. A removed sequence stays in its heap until it comes to the
    top."""

    def __init__(self) -> None:
        self._heaps: dict[tuple[str, int], list[Entry]] = {}
        self._by_handle: dict[int, Sequence] = {}
        self._num_with_deadline = 0
        self.num_tokens: Counter[str] = Counter()  # of all waiting sequences, by tenant

    def __len__(self) -> int:
        return len(self._by_handle)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in no particular order."""
        return iter(self._by_handle.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.handle in self._by_handle

    def push(self, sequence: Sequence) -> None:
        self._by_handle[sequence.handle] = sequence
        sequence.num_queued_tokens = len(sequence.tokens)
        self.num_tokens[sequence.request.tenant_id] += sequence.num_queued_tokens
        self._num_with_deadline += sequence.request.deadline is not None
        heap = self._heaps.setdefault((sequence.request.tenant_id, sequence.request.priority), [])
        heapq.heappush(heap, (sequence.rank, sequence.handle, sequence))

    def head(self, handicap: Callable[[str], float], but: frozenset[int] = frozenset()) -> Sequence | None:
        """The next sequence, of all but some handles.

        The smallest rank decides which priorities compete: its own, and those that are more urgent. Among
        these, a tenant's handicap is added to the rank.
        """
        tops = [top for key in list(self._heaps) if (top := self._top(key, but)) is not None]
        if not tops:
            return None
        priority = min(tops)[2].request.priority
        competing = [entry for entry in tops if entry[2].request.priority <= priority]
        return min(
            (rank + handicap(sequence.request.tenant_id), handle, sequence) for rank, handle, sequence in competing
        )[2]

    def head_of(self, handles: frozenset[int]) -> Sequence | None:
        """The smallest rank among some handles."""
        waiting = [self._by_handle[handle] for handle in handles if handle in self._by_handle]
        return min(waiting, key=lambda sequence: (sequence.rank, sequence.handle), default=None)

    def remove(self, sequence: Sequence) -> None:
        del self._by_handle[sequence.handle]
        self._num_with_deadline -= sequence.request.deadline is not None
        self.num_tokens[sequence.request.tenant_id] -= sequence.num_queued_tokens
        if not self.num_tokens[sequence.request.tenant_id]:
            del self.num_tokens[sequence.request.tenant_id]
        heap = self._heaps[sequence.request.tenant_id, sequence.request.priority]
        if heap[0][2] is sequence:
            heapq.heappop(heap)

    def expired(self, now: float) -> list[Sequence]:
        """Sequences that have not begun, and whose deadline has passed."""
        if not self._num_with_deadline:
            return []
        return [
            sequence
            for sequence in self
            if sequence.request.deadline is not None and sequence.request.deadline <= now and not sequence.has_begun
        ]

    def _top(self, key: tuple[str, int], but: frozenset[int]) -> Entry | None:
        """The smallest rank of a heap, without the removed sequences and some handles."""
        heap, passed = self._heaps[key], []
        while heap and (heap[0][1] not in self._by_handle or heap[0][1] in but):
            entry = heapq.heappop(heap)
            if entry[1] in self._by_handle:
                passed.append(entry)
        top = heap[0] if heap else None
        for entry in passed:
            heapq.heappush(heap, entry)
        if not heap:
            del self._heaps[key]
        return top
