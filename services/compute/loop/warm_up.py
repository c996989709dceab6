"""Steps of every kind before a GPU's server is ready: so no request waits for a kernel's compilation, and a
step that can't run there ends this server at its start, not one server after the other with the first
requests.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from services.compute.backends.cuda.graphs import MAX_TOKENS, recorded_sizes
from services.compute.candidates.reduction import reduce
from services.compute.execution.model_runner import ModelRunner
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.model.sampling_params import SamplingParams
from shared.process.errors import StartupError

# tokens of a step whose results are searched
SINGLES = (1, 17, 65)
CHUNK = 70  # tokens, in a step with a single one
DRAWS = (
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, top_p=0.9, logprobs=2),
    SamplingParams(max_tokens=1, top_k=256),
)


def warm_up(runner: ModelRunner, max_num_seqs: int) -> None:
    """Run these steps, of up to max_num_seqs sequences. They write into blocks that no sequence holds
    yet."""
    record_steps(runner, max_num_seqs)
    runner.kv_cache.copy_blocks(((0, 0),))
    longest = min(CHUNK, runner.kv_cache.num_blocks * runner.kv_cache.block_size)
    for lens in (*([1] * count for count in SINGLES if count <= max_num_seqs), [1, longest]):
        batch = make_step(runner, lens)
        hidden = runner.run(batch)
        for params in DRAWS:
            sequences = [
                Sequence(Request(row.handle, "", params), Tokens(list(row.token_ids), row.num_tokens))
                for row in batch.rows
            ]
            reduce(runner.logits(batch, hidden), sequences, runner.row_search)
    if runner.model.takes_segments:
        runner.run(make_step(runner, [1, longest], has_holes=True))


def record_steps(runner: ModelRunner, max_num_seqs: int) -> None:
    """Run a step of every size that is recorded, of up to max_num_seqs sequences."""
    for size in recorded_sizes(max_num_seqs):
        lens = [1] * min(size, max(max_num_seqs, MAX_TOKENS))
        for has_holes in (False, True) if runner.model.takes_segments else (False,):
            runner.run(make_step(runner, lens, has_holes=has_holes))


def make_step(runner: ModelRunner, lens: list[int], *, has_holes: bool = False) -> ScheduledBatch:
    """A step of sequences of these lengths, in tokens; their handles are none of the scheduler's."""
    table = tuple(range(min(runner.kv_cache.num_blocks, CHUNK)))
    block_lens = (runner.kv_cache.block_size,) * len(table) if has_holes else ()
    rows = tuple(
        BatchRow(handle, (0,) * length, 0, table, range(length - 1, length), block_lens=block_lens)
        for handle, length in enumerate(lens, -len(lens))
    )
    return ScheduledBatch(rows, lens.count(1))


def check_numbers(runner: ModelRunner, name: str) -> None:
    """Run one token. Raises StartupError where that gives no numbers: a NaN in the weights would
    fail each request by itself.
    """
    draws = runner.model.splits_prompts  # an encoder has no logits
    batch = ScheduledBatch((BatchRow(-1, (0,), 0, (0,), range(draws), pooled=range(not draws)),), int(draws))
    hidden = runner.run(batch)
    numbers = runner.logits(batch, hidden) if draws else runner.pooled_states(batch, hidden)
    if not bool(torch.isfinite(numbers.amax())):  # of a row with a NaN, that is the largest
        raise StartupError(
            f"{name}: its results are NaN or infinite: its weights are, or this dtype can't hold its activations; try "
            "another --dtype"
        )


@contextmanager
def first_kernels(device: torch.device) -> Iterator[None]:
    """Raise StartupError on a GPU, in one line, for any error of the compiler, of the driver or of a
    kernel."""
    try:
        yield
    except (StartupError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if device.type != "cuda":
            raise
        raise StartupError(
            f"--device cuda: this GPU can't run a step: {' '.join(str(error).split()) or repr(error)}"
        ) from error
