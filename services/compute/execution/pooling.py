"""Embeddings: of a prompt's last hidden states, one vector.

A sequence's hidden states come chunk by chunk, as its prompt is computed, and are added up token by
token in float64: the sum is the same in any chunks, and in any company.
"""

from collections.abc import Callable

import numpy as np

from services.compute.sequence import Sequence
from services.compute.sequence.batch import ScheduledBatch
from shared.model.arrays import Array

NOT_FINITE = "the model's numbers for this input are not finite"


def pool(
    states: Array, batch: ScheduledBatch, get: Callable[[int], Sequence]
) -> tuple[dict[int, Array], dict[int, str]]:
    """Take in a step's hidden states, for the sequences that `get` finds by handle.

    states: [R, hidden] float32 of the batch's pooled tokens, in their order. Returns by handle the
    embeddings [dimensions] float32 that are whole now, and which have failed, and why.
    """
    embeddings: dict[int, Array] = {}
    failures: dict[int, str] = {}
    at = 0
    for row in batch.embedded:
        sequence = get(row.handle)
        if row.num_computed_tokens == 0:
            sequence.pooled = None  # it may have been preempted in the middle of its prompt
        for state in states[at : at + len(row.pooled)]:
            sequence.pooled = state.astype(np.float64) if sequence.pooled is None else sequence.pooled + state
        at += len(row.pooled)
    for row in batch.rows:
        if row.sampled:
            continue  # of a text, which may have ended with this step
        sequence = get(row.handle)
        if sequence.request.embedding is not None and row.num_context_tokens == sequence.tokens.num_prompt:
            vector = embedding_of(sequence)
            if np.isfinite(vector).all():
                embeddings[row.handle] = vector
            else:
                failures[row.handle] = NOT_FINITE
    return embeddings, failures


def embedding_of(sequence: Sequence) -> Array:
    """The vector that was asked for, [dimensions] float32. A vector of zeros stays one."""
    asked = sequence.request.embedding
    assert asked is not None and sequence.pooled is not None
    whole = sequence.pooled / (sequence.tokens.num_prompt if asked.pooling == "mean" else 1)
    vector = whole[: asked.dimensions]
    length = float(np.sqrt(np.square(vector).sum()))
    found: Array = (vector / length if asked.is_normalized and length > 0.0 else vector).astype(np.float32)
    return found
