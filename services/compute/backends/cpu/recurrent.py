"""Recurrent layers in native code: recurrence.inc."""

import ctypes
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from services.compute.backends.buffers import Buffers
from services.compute.backends.cpu.library import NativeContext, RecurrenceArguments, RecurrentPointers, pointer
from services.compute.backends.torch.recurrent import RecurrenceConfig, RecurrentWeights, StateLayer, StateRows

LANES = 16  # floats that native code computes together
MAX_KERNEL = 8
KINDS = {"delta": 0, "mamba2": 2, "convolution": 3}  # kernels.h's RecurrenceKind


@dataclass(frozen=True, slots=True)
class NativeStatePlan:
    """The structure of a step's calls, in which a layer puts its own; and the tensors that it points to."""

    arguments: RecurrenceArguments
    out: Tensor  # [T, inner]: a layer's result, until the next writes its own
    kept: tuple[Tensor, ...]


class NativeRecurrence:
    """TorchRecurrence in bfloat16. What is read from a state is rounded to it before the norm."""

    def __init__(self, context: NativeContext, buffers: Buffers, config: RecurrenceConfig) -> None:
        assert is_supported(config)
        self.context = context
        self.buffers = buffers
        self.config = config

    def plan(self, rows: StateRows) -> NativeStatePlan:
        config = self.config
        query_starts = list(accumulate(rows.query_lens, initial=0))
        numbers = {
            "query_starts": query_starts,
            "starts": rows.starts,
            "slots": rows.slots,
            "num_folded": rows.num_folded,
            "fold_to": rows.fold_to,
        }
        tensors = {name: self.buffers.fill(f"state_{name}", values) for name, values in numbers.items()}
        out = self.buffers.take("recurrence", (query_starts[-1], config.inner), torch.bfloat16)
        arguments = RecurrenceArguments(
            kind=KINDS[config.kind],
            num_heads=config.num_heads,
            num_key_heads=config.num_key_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            kernel=config.kernel,
            norm_group=config.norm_group or config.value_dim,
            norm_width=config.value_dim if config.norm_group is None else config.inner,
            is_gated_first=config.is_gate_first,
            is_tiled=config.is_tiled,
            least_step=config.step_limit[0],
            most_step=config.step_limit[1],
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            num_sequences=len(rows.slots),
            out=out.data_ptr(),
            out_stride=config.inner,
        )
        return NativeStatePlan(arguments, out, tuple(tensors.values()))

    def __call__(
        self, projected: Tensor, cache: StateLayer, states: NativeStatePlan, weights: RecurrentWeights, *, eps: float
    ) -> Tensor:
        arguments = states.arguments
        arguments.projected, arguments.eps = projected.data_ptr(), eps
        arguments.layer = layer_pointers(weights, cache)
        self.context.recurrence(ctypes.byref(arguments))
        return states.out

    def reserve(self, num_tokens: int) -> None:
        """Grow the workspaces to what a step of so many tokens takes."""
        plan = self.plan(StateRows([0], [num_tokens], [0], [0], [num_tokens]))
        self.context.reserve_recurrence(ctypes.byref(plan.arguments))


def is_supported(config: RecurrenceConfig) -> bool:
    """Whether native code runs layers of these sizes."""
    return (
        (config.key_dim % LANES == 0 or not config.has_state)
        and config.value_dim % LANES == 0
        and (config.norm_group or 0) % LANES == 0
        and 2 <= config.kernel <= MAX_KERNEL
    )


def layer_pointers(weights: RecurrentWeights, cache: StateLayer) -> RecurrentPointers:
    """A layer's weights and states, which the caller keeps."""
    assert weights.convolution.is_contiguous() and cache.state.is_contiguous() and cache.inputs.is_contiguous()
    return RecurrentPointers(
        states=cache.state.data_ptr(),
        inputs=cache.inputs.data_ptr(),
        ring=cache.inputs.shape[1],
        convolution=weights.convolution.data_ptr(),
        convolution_bias=pointer(weights.convolution_bias),
        decay=pointer(weights.decay),
        step_bias=pointer(weights.dt_bias),
        skip=pointer(weights.skip),
        norm=pointer(weights.norm),
    )
