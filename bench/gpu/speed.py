"""How fast each kernel and whole steps are, beside what the device was measured to reach. Needs a
GPU; random weights, for speed does not depend on them.
"""

import gc
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
import triton.testing

from bench.gpu.steps import Steps
from services.compute.backends.backend import LayerWeights, Norms
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.linear import CudaLinear
from services.compute.backends.matrix import Dense
from services.compute.backends.torch.attention import AttentionInputs, Heads
from services.compute.cache.block_manager import BlockManager
from services.compute.cache.kv_cache import KVCache, free_memory
from services.compute.candidates.reduction import begin_reduction
from services.compute.execution.model_runner import ModelRunner
from services.compute.models.architectures import read_config
from services.compute.models.config import Packed
from services.compute.models.decoder import Decoder, ModelWeights
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Request, Sequence, Tokens
from services.modeltools.make_model import SHAPES, Shape, config_json
from services.simulator.trace import TraceRequest
from shared.model.sampling_params import SamplingParams

VENDORS_LEAST = {"none": 1, "w8a8": 17, "fp8": 1}  # rows: torch._int_mm takes no fewer
BLOCK_SIZE = 16
LONG = 32_768  # tokens of a sequence beside others
CONTEXT = 1024  # tokens that each sequence has when it decodes
MAX_BATCHED_TOKENS = 2048
LAUNCH_CYCLES = 20_000_000  # of the device, some 10 ms, in which the host launches a step
STEPS = 20  # of a batch; their median counts
DRAW = SamplingParams(
    max_tokens=1 << 20, top_k=50
)  # of random weights the logits are so flat that others would fall beyond the candidates


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The rates that this device reaches, measured in the same run."""

    copy_bytes_per_s: float  # read and written, 1 GiB
    bf16_flop_per_s: float  # torch.matmul of 8192 x 8192 x 8192
    int8_op_per_s: float  # torch._int_mm of the same
    fp8_flop_per_s: float | None  # torch._scaled_mm of the same; None: the device has no FP8

    def product_rate(self, mode: str) -> float:
        """Operations a second, at most, of layers that are quantized so."""
        rates = {"none": self.bf16_flop_per_s, "fp8": self.fp8_flop_per_s or self.bf16_flop_per_s}
        return rates.get(mode, self.int8_op_per_s)


@dataclass(frozen=True, slots=True)
class KernelTime:
    kernel: str
    shape: str
    case: str
    microseconds: float
    num_bytes: float
    num_operations: float

    def share_of_bandwidth(self, ceilings: Ceilings) -> float:
        return self.num_bytes / self.microseconds * 1e6 / ceilings.copy_bytes_per_s

    @property
    def gigabytes_per_s(self) -> float:
        return self.num_bytes / self.microseconds / 1e3

    @property
    def teraflop_per_s(self) -> float:
        return self.num_operations / self.microseconds / 1e6


@dataclass(frozen=True, slots=True)
class StepTime:
    """Medians of one kind of step: what a client would wait (wall) and what of it the device computed."""

    shape: str
    mode: str
    batch: int
    num_tokens: int
    wall_ms: float  # each step is scheduled when the one before has been read
    ahead_ms: float | None  # the next is launched before; None: of a prompt
    device_ms: float
    # the weights' bytes and the cache's at the measured bandwidth, or the products at the measured
    # rate, whichever is longer
    floor_ms: float

    def host_share(self, wall_ms: float) -> float:
        """The share of a wall in which the device waits."""
        return max(0.0, 1.0 - self.device_ms / wall_ms)


@dataclass(frozen=True, slots=True)
class Served:
    """Requests, as serve_trace or bench.pipeline sum them up."""

    name: str
    figures: dict[str, float]


@dataclass(slots=True)
class Trace:
    """A trace through scheduler and model, all there at once or as it arrived."""

    num_requests: int = 0
    seconds: float = 0.0
    num_output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        return {
            "requests": self.num_requests,
            "requests_per_s": self.num_requests / self.seconds,
            "output_tokens_per_s": self.num_output_tokens / self.seconds,
            "ttft_p50_s": statistics.median(self.ttft_s),
            "tpot_p50_s": statistics.median(self.tpot_s or [0.0]),
        }


def median_us(run: Callable[[], object]) -> float:
    """Seconds of one call, the second-level cache emptied before each."""
    return 1e3 * float(triton.testing.do_bench(run, return_mode="median"))


def measure_ceilings(backend: CudaBackend) -> Ceilings:
    device = backend.device
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device=device).bfloat16()
    codes = torch.randint(-127, 127, (8192, 8192), device=device, dtype=torch.int8)
    operations = 2 * 8192**3
    floats, ones = a.to(torch.float8_e4m3fn) if backend.has_float8 else None, torch.ones(8192, 1, device=device)
    return Ceilings(
        2 * source.nbytes / median_us(lambda: target.copy_(source)) * 1e6,
        operations / median_us(lambda: a @ a) * 1e6,
        operations / median_us(lambda: torch._int_mm(codes, codes.T)) * 1e6,
        operations
        / median_us(lambda: torch._scaled_mm(floats, floats.T, scale_a=ones, scale_b=ones.T, out_dtype=torch.bfloat16))
        * 1e6
        if floats is not None
        else None,
    )


def random_linear(backend: CudaBackend, n: int, k: int, quantization: str, *, is_gated: bool = False) -> CudaLinear:
    weight = torch.empty((n, k), dtype=torch.bfloat16, device=backend.device).normal_(std=0.02)
    return backend.make_linear(Dense(weight), quantization=quantization, is_gated=is_gated)


def layer_shapes(shape: Shape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each kind of layer."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inter = shape.hidden_size, shape.intermediate_size
    return {
        "qkv": (q_size + 2 * kv_size, hidden),
        "output": (hidden, q_size),
        "gate, up": (2 * inter, hidden),
        "down": (hidden, inter),
        "head": (shape.vocab_size, hidden),
    }


def measure_linears(backend: CudaBackend, name: str, layer: str, mode: str, rows: list[int]) -> Iterator[KernelTime]:
    """One kind of layer by our kernels, and by the vendor's product where it has one for so many rows."""
    n, k = layer_shapes(SHAPES[name])[layer]
    linear = random_linear(backend, n, k, mode, is_gated=layer == "gate, up")
    for count in rows:
        x = torch.randn(count, k, device=backend.device).to(backend.dtype)
        moved = linear.num_bytes + x.nbytes + count * linear.num_outputs * x.element_size()
        for is_vendors in (False, True) if count >= VENDORS_LEAST.get(mode, math.inf) else (False,):
            linear.vendor_from = 1 if is_vendors else None
            taken = median_us(lambda x=x: linear(x))  # type: ignore[misc]
            kernel = f"linear, {mode}" + (", vendor's" if is_vendors else "")
            yield KernelTime(kernel, name, f"{layer}, {count} rows", taken, moved, 2.0 * count * n * k)


def measure_attention(backend: CudaBackend, name: str, batches: list[int]) -> Iterator[KernelTime]:
    shape = SHAPES[name]
    heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim)
    attention = backend.make_attention(heads)
    cases = [([CONTEXT] * batch, 1) for batch in batches] + [
        ([CONTEXT], CONTEXT),
        ([*[CONTEXT] * 63, LONG], 1),
        ([LONG], 1),
    ]
    for group in (0, 64):
        for contexts, new in cases:
            starts = [0, *accumulate(-(-context // BLOCK_SIZE) for context in contexts)]
            tables = [tuple(range(first, last)) for first, last in pairwise(starts)]
            slots = [
                table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
                for table, context in zip(tables, contexts, strict=True)
                for at in range(context - new, context)
            ]
            angles = torch.zeros(len(slots), heads.head_dim // 2, device=backend.device)
            given = backend.buffers.fill("slot_mapping", slots)
            plan = attention.plan(
                AttentionInputs([new] * len(contexts), contexts, tables, given, ((angles.cos(), angles.sin()),)),
                BLOCK_SIZE,
            )
            backend.buffers.upload()
            kv = backend.make_kv_layer(starts[-1], BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, group=group)
            width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
            qkv = torch.randn(len(slots), width, device=backend.device).to(backend.dtype)
            taken = median_us(
                lambda qkv=qkv, kv=kv, plan=plan: attention(qkv, kv, plan, window=None, norms=(None, None), eps=1e-6)  # type: ignore[misc]
            )
            seen = sum(contexts) if new == 1 else CONTEXT * CONTEXT / 2
            kind = "decode" if new == 1 else "prefill"
            operations = 4.0 * seen * heads.num_heads * heads.head_dim
            case = (
                f"{kind}, {' and '.join(f'{count} x {context}' for context, count in Counter(contexts).items())}, KV "
                f"{f'int8/{group}' if group else 'bf16'}"
            )
            yield KernelTime("attention", name, case, taken, kv.nbytes + 2 * qkv.nbytes, operations)


def random_model(backend: CudaBackend, name: str, quantization: str) -> Decoder:
    """On the device, layer by layer, without a file."""
    shape = SHAPES[name]
    sizes = layer_shapes(shape)
    ones = torch.ones(shape.hidden_size, dtype=backend.dtype, device=backend.device)

    def make(layer: str, mode: str = quantization) -> CudaLinear:
        return random_linear(backend, *sizes[layer], mode, is_gated=layer == "gate, up")

    layers = [
        LayerWeights(
            Norms(before_attention=ones, before_mlp=ones),
            make("qkv"),
            make("output", Packed(quantization, 64).of_output),
            backend.make_mlp(make("gate, up"), make("down")),
        )
        for _ in range(shape.num_layers)
    ]
    embedding = torch.empty((shape.vocab_size, shape.hidden_size), dtype=backend.dtype, device=backend.device).normal_(
        std=0.02
    )
    head = make("head", Packed(quantization, 64).of_head)
    return Decoder(
        read_config(config_json(shape, "bfloat16"), None), ModelWeights(embedding, layers, ones, head), backend
    )


def model_bytes(model: Decoder) -> int:
    """Bytes of all layers and the head: what a step reads of them."""
    linears = [
        each for layer in model.weights.layers for each in (layer.qkv, layer.output, *layer.mlp.linears.values())
    ]
    return sum(each.num_bytes for each in (*linears, model.weights.lm_head) if isinstance(each, CudaLinear))


def begun(scheduler: Scheduler, count: int, num_tokens: int, num_computed: int) -> list[Sequence]:
    """Sequences that run, of so many tokens each, as if the first num_computed were computed: what
    is in the cache does not change how long a step takes.
    """
    sequences = []
    for handle in range(count):
        sequence = Sequence(
            Request(handle, str(handle), DRAW), Tokens([7 + at % 1000 for at in range(num_tokens)], num_tokens)
        )
        has_grown = scheduler.block_manager.grow(sequence, num_tokens)
        assert has_grown
        sequence.kv.num_computed = num_computed
        scheduler.running[handle] = sequence
        sequences.append(sequence)
    return sequences


def measure_steps(
    backend: CudaBackend, name: str, mode: str, batches: list[int], ceilings: Ceilings
) -> Iterator[StepTime]:
    """Decoding at CONTEXT tokens by batch, and a prompt of CONTEXT tokens: scheduled, computed, drawn, read."""
    shape, model = SHAPES[name], random_model(backend, name, mode)
    blocks = CONTEXT // BLOCK_SIZE + 3 * STEPS // BLOCK_SIZE + 1  # what a sequence comes to
    num_blocks = min(max(batches) * blocks, room_for_blocks(backend, shape))
    runner = ModelRunner(model, KVCache(model.config, backend, num_blocks=num_blocks, block_size=BLOCK_SIZE))
    for batch, num_computed in [*((batch, CONTEXT - 1) for batch in batches), (1, 0)]:
        if batch * blocks > num_blocks:
            print(f"{name}, {mode}: the cache of {batch} sequences does not fit beside the model", file=sys.stderr)
            continue
        device_ms = statistics.median(device_times(runner, backend, batch, num_computed, num_blocks))
        walls = [
            statistics.median(step_walls(runner, backend, batch, num_computed, num_blocks, is_ahead=is_ahead))
            for is_ahead in ((False,) if num_computed == 0 else (False, True))
        ]
        num_tokens = batch * (CONTEXT - num_computed)
        cache_bytes = (
            batch * CONTEXT * shape.num_layers * backend.kv_token_bytes(shape.num_kv_heads, shape.head_dim, group=0)
        )
        parameters = sum(n * k for layer, (n, k) in layer_shapes(shape).items() if layer != "head") * shape.num_layers
        operations = 2.0 * (num_tokens * parameters + batch * shape.vocab_size * shape.hidden_size)
        floor = max(
            (model_bytes(model) + cache_bytes) / ceilings.copy_bytes_per_s, operations / ceilings.product_rate(mode)
        )
        kind = mode if backend.vendor_from is None else f"{mode}, vendor's"
        yield StepTime(
            name, kind, batch, num_tokens, walls[0], walls[1] if len(walls) > 1 else None, device_ms, 1e3 * floor
        )


def make_scheduler(num_blocks: int) -> Scheduler:
    blocks = BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=False)
    return Scheduler(
        blocks,
        make_admission("predicted", blocks),
        max_num_seqs=256,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        run_ahead=4,
    )


def device_times(
    runner: ModelRunner, backend: CudaBackend, batch: int, num_computed: int, num_blocks: int
) -> list[float]:
    """Milliseconds of one step from its first kernel to its draws, all of it launched before the device begins."""
    scheduler, found = make_scheduler(num_blocks), []
    sequences = begun(scheduler, batch, CONTEXT, num_computed)
    step = scheduler.schedule()
    assert step is not None
    for _ in range(STEPS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        prepared, plan = runner.prepare(step)
        torch.cuda.synchronize()
        cycles = LAUNCH_CYCLES * (3 if num_computed == 0 else 1)  # a prompt's kernels are launched one by one
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        began.record()
        logits = runner.model.logits(runner.model.forward(prepared, plan, runner.kv_cache.layers), prepared.logit_rows)
        reduction = begin_reduction(logits, [sequence.prefix() for sequence in sequences], backend.row_search)
        ended.record()
        reduction.finish()
        found.append(began.elapsed_time(ended))
    return found


def step_walls(
    runner: ModelRunner, backend: CudaBackend, batch: int, num_computed: int, num_blocks: int, *, is_ahead: bool
) -> list[float]:
    """Milliseconds from one landing to the next. The first steps are recorded."""
    found: list[float] = []
    rounds = STEPS if num_computed == 0 else 1  # a prompt has one step: it is begun again for each
    for _ in range(rounds):
        scheduler = make_scheduler(num_blocks)
        begun(scheduler, batch, CONTEXT, num_computed)
        steps = Steps(scheduler, runner, backend.row_search, is_ahead=is_ahead)
        torch.cuda.synchronize()
        for _ in range(1 if num_computed == 0 else 2 * STEPS):
            started = time.perf_counter()
            steps.step()
            found.append(1e3 * (time.perf_counter() - started))
    return found[-STEPS:]


def cache_block_bytes(backend: CudaBackend, shape: Shape) -> int:
    return shape.num_layers * BLOCK_SIZE * backend.kv_token_bytes(shape.num_kv_heads, shape.head_dim, group=0)


def room_for_blocks(backend: CudaBackend, shape: Shape) -> int:
    """Return how many blocks fit into most of the free memory. torch keeps the memory of the model
    before this one until it is told to give it back.
    """
    gc.collect()
    torch.cuda.empty_cache()
    return int(0.8 * free_memory(backend.device)) // cache_block_bytes(backend, shape)


def serve_trace(backend: CudaBackend, name: str, requests: list[TraceRequest], *, is_ahead: bool) -> dict[str, float]:
    """All requests at once, in bf16, through the scheduler. Times are from the beginning. is_ahead:
    with a step in flight.
    """
    shape, model = SHAPES[name], random_model(backend, name, "none")
    num_blocks = room_for_blocks(backend, shape)
    runner = ModelRunner(model, KVCache(model.config, backend, num_blocks=num_blocks, block_size=BLOCK_SIZE))
    scheduler = make_scheduler(num_blocks)
    first: dict[int, float] = {}
    sequences: dict[int, Sequence] = {}
    served = Trace(len(requests))
    for number, request in enumerate(requests):
        prompt = [(7 * number + 13 * at) % 2000 + 5 for at in range(request.num_prompt_tokens)]
        params = SamplingParams(max_tokens=request.num_output_tokens, temperature=0.0)
        sequences[number] = Sequence(Request(number, str(number), params), Tokens(prompt))
        scheduler.add(sequences[number])
    steps, started = Steps(scheduler, runner, backend.row_search, is_ahead=is_ahead), time.perf_counter()
    while scheduler.num_unfinished:
        landing = steps.step()
        now = time.perf_counter() - started
        for handle in [] if landing is None else landing.handles.tolist():
            begun_at, sequence = first.setdefault(handle, now), sequences[handle]
            if sequence.is_finished:
                served.ttft_s.append(begun_at)
                served.num_output_tokens += sequence.tokens.num_output
                if sequence.tokens.num_output > 1:
                    served.tpot_s.append((now - begun_at) / (sequence.tokens.num_output - 1))
    served.seconds = time.perf_counter() - started
    return served.summary()
