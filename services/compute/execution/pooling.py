"""Embeddings: of a prompt's last hidden states, one vector.

A sequence's hidden states come chunk by chunk, as its prompt is computed, and are added up token by
token in float64: the sum is the same in any chunks, and in any company. Dense layers may follow, as
sentence-transformers has them (EmbeddingGemma).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from services.compute.sequence import Sequence
from services.compute.sequence.batch import ScheduledBatch
from shared.model.arrays import Array
from shared.process.errors import StartupError

NOT_FINITE = "the model's numbers for this input are not finite"
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"Identity": lambda vector: vector, "Tanh": np.tanh}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    weight: Array  # [outputs, inputs] float64
    bias: Array | None  # [outputs] float64
    activation: Callable[[Array], Array]

    def __call__(self, vector: Array) -> Array:
        """vector: [inputs] float64. Returns [outputs]."""
        product = self.weight @ vector
        return self.activation(product if self.bias is None else product + self.bias)


def read_dense_layers(folder: Path, num_inputs: int | None) -> tuple[DenseLayer, ...]:
    """Read the Dense layers that modules.json lists, in their order; none without that file. num_inputs: dimensions
    of a state; None: config.json does not say. Raises StartupError."""
    file = folder / "modules.json"
    try:
        modules = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        names = [str(each["path"]) for each in modules if str(each["type"]).endswith(".Dense")]
        layers = tuple(read_dense_layer(folder / name) for name in names)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise StartupError(f"{file}: its Dense layers can't be read: {error!r}") from None
    for name, layer in zip(names, layers, strict=True):
        shape, bias_shape = layer.weight.shape, None if layer.bias is None else layer.bias.shape
        if len(shape) != 2 or shape[1] != (num_inputs or shape[1]) or bias_shape not in (None, shape[:1]):
            raise StartupError(
                f"{folder / name}: linear.weight has the shape {shape}, linear.bias {bias_shape}; a layer behind "
                f"{num_inputs or 'any'} dimensions has (n, {num_inputs or 'any'}) and (n,) or none"
            )
        num_inputs = shape[0]
    return layers


def read_dense_layer(folder: Path) -> DenseLayer:
    """Read one from its folder, which has config.json and model.safetensors."""
    name = str(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("activation_function", "Tanh"))
    activation = ACTIVATIONS.get(name.rpartition(".")[2])
    if activation is None:
        raise StartupError(
            f"{folder}: activation_function {name!r} is not supported; these are: {', '.join(ACTIVATIONS)}"
        )
    tensors = load_file(folder / "model.safetensors")
    weight, bias = (
        None if each is None else each.to(torch.float64).numpy()
        for each in (tensors.get("linear.weight"), tensors.get("linear.bias"))
    )
    if weight is None:
        raise KeyError("linear.weight")
    return DenseLayer(weight, bias, activation)


def pool(
    states: Array, batch: ScheduledBatch, get: Callable[[int], Sequence], dense_layers: tuple[DenseLayer, ...] = ()
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
            vector = embedding_of(sequence, dense_layers)
            if np.isfinite(vector).all():
                embeddings[row.handle] = vector
            else:
                failures[row.handle] = NOT_FINITE
    return embeddings, failures


def embedding_of(sequence: Sequence, dense_layers: tuple[DenseLayer, ...]) -> Array:
    """The vector that was asked for, [dimensions] float32. A vector of zeros stays one."""
    asked = sequence.request.embedding
    assert asked is not None and sequence.pooled is not None
    whole = sequence.pooled / (sequence.tokens.num_prompt if asked.pooling == "mean" else 1)
    for layer in dense_layers:
        whole = layer(whole)
    vector = whole[: asked.dimensions]
    length = float(np.sqrt(np.square(vector).sum()))
    found: Array = (vector / length if asked.is_normalized and length > 0.0 else vector).astype(np.float32)
    return found
