"""A server's recordings: all are there before the first request, none is dropped, they fit into the
memory that was set aside for them, and they compute the bits of steps that are launched kernel by
kernel."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from bench.gpu.models import LoadedModel
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.stack import CudaStack
from services.compute.loop.warm_up import record_steps
from services.compute.sequence.batch import BatchRow, ScheduledBatch

NUM_BLOCKS = 1024  # of the cache
MARGIN = 1.25  # of the memory set aside, in which the KV cache's share leaves room


@dataclass(frozen=True, slots=True)
class RecordingCheck:
    mode: str
    num_recordings: int
    seconds: float  # that they took
    reserved_mib: float
    taken_mib: float  # 0 without a GPU
    num_late: int  # that were made while it served
    has_moved: bool  # a buffer that they read
    are_bits_equal: bool

    @property
    def holds(self) -> bool:
        return (
            self.are_bits_equal
            and not self.num_late
            and not self.has_moved
            and self.taken_mib <= MARGIN * self.reserved_mib + 1
        )


def steps(max_num_seqs: int, max_batched_tokens: int, longest: int) -> Iterator[ScheduledBatch]:
    """A step of single tokens of each number of sequences, with the longest context among them, and
    tables that are new; then one with a chunk. The first blocks are those that single tokens are
    written to: each sequence has its own."""
    num_read = NUM_BLOCKS - max_num_seqs
    for count in range(1, max_num_seqs + 1):
        rows = []
        for handle in range(count):
            place = longest - 1 if handle == count - 1 else (37 * handle + 11 * count) % min(longest, 500)
            table = tuple(max_num_seqs + (5 * handle + count + number) % num_read for number in range(place // 16))
            rows.append(BatchRow(handle, (5 + handle,), place, (*table, handle), range(1)))
        yield ScheduledBatch(tuple(rows), count)
    length = min(max_batched_tokens, longest)
    yield ScheduledBatch((BatchRow(0, (5,) * length, 0, tuple(range(-(-length // 16))), range(length - 1, length)),), 0)


def check_recordings(
    folder: Path, backend: CudaBackend, *, max_num_seqs: int, max_batched_tokens: int, longest: int
) -> RecordingCheck:
    """folder: a model's; longest: tokens of a sequence."""
    model = LoadedModel(folder, backend)
    reserved = model.model.workspace(max_batched_tokens, max_num_seqs, longest).own
    runner, stack = model.make_runner(NUM_BLOCKS), model.model.stack
    assert isinstance(stack, CudaStack)
    for kv in runner.kv_cache.layers:
        kv.normal_(generator=torch.Generator(kv.device).manual_seed(1))
    began, free = time.perf_counter(), free_bytes(backend)
    record_steps(runner, max_num_seqs)
    taken, seconds = free - free_bytes(backend), time.perf_counter() - began
    count, generation, is_equal = len(stack.recordings), backend.buffers.generation, True
    for batch in steps(max_num_seqs, max_batched_tokens, longest):
        found = runner.run(batch).clone()
        prepared, plan = runner.prepare(batch)
        is_equal &= torch.equal(
            found, model.model.forward(prepared, replace(plan, is_recordable=False), runner.kv_cache.layers)
        )
    late, has_moved = len(stack.recordings) - count, backend.buffers.generation != generation
    mode = str(backend.dtype).removeprefix("torch.")
    return RecordingCheck(mode, count, seconds, reserved / (1 << 20), taken / (1 << 20), late, has_moved, is_equal)


def free_bytes(backend: CudaBackend) -> int:
    return int(torch.cuda.mem_get_info(backend.device)[0]) if backend.device.type == "cuda" else 0
