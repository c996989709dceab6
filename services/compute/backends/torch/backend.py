"""TorchBackend: every part in plain torch. The definition, in any dtype, on any device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.compute.backends.backend import Attention, LargestStep, LayerWeights, Linear, Wiring, Workspace
from services.compute.backends.buffers import Buffers, to_device
from services.compute.backends.host_memory import mapped_zeros
from services.compute.backends.matrix import Dense, Joined, Matrix
from services.compute.backends.torch.attention import Heads, TorchAttention
from services.compute.backends.torch.linear import QuantizedTorchLinear, TorchLinear, TorchMlp
from services.compute.backends.torch.recurrent import RecurrenceConfig, TorchRecurrence
from services.compute.backends.torch.reference import Scores, kv_row_size, quantize_weight
from services.compute.backends.torch.row_math import TorchRowMath
from services.compute.backends.torch.row_search import TorchRowSearch
from services.compute.ranks.parallel.ranks import Cut
from shared.process.errors import StartupError


class TorchBackend:
    block_multiple = 1

    def __init__(self, dtype: torch.dtype, device: torch.device, activations: str = "int8") -> None:
        """activations: of weights that `quantization` asks for, int8 or bfloat16; of others dtype."""
        self.dtype = dtype
        self.activations = activations
        self.device = device
        self.buffers = Buffers(device)
        self.row_math = TorchRowMath()
        self.row_search = TorchRowSearch()

    @property
    def arithmetic(self) -> str:
        where = torch.backends.cpu.get_cpu_capability() if self.device.type == "cpu" else self.device.type
        return f"torch {torch.__version__} {where}"

    def is_kept(self, matrix: Matrix) -> bool:
        return isinstance(matrix, Dense)

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
    ) -> TorchLinear:
        if quantization == "none":
            return TorchLinear(matrix.dequantize(self.dtype), bias, is_gated=is_gated, activation=activation)
        if self.device.type != "cpu" or (self.dtype != torch.bfloat16 and quantization != "fp8"):
            raise StartupError(
                f"--quantization {quantization} runs on a CPU in bfloat16 only, not on {self.device.type} in "
                f"{self.dtype}"
            )
        if isinstance(matrix, Dense | Joined):
            matrix = quantize_weight(matrix.dequantize(self.dtype), quantization, group)
        if self.activations == "bfloat16":
            return TorchLinear(matrix.dequantize(self.dtype), bias, is_gated=is_gated, activation=activation)
        return QuantizedTorchLinear(matrix, bias, is_gated=is_gated, activation=activation)

    def restore_linear(self, *_: Any, **__: Any) -> TorchLinear:
        raise StartupError(
            "this checkpoint is packed for the native kernels, which run in bfloat16 on a CPU: build them (penstock "
            "build-kernels), or use its source"
        )

    def make_mlp(self, gate_up: Linear, down: Linear) -> TorchMlp:
        return TorchMlp(gate_up, down)

    def group_experts(self, experts: Sequence[tuple[Linear, Linear]], num_experts: int, first: int = 0) -> None:  # noqa: ARG002
        return None

    def make_attention(
        self, heads: Heads, scores: Scores | None = None, others: Sequence[Heads] = ()
    ) -> TorchAttention:
        return TorchAttention(heads, scores, others)

    def make_recurrence(self, config: RecurrenceConfig) -> TorchRecurrence:
        return TorchRecurrence(config, self.device)

    def stack(
        self,
        layers: Sequence[LayerWeights],  # noqa: ARG002
        attention: Attention,  # noqa: ARG002
        wiring: Wiring,  # noqa: ARG002
        cut: Cut | None = None,  # noqa: ARG002
    ) -> None:
        return None

    def kv_token_bytes(self, num_kv_heads: int, head_dim: int, *, group: int) -> int:
        return 2 * num_kv_heads * (kv_row_size(head_dim, group) if group else head_dim * self.dtype.itemsize)

    def make_kv_layer(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *, group: int
    ) -> Tensor:
        """[2, num_blocks, num_kv_heads, block_size, head_dim], or a row of int8 groups instead of
        head_dim."""
        dtype = torch.uint8 if group else self.dtype
        shape = (2, num_blocks, num_kv_heads, block_size, kv_row_size(head_dim, group) if group else head_dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return (
            mapped_zeros(num_blocks * block_size * self.kv_token_bytes(num_kv_heads, head_dim, group=group))
            .view(dtype)
            .view(shape)
        )

    def copy_blocks(self, layers: Sequence[Tensor], copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = to_device(np.array(copies, np.int64), self.device).unbind(1)
        for layer in layers:
            layer[:, targets] = layer[:, sources]

    def workspace(self, step: LargestStep) -> Workspace:
        """Inputs and outputs of the layer that has most, and once more in float32, as norms,
        activations and logits are computed."""
        sizes = [*((linear, step.num_tokens) for linear in step.linears), (step.head, step.num_logits)]
        of_states = step.recurrence.workspace(step.num_tokens) if isinstance(step.recurrence, TorchRecurrence) else 0
        return Workspace(
            max(
                rows * sum(linear.weight.shape) * (self.dtype.itemsize + 4)
                for linear, rows in sizes
                if isinstance(linear, TorchLinear)
            )
            + of_states,
            0,
        )
