"""How fast is each kernel, beside torch's and beside the machine's ceilings? Every layer of two
models' shapes, attention, and a recurrence.

Method: native layers in each mode and torch's bfloat16 linear take turns on the same random data;
the median of --rounds. GB/s counts the weights' bytes once, GOP/s two operations a multiplication;
beside it, operations a cycle and core. The ceilings are measured in the same run: reading 1 GiB
with all threads, and the best GEMM rate seen. Layers are used in turn from several copies, as a
model does, so that weights come from memory and not from a cache.

    python -m bench.kernels [--shape qwen2.5-0.5b] [--rows 1 4 16 64 256 1024]
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.budget import ceilings
from bench.model import read_bandwidth, stored_bytes
from services.compute.backends.backend import Backend
from services.compute.backends.choose import choose_backend
from services.compute.backends.cpu.linear import QUANTIZATIONS
from services.compute.backends.matrix import Dense
from services.compute.backends.torch.attention import AttentionInputs, Heads
from services.compute.backends.torch.recurrent import (
    RecurrenceConfig,
    RecurrentWeights,
    StateRows,
    make_state_layer,
)
from services.modeltools.make_model import SHAPES, Shape

LAYERS_BYTES = 100 << 20  # of the caches that attention takes in turn
COPIES_BYTES = 600 << 20  # of each layer's copies together: more than the caches hold


def layers(shape: Shape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each kind of layer."""
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return {
        "qkv": (qkv, shape.hidden_size),
        "gate, up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "LM head": (shape.vocab_size, shape.hidden_size),
    }


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def measure_layers(backend: Backend, shape: Shape, rows: list[int], rounds: int, cycles: float) -> float:
    """Prints a table. cycles: of all threads, a second; 0: not known. Returns the best rate, in operations/s."""
    best = 0.0
    print(f"{'layer':10}{'rows':>6}{'torch bf16, us':>16}" + "".join(f"{mode:>36}" for mode in QUANTIZATIONS))
    for name, (n, k) in layers(shape).items():
        copies = max(1, min(8, COPIES_BYTES // (2 * n * k)))
        weights = [torch.randn(n, k).bfloat16() for _ in range(copies)]
        native = {
            mode: [backend.make_linear(Dense(weight), quantization=mode) for weight in weights]
            for mode in QUANTIZATIONS
        }
        for count in rows:
            x = torch.randn(count, k).bfloat16()
            seconds: dict[str, list[float]] = {}
            for number in range(rounds * copies):
                at = number % copies
                seconds.setdefault("torch", []).append(timed(lambda x=x, weight=weights[at]: F.linear(x, weight)))  # type: ignore[misc]
                for mode, made in native.items():
                    seconds.setdefault(mode, []).append(timed(lambda x=x, layer=made[at]: layer(x)))  # type: ignore[misc]
            medians = {case: statistics.median(values) for case, values in seconds.items()}
            cells = []
            for mode in QUANTIZATIONS:
                rate = 2 * count * n * k / medians[mode]
                best = max(best, rate)
                gigabytes = stored_bytes(native[mode][0]) / medians[mode] / 1e9
                a_cycle = f"{rate / cycles:5.0f}" if cycles else ""
                cells.append(
                    f"{medians['torch'] / medians[mode]:.2f}x {gigabytes:5.1f} GB/s {rate / 1e9:6,.0f} GOP/s{a_cycle}"
                )
            print(
                f"{name:10}{count:6}{medians['torch'] * 1e6:16.0f}" + "".join(f"{cell:>36}" for cell in cells),
                flush=True,
            )
    return best


def measure_attention(backend: Backend, shape: Shape, rounds: int) -> None:
    """Decoding at several contexts, and a prompt; native over blocks, in bf16 and in int8 groups;
    torch's SDPA over keys and values in one piece.
    """
    heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim)
    attention = backend.make_attention(heads)
    groups = [group for group in (64, 32, 8) if shape.head_dim % group == 0]
    titles = ["bf16, us", "GB/s", "SDPA, us", "ratio", *(f"int8/{group}, us" for group in groups)]
    print(f"{'attention':20}" + "".join(f"{title:>14}" for title in titles))
    for name, sequences, context, new in (
        ("decode, 1 x 1024", 1, 1024, 1),
        ("decode, 1 x 4000", 1, 4000, 1),
        ("decode, 8 x 4000", 8, 4000, 1),
        ("decode, 32 x 256", 32, 256, 1),
        ("decode, 64 x 530", 64, 530, 1),
        ("prefill, 1024", 1, 1024, 1024),
    ):
        blocks = -(-context // 16)
        tables = [tuple(range(number * blocks, (number + 1) * blocks)) for number in range(sequences)]
        tokens = sequences * new
        slots = torch.tensor(
            [table[at // 16] * 16 + at % 16 for table in tables for at in range(context - new, context)]
        )
        angles = torch.zeros(tokens, heads.head_dim // 2)
        plan = attention.plan(
            AttentionInputs([new] * sequences, [context] * sequences, tables, slots, ((angles.cos(), angles.sin()),)),
            16,
        )
        qkv = torch.randn(tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim).bfloat16()
        q = (
            qkv[:, : heads.num_heads * heads.head_dim]
            .reshape(sequences, new, heads.num_heads, heads.head_dim)
            .transpose(1, 2)
            .contiguous()
        )
        copies = range(
            max(1, LAYERS_BYTES // (4 * sequences * context * heads.num_kv_heads * heads.head_dim))
        )  # in turn, as layers do
        x = [torch.randn(sequences * context, heads.num_kv_heads, heads.head_dim).bfloat16() for _ in range(2)]
        caches = {
            group: [make_cache(backend, heads, blocks * sequences, group) for _ in copies] for group in (0, *groups)
        }
        pieces = [
            [each.view(sequences, context, *each.shape[1:]).transpose(1, 2).contiguous() for each in x] for _ in copies
        ]
        seconds: dict[object, list[float]] = {}
        for number in range(rounds * max(4, len(copies))):
            at = number % len(copies)
            for group, made in caches.items():
                call = lambda kv=made[at]: attention(qkv, kv, plan, window=None, norms=(None, None), eps=1e-6)  # noqa: B023, E731
                seconds.setdefault(group, []).append(timed(call))
            k, v = pieces[at]
            seconds.setdefault("sdpa", []).append(
                timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=new > 1, enable_gqa=True))  # noqa: B023
            )
        medians = {case: statistics.median(values) * 1e6 for case, values in seconds.items()}
        cells = [
            f"{medians[0]:.0f}",
            f"{caches[0][0].nbytes / medians[0] / 1e3:.1f}",
            f"{medians['sdpa']:.0f}",
            f"{medians['sdpa'] / medians[0]:.2f}",
        ]
        print(
            f"{name:20}" + "".join(f"{cell:>14}" for cell in [*cells, *(f"{medians[group]:.0f}" for group in groups)]),
            flush=True,
        )


def measure_recurrence(backend: Backend, rounds: int) -> None:
    """A layer of Qwen 3.5 4B's gated delta-net, decoding with one token in the log, and a prompt. GB/s
    counts a state once for reading and once for writing.
    """
    config = RecurrenceConfig("delta", num_heads=32, num_key_heads=16, key_dim=128, value_dim=128, kernel=4)
    recurrence, ones = backend.make_recurrence(config), torch.ones(config.channels)
    weights = RecurrentWeights(
        torch.randn(config.kernel, config.channels) / 2, -ones[: config.num_heads], ones[: config.num_heads], ones[:128]
    )
    print(f"{'gated delta-net':20}{'us a token':>14}{'GB/s':>14}")
    for name, sequences, new in (("decode, 1", 1, 1), ("decode, 16", 16, 1), ("prefill, 512", 1, 512)):
        copies = max(1, LAYERS_BYTES // (sequences * config.slot_bytes(torch.bfloat16)))
        caches = [make_state_layer(config, sequences, torch.bfloat16, backend.device) for _ in range(copies)]
        start = 100 if new == 1 else 0
        numbers = (new, start, max(0, start - 1), start + new - 1)
        rows = StateRows(list(range(sequences)), *([number] * sequences for number in numbers))
        projected, plan = torch.randn(sequences * new, config.width).bfloat16(), recurrence.plan(rows)
        seconds = [
            timed(lambda cache=cache: recurrence(projected, cache, plan, weights, eps=1e-6))  # type: ignore[misc]  # noqa: B023
            for _ in range(rounds)
            for cache in caches
        ]
        median, states = statistics.median(seconds), sequences * 8 * math.prod(config.state_shape)
        print(f"{name:20}{median * 1e6 / (sequences * new):14.1f}{states / median / 1e9:14.1f}", flush=True)


def make_cache(backend: Backend, heads: Heads, num_blocks: int, group: int) -> torch.Tensor:
    """A layer's cache whose bytes are no numbers that would take longer than others, whatever order
    they stand in; group: of int8, 0: bfloat16.
    """
    kv = backend.make_kv_layer(num_blocks, 16, heads.num_kv_heads, heads.head_dim, group=group)
    kv.view(torch.uint8).fill_(0x2C)
    return kv


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Every kernel over a model's shapes, beside torch and the machine's ceilings."
    )
    parser.add_argument(
        "--shape",
        choices=[name for name in SHAPES if name != "tiny"],
        default="qwen2.5-0.5b",
        help="default: %(default)s",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    backend = choose_backend(torch.bfloat16, torch.device("cpu"))
    with torch.inference_mode():
        hertz = ceilings()[1]
        best = measure_layers(backend, SHAPES[args.shape], args.rows, args.rounds, hertz * torch.get_num_threads())
        measure_attention(backend, SHAPES[args.shape], args.rounds)
        measure_recurrence(backend, args.rounds)
        print(
            f"ceilings: memory read {read_bandwidth() / 1e9:.1f} GB/s; best rate of a GEMM here {best / 1e9:,.0f} "
            f"GOP/s; clock {hertz / 1e9:.2f} GHz"
        )


if __name__ == "__main__":
    main()
