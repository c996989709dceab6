"""A model's view of a text: the probabilities of its next tokens, and its perplexity."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from services.compute.cache.kv_cache import KVCache
from services.compute.models.decoder import Decoder, ForwardBatch

BLOCK_SIZE = 16


def whole_windows(windows: Tensor) -> ForwardBatch:
    """A step that computes each of some windows [n, length] from its first token to its last, all
    of them sampled, in blocks from 0 on."""
    count, length = windows.shape
    blocks = blocks_of(windows) // count
    positions = torch.arange(length)
    return ForwardBatch(
        input_ids=windows.flatten(),
        positions=positions.repeat(count),
        slot_mapping=(torch.arange(count)[:, None] * blocks * BLOCK_SIZE + positions).flatten(),
        query_lens=[length] * count,
        context_lens=[length] * count,
        block_tables=[tuple(range(number * blocks, (number + 1) * blocks)) for number in range(count)],
        logit_rows=torch.arange(count * length),
    )


def blocks_of(windows: Tensor) -> int:
    """How many blocks of the cache whole_windows takes."""
    return len(windows) * -(-windows.shape[1] // BLOCK_SIZE)


def next_token_logs(model: Decoder, windows: Tensor, *, kv_group: int = 0) -> Iterator[Tensor]:
    """The log probabilities of each window [length] after each token but the last: [length - 1,
    vocab] float32.

    kv_group: dimensions that share a scale in a cache of int8; 0: a cache of the model's dtype.
    """
    cache = KVCache(
        model.config, model.backend, num_blocks=blocks_of(windows[:1]), block_size=BLOCK_SIZE, group=kv_group
    )
    for window in windows:
        batch = whole_windows(window[None])
        yield model.logits(
            model.forward(batch, model.plan(batch, BLOCK_SIZE), cache.layers), batch.logit_rows[:-1]
        ).log_softmax(-1)


def perplexity(model: Decoder, windows: Tensor) -> float:
    """Perplexity of each window's tokens but the first, given those before it in the window.
    windows: [n, length] int64."""
    total = 0.0
    for window, logs in zip(windows, next_token_logs(model, windows), strict=True):
        total -= float(logs.gather(-1, window[1:, None]).sum())
    return math.exp(total / windows[:, 1:].numel())
