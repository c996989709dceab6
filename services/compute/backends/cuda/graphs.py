"""Steps that are recorded once and run again: what the host says to a GPU for a step of single tokens is one call, however many kernels it has.

A recording reads and writes the memory that it saw. So a step is padded to one of a few sizes, all that it reads lies in the backend's buffers, and
recordings are dropped when one of these has moved.
"""

from collections.abc import Callable, Hashable

import torch

Tensor = torch.Tensor

Forward = Callable[[], Tensor]
Record = Callable[[Forward], Forward]


def pad_to_bucket(count: int) -> int:
    """1, 2, 4, 8, then the next multiple of 8, of 16 from 64 on, of 32 from 256 on: few sizes, and little padding."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    unit = 8 if count <= 64 else 16 if count <= 256 else 32
    return -(-count // unit) * unit


def cuda_recorder() -> Record:
    """Records into CUDA graphs. They share one pool of memory: of what each leaves there, only the last one's result is read."""
    pool = torch.cuda.graph_pool_handle()

    def record(forward: Forward) -> Forward:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = forward()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return record


def run_again(forward: Forward) -> Forward:
    """Where nothing records: the same call on the same memory, as a recording would do it."""
    return forward


class Recordings:
    """Recorded steps, by what their shape depends on."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._held: dict[Hashable, Forward] = {}
        self._generation = -1

    def run(self, key: Hashable, forward: Forward, generation: Callable[[], int]) -> Tensor:
        """The result of `forward`, or of its recording under this key. generation: which changes when memory that it reads has moved."""
        if generation() == self._generation and (replay := self._held.get(key)) is not None:
            return replay()
        result = forward()  # compiles what it needs, and may take more memory; a recording can't
        if generation() != self._generation:
            self._held.clear()
        self._generation = generation()
        self._held[key] = self.record(forward)
        return result

    def __len__(self) -> int:
        return len(self._held)
