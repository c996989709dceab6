"""Recorded steps: when a recording is used, and when it is dropped; and the buffers that they read.
No kernel runs here.
"""

import torch

from services.compute.backends.cuda.buffers import CudaBuffers
from services.compute.backends.cuda.graphs import Forward, Recordings, pad_to_bucket, recorded_sizes
from tests.kernels.backends import CPU


def test_buckets_are_few_and_pad_little() -> None:
    buckets = {pad_to_bucket(count) for count in range(1, 257)}
    assert sorted(buckets) == [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16)]
    assert all(count <= pad_to_bucket(count) < count + max(8, count) for count in range(1, 1000))


class Recorder:
    """Remembers what was recorded, and plays the memory that it saw."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, forward: Forward) -> Forward:
        self.num_recorded += 1

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            return forward()

        return replay


def test_a_recording_reads_what_the_buffers_hold_now() -> None:
    buffers, recorder = CudaBuffers(CPU), Recorder()
    recordings = Recordings(lambda: recorder)
    found = []
    for values in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        held = buffers.fill("numbers", values)
        buffers.upload()
        found.append(recordings.run(("three",), lambda held=held: 2 * held, lambda: buffers.generation).tolist())
    assert found == [[2, 4, 6], [8, 10, 12], [14, 16, 18]]
    assert (recorder.num_recorded, recorder.num_replayed) == (1, 2)


def test_recordings_are_dropped_when_memory_moves() -> None:
    buffers, recorder = CudaBuffers(CPU), Recorder()
    recordings = Recordings(lambda: recorder)

    def step(key: str, size: int) -> list[int]:
        held = buffers.take("x", (size,), torch.int64).fill_(size)
        return recordings.run(key, lambda: held + 1, lambda: buffers.generation).tolist()

    assert step("one", 1) == [2] and step("two", 1) == [2] and len(recordings) == 2
    assert step("one", 1) == [2] and recorder.num_replayed == 1
    assert step("large", 9) == [10] * 9 and len(recordings) == 1, "the others read memory that is gone"
    assert step("one", 1) == [2] and recorder.num_replayed == 1 and recorder.num_recorded == 4


def test_recordings_have_another_recorder_when_all_are_dropped() -> None:
    """A CUDA graph's pool of memory ends with the last graph in it, and can't be recorded into again."""
    buffers = CudaBuffers(CPU)
    recorders: list[Recorder] = []
    recordings = Recordings(lambda: recorders.append(Recorder()) or recorders[-1])  # type: ignore[func-returns-value]
    for size in (1, 1, 9, 9):
        held = buffers.take("x", (size,), torch.int64)
        recordings.run("step", lambda held=held: held + 1, lambda: buffers.generation)
    assert [(each.num_recorded, each.num_replayed) for each in recorders] == [(1, 1), (1, 1)]


def test_sizes_that_are_recorded_hold_every_step() -> None:
    assert recorded_sizes(1) == [*range(64, 7, -8), 4, 2, 1], "several rows of drafts have up to 64 tokens"
    assert len(recorded_sizes(256)) == 23 and recorded_sizes(100)[0] == 112
    assert {pad_to_bucket(count) for count in range(1, 301)} == set(recorded_sizes(300))


def test_a_place_that_was_reserved_does_not_move() -> None:
    """Nor do those that were reserved before more memory was needed: it is the same step that has all of them."""
    buffers = CudaBuffers(CPU)
    for name, count in (("first", 10), ("second", 100_000), ("third", 300_000)):
        buffers.reserve(name, count, torch.int32)
    generation = buffers.generation
    for count in (1, 10):
        held = [buffers.fill(name, list(range(count)), torch.int32) for name in ("first", "second", "third")]
        buffers.upload()
        assert all(each.tolist() == list(range(count)) for each in held) and buffers.generation == generation


def test_numbers_are_there_after_the_upload_in_one_piece_and_stay_where_they_are() -> None:
    buffers = CudaBuffers(CPU)
    first, second = buffers.fill("first", [1, 2, 3]), buffers.fill("second", [4])
    assert first.tolist() == [0, 0, 0]
    buffers.upload()
    assert (first.tolist(), second.tolist(), buffers.num_uploads) == ([1, 2, 3], [4], 1)
    places, generation = (first.data_ptr(), second.data_ptr()), buffers.generation
    assert (
        buffers.fill("first", [5]).data_ptr(),
        buffers.fill("second", [6, 7]).data_ptr(),
    ) == places and buffers.generation == generation
    buffers.upload()
    buffers.upload()
    assert buffers.num_uploads == 2, "nothing was filled"


def test_what_was_filled_before_the_buffers_grew_is_there_too() -> None:
    buffers = CudaBuffers(CPU)
    first = buffers.fill("first", [1, 2, 3])
    generation = buffers.generation
    large = buffers.fill("large", list(range(100_000)))
    buffers.upload()
    assert first.tolist() == [1, 2, 3] and large.tolist() == list(range(100_000)) and buffers.generation > generation


def test_a_step_recorded_while_the_buffers_grow_is_not_run_again_where_they_were() -> None:
    """A name filled before a step's largest makes all move is read where it was then, by that step's recording too."""
    buffers, recorder = CudaBuffers(CPU), Recorder()
    recordings = Recordings(lambda: recorder)
    found = []
    for number in range(1, 4):
        slots, tables = buffers.fill("slots", [number]), buffers.fill("tables", [10 * number] * 100_000)
        buffers.upload()
        found.append(
            recordings.run(
                "step", lambda slots=slots, tables=tables: slots + tables[:1], lambda: buffers.generation
            ).tolist()
        )
    assert found == [[11], [22], [33]]
    assert (recorder.num_recorded, recorder.num_replayed) == (2, 1), (
        "dropped once, when the first name had its new place"
    )
