"""CpuBackend: bfloat16 on an x86-64 CPU, in native code."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from services.compute.backends.backend import (
    Attention,
    LargestStep,
    LayerWeights,
    Linear,
    Recurrence,
    Wiring,
    Workspace,
)
from services.compute.backends.cpu.attention import NativeAttention
from services.compute.backends.cpu.build import source_id
from services.compute.backends.cpu.library import NativeContext
from services.compute.backends.cpu.linear import NativeLinear, NativeMlp, is_packable, pack_linear, restore_linear
from services.compute.backends.cpu.recurrent import NativeRecurrence, is_supported
from services.compute.backends.cpu.row_math import NativeRowMath, NativeRowSearch
from services.compute.backends.cpu.stack import NativeStack
from services.compute.backends.gathered import GatheredMlp
from services.compute.backends.matrix import Joined, Matrix
from services.compute.backends.torch.attention import AttentionInputs, Heads
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.torch.recurrent import RecurrenceConfig
from services.compute.backends.torch.reference import Scores
from services.compute.ranks.parallel.ranks import Cut


class CpuBackend:
    """The backend for CPUs. One thread at a time may run its parts: they share a context's
    workspaces."""

    block_multiple = 16  # rows that lie together

    def __init__(self, context: NativeContext, activations: str = "int8") -> None:
        """activations: of quantized weights, int8 or bfloat16."""
        self.context = context
        self.activations = activations
        # for heads that native code does not know, over the same caches
        self.torch = TorchBackend(torch.bfloat16, torch.device("cpu"))
        self.dtype = self.torch.dtype
        self.device = self.torch.device
        self.buffers = self.torch.buffers
        self.row_math = NativeRowMath(context)
        self.row_search = NativeRowSearch(context)

    @property
    def arithmetic(self) -> str:
        return f"native {self.context.instruction_set} {source_id()}, {self.torch.arithmetic}"

    def is_kept(self, matrix: Matrix) -> bool:
        return all(map(is_packable, matrix.parts)) if isinstance(matrix, Joined) else is_packable(matrix)

    def make_linear(
        self,
        matrix: Matrix,
        bias: Tensor | None = None,
        *,
        quantization: str = "none",
        group: int = 32,
        is_gated: bool = False,
        activation: str = "silu",
        whole_n: int | None = None,  # noqa: ARG002
    ) -> NativeLinear:
        return self._with_activations(
            pack_linear(
                self.context,
                matrix,
                bias,
                quantization=quantization,
                group=group,
                is_gated=is_gated,
                activation=activation,
            )
        )

    def restore_linear(
        self,
        parts: dict[str, Tensor],
        n: int,
        k: int,
        *,
        is_gated: bool,
        has_bias: bool,
        activation: str,
        outputs: Sequence[range] | None = None,
    ) -> NativeLinear:
        return self._with_activations(
            restore_linear(
                self.context, parts, n, k, is_gated=is_gated, has_bias=has_bias, activation=activation, outputs=outputs
            )
        )

    def _with_activations(self, layer: NativeLinear) -> NativeLinear:
        if self.activations == "bfloat16":
            layer.widen()
        return layer

    def make_mlp(self, gate_up: Linear, down: Linear) -> NativeMlp:
        assert isinstance(gate_up, NativeLinear) and isinstance(down, NativeLinear)
        return NativeMlp(gate_up, down)

    def group_experts(self, experts: Sequence[tuple[Linear, Linear]], num_experts: int, first: int = 0) -> None:  # noqa: ARG002
        return None

    def make_attention(self, heads: Heads, scores: Scores | None = None, others: Sequence[Heads] = ()) -> Attention:
        return (
            NativeAttention(self.context, self.buffers, heads, scores, others)
            if all(each.are_supported for each in (heads, *others))
            else self.torch.make_attention(heads, scores, others)
        )

    def make_recurrence(self, config: RecurrenceConfig) -> Recurrence:
        return (
            NativeRecurrence(self.context, self.buffers, config)
            if is_supported(config)
            else self.torch.make_recurrence(config)
        )

    def stack(
        self, layers: Sequence[LayerWeights], attention: Attention, wiring: Wiring, cut: Cut | None = None
    ) -> NativeStack | None:
        are_native = all(isinstance(layer.mlp, NativeMlp | GatheredMlp) and layer.per_layer is None for layer in layers)
        if (
            not are_native
            or not isinstance(attention, NativeAttention)
            or not isinstance(wiring.recurrence, NativeRecurrence | None)
        ):
            return None
        return NativeStack(self.context, self.buffers, layers, attention.of_ropes, wiring, cut)

    def kv_token_bytes(self, num_kv_heads: int, head_dim: int, *, group: int) -> int:
        return self.torch.kv_token_bytes(num_kv_heads, head_dim, group=group)

    def make_kv_layer(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *, group: int
    ) -> Tensor:
        return self.torch.make_kv_layer(num_blocks, block_size, num_kv_heads, head_dim, group=group)

    def copy_blocks(self, layers: Sequence[Tensor], copies: Sequence[tuple[int, int]]) -> None:
        self.torch.copy_blocks(layers, copies)

    def workspace(self, step: LargestStep) -> Workspace:
        """Grows the workspaces as well: pages that were never written to take no memory."""
        logits = 0
        for linear in step.linears:
            assert isinstance(linear, NativeLinear)
            self.context.reserve(linear.address, step.num_tokens)
        if step.head is not None:
            assert isinstance(step.head, NativeLinear)
            self.context.reserve(step.head.address, step.num_logits)
            # a row has up to two masses: for logprobs, and of its draw
            self.context.reserve_search(2 * step.num_logits, step.head.num_outputs)
            logits = step.num_logits * step.head.num_outputs * 4
        if isinstance(step.attention, NativeAttention):
            self._reserve_attention(step.attention, step.num_tokens, step.max_model_len)
        if isinstance(step.recurrence, NativeRecurrence):
            step.recurrence.reserve(step.num_tokens)
        if step.stack is not None:
            step.stack.reserve(step.num_tokens)
        return Workspace(self.context.workspace_bytes() + self.buffers.num_bytes, logits)

    def _reserve_attention(self, attention: NativeAttention, num_tokens: int, max_model_len: int) -> None:
        """Reserve attention's memory for sequences of at most max_model_len tokens."""
        longest = max(max_model_len, num_tokens)
        inputs = AttentionInputs([num_tokens], [longest], [(0,)], torch.zeros(num_tokens, dtype=torch.int64), ())
        plan = attention.plan(inputs, block_size=longest)
        for heads in attention.of_ropes:
            plan.attention.cache.num_kv_heads = heads.num_kv_heads
            plan.attention.head_dim, plan.attention.sharing = heads.head_dim, heads.sharing
            self.context.reserve_attention(ctypes.byref(plan.attention))
