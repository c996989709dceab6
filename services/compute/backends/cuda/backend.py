"""CudaBackend: NVIDIA GPUs, in Triton's kernels. In Triton's interpreter (TRITON_INTERPRET=1) the
same on a CPU, slowly: so it is tested without a GPU."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from services.compute.backends.backend import (
    Attention,
    LargestStep,
    LayerWeights,
    Linear,
    SearchRequest,
    Wiring,
    Workspace,
)
from services.compute.backends.buffers import to_device_together
from services.compute.backends.cuda.attention import SMALLEST_BLOCK, CudaAttention, CudaPlan
from services.compute.backends.cuda.buffers import CudaBuffers
from services.compute.backends.cuda.device import (
    LITTLE_SHARED_MEMORY,
    OLDEST_FLOAT8,
    capability_of,
    multiprocessors_of,
    version_of,
)
from services.compute.backends.cuda.experts import CudaExperts, are_alike
from services.compute.backends.cuda.graphs import cuda_recorder, pad_to_bucket, recorded_sizes, run_again
from services.compute.backends.cuda.kernels import blocks as kernels
from services.compute.backends.cuda.linear import FEW_ROWS, SOME_ROWS, CudaLinear, divide, is_readable
from services.compute.backends.cuda.row_math import CudaRowMath
from services.compute.backends.cuda.search import CudaRowSearch
from services.compute.backends.cuda.stack import CudaStack
from services.compute.backends.matrix import Dense, Float8, Grouped, Int4Columns, Joined, Matrix
from services.compute.backends.torch.attention import AttentionInputs, Heads
from services.compute.backends.torch.linear import TorchMlp
from services.compute.backends.torch.recurrent import RecurrenceConfig, TorchRecurrence
from services.compute.backends.torch.reference import Scores, kv_row_size, quantize_weight
from services.compute.ranks.parallel.ranks import Cut
from shared.model.sampling_params import SamplingParams
from shared.process.errors import StartupError

HOPPER = 9  # compute capability, before the point
WIDEST_FLOAT32 = 128  # dimensions of a head that fit into little shared memory
HALVES = (torch.bfloat16, torch.float16)  # dtypes of what meets quantized weights
KINDS = 2  # of recordings of a size: with blocks that are tokens in part, and without
RECORDED = 6  # recordings that are made and dropped, after the first, to see what one takes
DRIVER_CHUNK = 2 << 20  # bytes that the driver takes at least
WORD, COPIED_AT_ONCE = 8, 1024  # bytes; and words of a program
LISTED = 64  # candidates of a row that most steps ask for


class CudaBackend:
    block_multiple = SMALLEST_BLOCK  # rows that lie together

    def __init__(self, dtype: torch.dtype, device: torch.device, *, allow_batch_variance: bool = False) -> None:
        self.dtype = dtype
        self.device = device
        self.capability = capability_of(device)
        self.multiprocessors = multiprocessors_of(device)
        # rows from which on the vendor's products are used
        self.vendor_from = FEW_ROWS + 1 if allow_batch_variance else None
        self.buffers = CudaBuffers(device)
        self.row_math = CudaRowMath()
        self.row_search = CudaRowSearch()
        self.make_recorder = cuda_recorder if device.type == "cuda" else lambda: run_again

    @property
    def arithmetic(self) -> str:
        return (
            f"cuda {version_of(self.capability)}, {self.multiprocessors} multiprocessors, triton "
            f"{version('triton')}, torch {torch.__version__}"
        )

    def is_kept(self, matrix: Matrix) -> bool:
        has_products = self.has_float8 or not isinstance(matrix, Float8)
        matrix = matrix.with_half_scales() if isinstance(matrix, Grouped) else matrix
        if isinstance(matrix, Joined):
            return False
        return isinstance(matrix, Dense) or (self.dtype in HALVES and has_products and is_readable(matrix))

    @property
    def has_float8(self) -> bool:
        return self.capability >= OLDEST_FLOAT8

    def make_linear(
        self,
        matrix: Matrix,
        bias: Tensor | None = None,
        *,
        quantization: str = "none",
        group: int = 32,
        is_gated: bool = False,
        activation: str = "silu",
        whole_n: int | None = None,
    ) -> CudaLinear:
        if quantization not in ("none", "fp8") and self.dtype not in HALVES:
            raise StartupError(f"--quantization {quantization} needs --dtype bfloat16 or float16")
        if quantization == "fp8" and not self.has_float8:
            needed, found = version_of(OLDEST_FLOAT8), version_of(self.capability)
            raise StartupError(
                f"--quantization fp8 needs a GPU of compute capability {needed} (Ada) or newer, this one has {found}: "
                "w8a8 takes as much memory"
            )
        matrix = matrix.with_half_scales() if isinstance(matrix, Grouped) else matrix
        if isinstance(matrix, Joined) or not self.is_kept(matrix):
            matrix = Dense(matrix.dequantize(self.dtype))
        if isinstance(matrix, Dense) and quantization != "none":
            matrix = quantize_weight(matrix.dequantize(self.dtype), quantization, group)
        whole_n = matrix.shape[0] if whole_n is None else whole_n
        # in float32, operations after the sums may be fused in one kernel and not in another
        parts = None
        if self.dtype != torch.float32:
            has_groups = isinstance(matrix, (Grouped, Int4Columns))
            parts = divide(
                whole_n // 2 if is_gated else whole_n, matrix.shape[1], self.multiprocessors, has_groups=has_groups
            )
        is_hopper = self.capability[0] == HOPPER
        return CudaLinear(
            matrix,
            bias,
            self.dtype,
            is_gated=is_gated,
            activation=activation,
            vendor_from=self.vendor_from,
            parts=parts,
            is_hopper=is_hopper,
        )

    def restore_linear(self, *_: Any, **__: Any) -> CudaLinear:
        raise StartupError(
            "this checkpoint is packed for the CPU's kernels: on a GPU use its source, with --quantization"
        )

    def make_mlp(self, gate_up: Linear, down: Linear) -> TorchMlp:
        return TorchMlp(gate_up, down)

    def group_experts(
        self, experts: Sequence[tuple[Linear, Linear]], num_experts: int, first: int = 0
    ) -> CudaExperts | None:
        """None: some have other forms than others, as where a file's numbers make it so."""
        for each in (layer for pair in experts for layer in pair if isinstance(layer, CudaLinear)):
            each.parts = None  # all experts together have enough tiles
        pairs = [
            (gate_up, down)
            for gate_up, down in experts
            if isinstance(gate_up, CudaLinear) and isinstance(down, CudaLinear)
        ]
        assert len(pairs) == len(experts)
        return (
            CudaExperts(pairs, num_experts, first)
            if pairs and all(are_alike(each) for each in zip(*pairs, strict=True))
            else None
        )

    def make_attention(self, heads: Heads, scores: Scores | None = None, others: Sequence[Heads] = ()) -> CudaAttention:
        widest = max(each.head_dim for each in (heads, *others))
        if self.dtype == torch.float32 and widest > WIDEST_FLOAT32 and self.capability in LITTLE_SHARED_MEMORY:
            found = version_of(self.capability)
            raise StartupError(
                f"--dtype float32: heads of {widest} dimensions do not fit into the shared memory of compute "
                f"capability {found}"
            )
        return CudaAttention(self.buffers, self.dtype, heads, scores, others)

    def make_recurrence(self, config: RecurrenceConfig) -> TorchRecurrence:
        return TorchRecurrence(config, self.device)

    def stack(
        self, layers: Sequence[LayerWeights], attention: Attention, wiring: Wiring, cut: Cut | None = None
    ) -> CudaStack | None:
        assert isinstance(attention, CudaAttention)
        if cut is not None or not all(
            layer.mlp.is_recordable and layer.recurrent is None and layer.per_layer is None for layer in layers
        ):
            return None
        return CudaStack(self.buffers, self.row_math, layers, attention, wiring, self.make_recorder)

    def kv_token_bytes(self, num_kv_heads: int, head_dim: int, *, group: int) -> int:
        return 2 * num_kv_heads * (kv_row_size(head_dim, group) if group else head_dim * self.dtype.itemsize)

    def make_kv_layer(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *, group: int
    ) -> Tensor:
        """[2, num_blocks, num_kv_heads * block_size * row]: see kernels/attention.py."""
        if group & (group - 1):
            raise StartupError(
                f"--kv-cache-dtype int8: on a GPU heads of {head_dim} dimensions can't be divided into groups of "
                f"{group}, only of powers of two"
            )
        row = kv_row_size(head_dim, group) if group else head_dim
        return torch.zeros(
            (2, num_blocks, num_kv_heads * block_size * row),
            dtype=torch.int8 if group else self.dtype,
            device=self.device,
        )

    def copy_blocks(self, layers: Sequence[Tensor], copies: Sequence[tuple[int, int]]) -> None:
        block_bytes = layers[0][0, 0].nbytes
        assert block_bytes % WORD == 0
        bases, pairs = to_device_together(
            [np.array([layer.data_ptr() for layer in layers], np.int64), np.array(copies, np.int64)], self.device
        )
        num_words = block_bytes // WORD
        kernels.copy_blocks[(len(layers), 2, triton.cdiv(num_words, COPIED_AT_ONCE))](
            bases,
            pairs,
            len(copies),
            num_words,
            layers[0].stride(0) * layers[0].element_size() // WORD,
            BLOCK=COPIED_AT_ONCE,
            num_warps=4,
        )

    def workspace(self, step: LargestStep) -> Workspace:
        """Reserves the buffers, runs the largest step's parts, which compiles most kernels, and
        measures what they took, and what this model's recordings will take. Without a GPU there is
        nothing to measure: the buffers, and the logits."""
        assert isinstance(step.attention, CudaAttention)
        num_tokens = max(step.num_tokens, step.num_logits)
        for name in ("input_ids", "positions", "logit_rows"):
            self.buffers.reserve(name, num_tokens)
        self.buffers.reserve("positions of images", 3 * num_tokens)
        step.attention.reserve(step.num_logits, num_tokens, max(step.max_model_len, step.num_tokens))
        if step.stack is not None:
            step.stack.reserve(pad_to_bucket(step.num_logits))
        if self.device.type != "cuda":
            return Workspace(
                self.buffers.num_bytes,
                step.num_logits * step.head.num_outputs * 4 if isinstance(step.head, CudaLinear) else 0,
            )
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._run_largest(step)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        of_recordings = (
            0
            if step.stack is None
            else self._recording_bytes(step, lambda: int(torch.cuda.mem_get_info(self.device)[0]))
        )
        torch.cuda.empty_cache()
        of_states = step.recurrence.workspace(step.num_tokens) if isinstance(step.recurrence, TorchRecurrence) else 0
        return Workspace(peak + of_states, of_recordings)

    @torch.inference_mode()
    def _recording_bytes(self, step: LargestStep, free_bytes: Callable[[], int]) -> int:
        """Bytes of the recordings of all sizes, by some that are made and dropped: all share the
        memory in which the largest works, and the driver keeps something of each. It takes memory
        chunk by chunk, so a few recordings may show none."""
        assert isinstance(step.attention, CudaAttention)
        sizes = recorded_sizes(step.num_logits)
        kv = [
            self.make_kv_layer(1, SMALLEST_BLOCK, heads.num_kv_heads, heads.head_dim, group=0)
            for heads in step.attention.of_ropes
        ]
        record, held = self.make_recorder(), []

        def make(size: int) -> Callable[[], Tensor]:
            assert isinstance(step.stack, CudaStack) and isinstance(step.attention, CudaAttention)
            x = torch.zeros((size, step.hidden_size), dtype=self.dtype, device=self.device)
            plan = self._plan(step.attention, [1] * size)
            return partial(step.stack.run, x, [kv[rope] for rope in step.stack.wiring.ropes], plan)

        make(sizes[0])()  # compiles what is missing
        torch.cuda.empty_cache()  # a recording begins so: what that gives back is not the recording's
        free = [free_bytes()]
        for size in (sizes[0], *sizes[:RECORDED]):
            held.append(record(make(size)))
            free.append(free_bytes())
        later = free[1] - free[-1] + DRIVER_CHUNK
        return free[0] - free[1] + -(-(KINDS * len(sizes) - 1) * later // (len(held) - 1))

    @torch.inference_mode()
    def _run_largest(self, step: LargestStep) -> None:
        """Run each shape of layer and of MLP with all tokens and with one, attention, the head and
        the search."""
        shapes = {}
        for linear in step.linears:
            assert isinstance(linear, CudaLinear)
            shapes[linear.form, linear.num_outputs, linear.k, linear.activation] = linear
        # of a mixture each token goes to several experts
        hidden, mlps = step.hidden_size, {tuple(mlp.linears): mlp for mlp in step.mlps}
        # those with which tiles change; the steps in between are the recordings' and the warm-up's
        counts = {min(count, step.num_tokens) for count in (step.num_tokens, SOME_ROWS + 1, SOME_ROWS, 1)}
        for num_tokens in sorted(counts, reverse=True):
            for linear in shapes.values():
                x = torch.zeros((num_tokens, linear.k), dtype=self.dtype, device=self.device)
                linear(x, norm=torch.ones_like(x[0]), eps=1e-6)
        # an expert's tile follows from the tokens that it gets in the mean: fourfold steps meet each
        counts |= {4**power for power in range(step.num_tokens.bit_length() // 2, -1, -1) if 4**power < step.num_tokens}
        for num_tokens in sorted(counts, reverse=True):
            for mlp in mlps.values():
                x = torch.zeros((num_tokens, hidden), dtype=self.dtype, device=self.device)
                mlp(x, norm=torch.ones_like(x[0]), eps=1e-6)
        assert isinstance(step.attention, CudaAttention)
        num_blocks = -(-step.num_tokens // SMALLEST_BLOCK)
        for rope, heads in enumerate(step.attention.of_ropes):
            kv = self.make_kv_layer(num_blocks, SMALLEST_BLOCK, heads.num_kv_heads, heads.head_dim, group=0)
            for lens in ([1], [step.num_tokens]):
                plan = self._plan(step.attention, lens)
                width = (heads.num_projected + heads.num_heads * heads.has_gate) * heads.head_dim
                qkv = torch.zeros((sum(lens), width), dtype=self.dtype, device=self.device)
                step.attention(qkv, kv, plan, window=None, norms=(None, None), eps=1e-6, rope=rope)
        if not isinstance(step.head, CudaLinear):
            return  # it is elsewhere, and so is the search
        logits = step.head.logits(torch.zeros((step.num_logits, step.head.k), dtype=self.dtype, device=self.device))
        every = np.arange(step.num_logits)
        for k in (1, LISTED):
            listed = np.full(step.num_logits, min(k, step.head.num_outputs), np.int32)
            seeds, positions = np.zeros(step.num_logits, np.uint64), np.ones(step.num_logits, np.int32)
            wanted = SearchRequest([SamplingParams()] * step.num_logits, seeds, positions, listed, every, every)
            self.row_search.start(logits, wanted).read()

    def _plan(self, attention: CudaAttention, lens: list[int]) -> CudaPlan:
        """The plan of a step of so many tokens of each sequence, which begins with them."""
        num_tokens = sum(lens)
        table = tuple(range(-(-max(lens) // SMALLEST_BLOCK)))
        ropes = []
        for number, heads in enumerate(attention.of_ropes):
            shape = num_tokens, (heads.rotary_dim or heads.head_dim) // 2
            cos, sin = (self.buffers.take(f"{which} {number}", shape, torch.float32) for which in ("cos", "sin"))
            ropes.append((cos, sin))
        slots = torch.zeros(0, dtype=torch.int64, device=self.device)
        inputs = AttentionInputs(lens, lens, [table] * len(lens), slots, tuple(ropes))
        plan = attention.plan(inputs, SMALLEST_BLOCK)
        self.buffers.upload()
        return plan
