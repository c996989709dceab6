"""What does quantization cost in quality? Perplexity and agreement of the demo model in each mode, and the error of number formats.

Method: two texts, each token given the ones before it, in single-token steps over the cache as in decoding. Conversations made from the demo's
exchanges with wordings and orders that its training did not use: it knows their answers by heart. And a text that it never saw: there it knows
nothing, its perplexity means little, but its broad distributions show the smallest change. Agreement is how often the likeliest next token
is float32's, KL the distance from float32's distribution. Format errors are relative, root mean square: of the model's weights (INT8 and FP8
by output column, four bits in groups of 64), and of made-up activations, normal and with 8 of 4,096 channels sixty times as
large (INT8 and FP8 by row).

    python -m bench.quality [--conversations 40] [--text docs/architecture.md]
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer

from services.compute.backends.torch.reference import quantize_four_bit, quantize_rows
from services.compute.batch import ScheduledBatch
from services.compute.cache.block_manager import BlockManager
from services.compute.cache.kv_cache import KVCache
from services.compute.model_runner import ModelRunner
from services.compute.models.config import read_config
from services.compute.models.decoder import Decoder
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.loop import run_step
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Sequence
from services.compute.weights.loader import load_weights
from services.compute.weights.safetensors_source import SafetensorsSource
from services.demo.train import IGNORED, conversation, read_exchanges
from shared.model_files import DEMO_MODEL
from shared.sampling_params import SamplingParams

WINDOW = 256
SEED = 20_000_000  # training counts up from 0
CONVERSATIONS = DEMO_MODEL.parent / "conversations.txt"
FP8_LARGEST = 448.0

MODES: dict[str, dict[str, object]] = {
    "float32": {"dtype": torch.float32},
    "bf16": {},
    "w8a8": {"quantization": "w8a8"},
    "w4, groups of 32": {"quantization": "w4", "group": 32},
    "w4, groups of 64": {"quantization": "w4", "group": 64},
    "w4, groups of 128": {"quantization": "w4", "group": 128},
    "nf4, groups of 64": {"quantization": "nf4", "group": 64},
    "bf16, KV int8 by 8": {"kv_group": 8},
    "bf16, KV int8 by 32": {"kv_group": 32},
    "bf16, KV int8 by 64": {"kv_group": 64},
    "w8a8, KV int8 by 64": {"quantization": "w8a8", "kv_group": 64},
}


def read(texts: list[list[int]], *, dtype: torch.dtype = torch.bfloat16, quantization: str = "none", group: int = 64, kv_group: int = 0) -> list[torch.Tensor]:
    """Log probabilities after each token but the last of each text, [length - 1, vocab] float32."""
    config = read_config(json.loads((DEMO_MODEL / "config.json").read_text()))
    device = torch.device("cpu")
    model = Decoder(config, load_weights(DEMO_MODEL, config, dtype, device, quantization=quantization, group=group))
    num_blocks = sum(len(text) // 16 + 1 for text in texts)
    runner = ModelRunner(model, KVCache(config, num_blocks=num_blocks, block_size=16, dtype=dtype, device=device, group=kv_group), device)
    blocks = BlockManager(num_blocks, 16, prefix_caching=False)
    scheduler = Scheduler(blocks, make_admission("reserve", blocks), max_num_seqs=len(texts), max_batched_tokens=len(texts))
    for number, text in enumerate(texts):
        scheduler.add(Sequence(number, "r", text[:1], 1, SamplingParams(max_tokens=len(text) - 1)))
    found: list[list[torch.Tensor]] = [[] for _ in texts]

    def decide(batch: ScheduledBatch, sampled: list[Sequence]) -> Iterator[int]:
        """What the text says, whatever the model would say."""
        for sequence, row in zip(sampled, runner.forward(batch), strict=True):
            found[sequence.handle].append(row.log_softmax(-1))
            yield texts[sequence.handle][sequence.num_tokens]

    while run_step(scheduler, decide) is not None:
        pass
    return [torch.stack(rows) for rows in found]


def compare_modes(title: str, texts: list[list[int]], is_counted: torch.Tensor) -> None:
    """is_counted: which of the tokens after each text's first, all texts in a row, count."""
    targets = torch.cat([torch.tensor(text[1:]) for text in texts])[is_counted]
    print(f"\n{title}, {len(targets)} tokens\n{'':22}{'perplexity':>14}{'agreement':>12}{'KL, nats':>10}")
    reference = None
    for name, options in MODES.items():
        found = torch.cat(read(texts, **options))[is_counted]  # type: ignore[arg-type]
        reference = found if reference is None else reference
        perplexity = float(torch.exp(-found.gather(-1, targets[:, None]).mean()))
        agreement = float((found.argmax(-1) == reference.argmax(-1)).float().mean())
        divergence = float((reference.exp() * (reference - found)).sum(-1).mean())
        print(f"{name:22}{perplexity:14,.4f}{agreement:12.2%}{divergence:10.5f}")


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def int8(x: torch.Tensor) -> torch.Tensor:
    values, scales = quantize_rows(x)
    return values.float() * scales[:, None]


def fp8(x: torch.Tensor) -> torch.Tensor:
    scales = x.abs().amax(-1, keepdim=True) / FP8_LARGEST
    return (x / scales).to(torch.float8_e4m3fn).float() * scales


def four_bit(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: quantize_four_bit(x, kind, 64).dequantize(torch.float32)


def compare_formats() -> None:
    source = SafetensorsSource(DEMO_MODEL, torch.float32, torch.device("cpu"))
    config = read_config(json.loads((DEMO_MODEL / "config.json").read_text()))
    shape = (config.intermediate_size, config.hidden_size)
    weights = torch.cat(
        [source.dense(f"model.layers.{number}.mlp.{kind}_proj.weight", shape) for number in range(config.num_layers) for kind in ("gate", "up")]
    )
    source.close()
    rows = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0))
    outliers = rows.clone()
    outliers[:, :8] *= 60
    tensors = {"weights": weights, "normal activations": rows, "with outlier channels": outliers}
    formats = {"INT8": int8, "FP8 e4m3": fp8, "INT4, groups of 64": four_bit("w4"), "NF4, groups of 64": four_bit("nf4")}
    print(f"\n{'':20}" + "".join(f"{name:>24}" for name in tensors))
    for name, quantize in formats.items():
        print(f"{name:20}" + "".join(f"{error(quantize(each), each):>24.3%}" for each in tensors.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity, agreement and number formats' errors.")
    parser.add_argument("--conversations", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--text", type=Path, default=Path("docs/architecture.md"), help="that the model never saw (default: %(default)s)")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    rng, exchanges = random.Random(SEED), read_exchanges(CONVERSATIONS)
    texts, labels = zip(*(conversation(exchanges, tokenizer, rng) for _ in range(args.conversations)), strict=True)
    compare_modes("the demo's answers", list(texts), torch.cat([torch.tensor(each[1:]) for each in labels]) != IGNORED)
    tokens = tokenizer.encode(args.text.read_text(encoding="utf-8"))
    windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    compare_modes("a text it never saw", windows, torch.ones(len(windows) * (WINDOW - 1), dtype=torch.bool))
    compare_formats()


if __name__ == "__main__":
    main()
