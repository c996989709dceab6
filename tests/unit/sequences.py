"""A small scheduler and its sequences, as the tests need them."""

from typing import Any

from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Request, Sequence, TokenFrequencies, Tokens
from services.compute.sequence.batch import ScheduledBatch
from shared.model.sampling_params import SamplingParams

NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS, MAX_TOKENS = 24, 4, 5, 12


def make_scheduler(
    strategy: str = "predicted",
    *,
    blocks: BlockManager | None = None,
    num_blocks: int = NUM_BLOCKS,
    kind: type[Scheduler] = Scheduler,
    **limits: Any,
) -> Scheduler:
    blocks = blocks or BlockManager(num_blocks, BLOCK_SIZE)
    return kind(
        blocks,
        make_admission(strategy, blocks),
        **{"max_num_seqs": MAX_SEQS, "max_batched_tokens": MAX_TOKENS, **limits},
    )


def make_sequence(
    handle: int, prompt: list[int], max_tokens: int, *, prompt_logprobs: int | None = None, **fields: Any
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    return Sequence(Request(handle, str(handle), params, **fields), Tokens(list(prompt)))


def handles_of(batch: ScheduledBatch) -> list[int]:
    """The sequences that get a token from this step."""
    return [key.handle for key in batch.sampled]


def counted(counts: TokenFrequencies) -> dict[int, float]:
    """How often each token is there."""
    assert len({*counts.token_ids.tolist()}) == len(counts.token_ids) == len(counts.times)
    return dict(zip(counts.token_ids.tolist(), counts.times.tolist(), strict=True))
