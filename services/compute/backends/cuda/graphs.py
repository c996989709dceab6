"""Steps that are recorded once and run again: what the host says to a GPU for a step without chunks
of prompts is one call, however many kernels it has.

A recording reads and writes the memory that it saw. So a step is padded to one of a few sizes, and
all that it reads lies in the backend's buffers. These have room for every step that a server
schedules, so a server makes all recordings before it is ready, and keeps them. Should a buffer move,
all are dropped.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

Forward = Callable[[], Tensor]
Record = Callable[[Forward], Forward]

# of a step that is recorded: a row's tokens (the last one and its drafts), and where a row has
# several, all rows' together
LONGEST_ROW, MAX_TOKENS = 17, 64


def pad_to_bucket(count: int) -> int:
    """1, 2, 4, 8, then the next multiple of 8, of 16 from 64 on, of 32 from 256 on: few sizes, and
    little padding."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    unit = 8 if count <= 64 else 16 if count <= 256 else 32
    return -(-count // unit) * unit


def recorded_sizes(max_num_seqs: int) -> list[int]:
    """The tokens of all steps that are recorded, padding included, the most first: the memory in
    which one works is then enough for the next."""
    return sorted({pad_to_bucket(count) for count in range(1, max(max_num_seqs, MAX_TOKENS) + 1)}, reverse=True)


def cuda_recorder() -> Record:
    """Records into CUDA graphs. They share one pool of memory: of what each leaves there, only the
    last one's result is read. When all of them are dropped the pool goes with them, and torch takes
    none that has gone: the next ones need another recorder. It waits for the device, where one of
    those that are dropped then may still run."""
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle()

    def record(forward: Forward) -> Forward:
        # a recording that is dropped after this one is made no longer runs
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = forward()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return record


def run_again(forward: Forward) -> Forward:
    """Run the call where nothing records: the same call on the same memory, as a recording would do
    it."""
    return forward


class Recordings:
    """Recorded steps, by what their shape depends on."""

    def __init__(self, make_recorder: Callable[[], Record]) -> None:
        """make_recorder: called at first, and whenever all recordings have been dropped."""
        self.make_recorder = make_recorder
        self.record = make_recorder()
        self._held: dict[Hashable, Forward] = {}
        self._generation = -1

    def run(self, key: Hashable, forward: Forward, generation: Callable[[], int]) -> Tensor:
        """The result of `forward`, or of its recording under this key. generation: which changes
        when memory that it reads has moved."""
        if generation() == self._generation and (replay := self._held.get(key)) is not None:
            return replay()
        result = forward()  # compiles what it needs, and may take more memory; a recording can't
        if generation() != self._generation and self._held:
            self.record = self.make_recorder()
            self._held.clear()
        self._generation = generation()
        self._held[key] = self.record(forward)
        return result

    def __len__(self) -> int:
        return len(self._held)
