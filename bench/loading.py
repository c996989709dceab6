"""What does loading a checkpoint cost? Seconds, and the peak of anonymous memory, for each format
of safetensors in a model's shape.

Method: a checkpoint of random codes in the format's own layout, written once to --folder and read
before (so that it is in the page cache); a child process loads it as compute does, in bfloat16, and
this one reads the child's RssAnon from /proc every 5 ms. Mapped files are not counted: the system
takes their pages back when it needs them. `kept` is what is there after loading, `peak` the most
while loading, both above what the process has before it begins.

With --ranks, each rank of so many loads its part, one after the other, beside one rank that loads
all, in the same run. Seconds and bytes are medians of --runs; the last columns are the same as
parts of what one rank takes. Rank 0 alone has the embedding.

    python -m bench.loading [--shape llama-3.2-1b] [--formats none awq gptq] [--folder DIR]
    python -m bench.loading --shape smollm2-135m --ranks 2 --runs 5

With --library, transformers' modules are loaded; with --quantization, layers are quantized as they are read.

    python -m bench.loading --shape llama-3.2-1b --library --formats none awq
    python -m bench.loading --shape llama-3.2-1b --library --formats none --quantization w4
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.compute.backends.backend import QUANTIZATIONS
from services.compute.backends.choose import choose_backend
from services.compute.backends.host_memory import give_back_free_memory
from services.compute.models.architectures import read_config
from services.compute.models.config import Packed
from services.compute.models.transformers_model import load_transformers_model
from services.compute.ranks.parallel.share import Portion, Share
from services.compute.weights.library_modules import load_library_modules
from services.compute.weights.loader import load_parts
from services.modeltools.make_model import SHAPES, Shape, config_json, tensor_sizes

GROUP = 128
POLL_S = 0.005

Layer = Callable[[int, int], dict[str, torch.Tensor]]


def random_words(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (rows, columns), dtype=torch.int32)


def awq_layer(n: int, k: int) -> dict[str, torch.Tensor]:
    groups = -(-k // GROUP)
    return {
        "qweight": random_words(k, n // 8),
        "qzeros": random_words(groups, n // 8),
        "scales": torch.full((groups, n), 0.003, dtype=torch.float16),
    }


def gptq_layer(n: int, k: int) -> dict[str, torch.Tensor]:
    groups = -(-k // GROUP)
    zeros = torch.full((groups, n // 8), 0x77777777, dtype=torch.int32)
    scales = torch.full((groups, n), 0.003, dtype=torch.float16)
    return {
        "qweight": random_words(k // 8, n),
        "qzeros": zeros,
        "scales": scales,
        "g_idx": (torch.arange(k) // GROUP).int(),
    }


def act_order_layer(n: int, k: int) -> dict[str, torch.Tensor]:
    return gptq_layer(n, k) | {"g_idx": (torch.randperm(k) // GROUP).int()}


def int8_layer(n: int, k: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.randint(-127, 128, (n, k), dtype=torch.int8), "weight_scale": torch.full((n, 1), 0.0003)}


def fp8_layer(n: int, k: int) -> dict[str, torch.Tensor]:
    scales = torch.full((-(-n // 128), -(-k // 128)), 0.0003)
    return {
        "weight": torch.randint(0, 120, (n, k), dtype=torch.int8).view(torch.float8_e4m3fn),
        "weight_scale_inv": scales,
    }


INT8_SCHEME = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
}
FORMATS: dict[str, tuple[Layer | None, dict[str, Any] | None]] = {
    "none": (None, None),
    "awq": (awq_layer, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "gptq": (gptq_layer, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "gptq-act-order": (
        act_order_layer,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": True},
    ),
    "int8": (
        int8_layer,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"all": INT8_SCHEME},
            "ignore": ["lm_head"],
        },
    ),
    "fp8": (fp8_layer, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


def write(folder: Path, shape: Shape, name: str) -> None:
    """The checkpoint's config.json and model.safetensors, unless they are there."""
    layer, quantization_config = FORMATS[name]
    if (folder / "config.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for full_name, size in tensor_sizes(shape):
        if layer is not None and full_name.endswith("_proj.weight"):
            tensors |= {full_name.removesuffix("weight") + part: tensor for part, tensor in layer(*size).items()}
        else:
            tensors[full_name] = (
                torch.ones(size, dtype=torch.bfloat16)
                if len(size) == 1
                else torch.randn(size, dtype=torch.bfloat16) * 0.02
            )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = {} if quantization_config is None else {"quantization_config": quantization_config}
    (folder / "config.json").write_text(json.dumps(config_json(shape, "bfloat16") | described))


def anonymous_bytes(pid: int | str) -> int:
    """RssAnon; 0 of a process that has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")), 0)


def load(folder: Path, share: Share, quantization: str, *, is_library: bool) -> None:
    """The child: loads its part, and prints what it had before, what it has then, and the seconds."""
    backend = choose_backend(torch.bfloat16, torch.device("cpu"))
    config = read_config(json.loads((folder / "config.json").read_text()))
    load_modules = partial(load_library_modules, folder, backend, Packed(quantization, 32))
    before, started = anonymous_bytes("self"), time.perf_counter()
    # it has to be there when memory is measured
    kept = (
        load_transformers_model(folder, backend, 512, load_modules)
        if is_library
        else load_parts(
            folder, config, backend, Portion(share, has_embedding=share.rank == 0), quantization=quantization
        )
    )
    seconds = time.perf_counter() - started
    give_back_free_memory()
    print(json.dumps({"before": before, "after": anonymous_bytes("self"), "seconds": seconds}))
    del kept


def measure(folder: Path, share: Share, options: list[str]) -> tuple[float, int, int]:
    """Seconds, and bytes kept and at the peak. options: of the child's command line."""
    with (folder / "model.safetensors").open("rb") as file:
        while file.read(1 << 24):
            continue
    command = [
        sys.executable,
        "-m",
        "bench.loading",
        "--child",
        str(folder),
        "--share",
        str(share.rank),
        str(share.size),
        *options,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        peak = 0
        while child.poll() is None:
            peak = max(peak, anonymous_bytes(child.pid))
            time.sleep(POLL_S)
        assert child.stdout is not None
        found = json.loads(child.stdout.read())
    return found["seconds"], found["after"] - found["before"], peak - found["before"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.2-1b")
    parser.add_argument("--formats", nargs="+", choices=sorted(FORMATS), default=list(FORMATS))
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoints are written and stay (default: a temporary one)"
    )
    parser.add_argument("--ranks", type=int, default=1, help="how many share the model (tensor parallelism)")
    parser.add_argument("--runs", type=int, default=1, help="loads of each rank; their median counts")
    parser.add_argument("--library", action="store_true", help="load transformers' modules")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none", help="of the layers that are dense")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, nargs=2, default=[0, 1], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        load(args.child, Share(*args.share), args.quantization, is_library=args.library)
        return
    options = ["--quantization", args.quantization, *(["--library"] if args.library else [])]
    shares = [Share(), *(Share(rank, args.ranks) for rank in range(args.ranks) if args.ranks > 1)]
    with tempfile.TemporaryDirectory() as temporary:
        print(
            f"{args.shape}, loaded in "
            f"bfloat16\n{'format':16}{'rank':>8}{'file, MB':>10}{'seconds':>10}{'kept, MB':>10}{'peak, MB':>10}{'of one rank':>24}"  # noqa: E501
        )
        for name in args.formats:
            folder = (args.folder or Path(temporary)) / f"{args.shape}-{name}"
            write(folder, SHAPES[args.shape], name)
            size = (folder / "model.safetensors").stat().st_size
            # in turn, so that what else the machine does is shared out
            runs = [[measure(folder, share, options) for share in shares] for _ in range(args.runs)]
            found = [tuple(map(statistics.median, zip(*each, strict=True))) for each in zip(*runs, strict=True)]
            for share, (seconds, kept, peak) in zip(shares, found, strict=True):
                ratios = "".join(
                    f"{value / of_one:>8.2f}" for value, of_one in zip((seconds, kept, peak), found[0], strict=True)
                )
                rank = f"{share.rank} of {share.size}"
                print(
                    f"{name:16}{rank:>8}{size / 1e6:>10.0f}{seconds:>10.1f}{kept / 1e6:>10.0f}{peak / 1e6:>10.0f}{ratios}",  # noqa: E501
                    flush=True,
                )


if __name__ == "__main__":
    main()
