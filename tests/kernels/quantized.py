"""Tiny quantized checkpoints, written from the published layout of each format: the packing here
knows nothing of the reading in weights/formats/.

A writer takes a matrix [n, k] and gives the tensors of the layer's file and the float32 matrix that they mean.
"""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Written]

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    eos_token_id=1,
    bos_token_id=None,
    pad_token_id=0,
)
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
FP4 = tuple(value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3))


@functools.cache
def base_model() -> PreTrainedModel:
    """Random, in float32, with logits that differ."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0, std=0.1) if "norm" in name else torch.nn.init.normal_(
            parameter, std=0.12
        )
    return model.eval()


def write_checkpoint(
    folder: Path, writer_of: Callable[[str], Writer | None], quantization_config: dict[str, Any] | None
) -> PreTrainedModel:
    """Writes the model to `folder`, each linear layer by the writer that its name has, if any.
    Returns transformers' model with what the file means.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(base_model())
    tensors = dict(model.state_dict())
    for name, module in model.named_modules():
        writer = writer_of(name) if isinstance(module, torch.nn.Linear) else None
        if writer is not None:
            del tensors[name + ".weight"]
            parts, meant = writer(module.weight.detach())
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            module.weight.data = meant.float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config))
    return model


def layers_only(writer: Writer) -> Callable[[str], Writer | None]:
    """The usual choice: everything but the LM head."""
    return lambda name: None if name == "lm_head" else writer


def words(codes: np.ndarray, bits: int) -> Tensor:
    """[m, c] codes as [m, ceil(c * bits / 32)] int32: the next code in the next higher bits of a word."""
    per_word = 32 // bits
    out = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), dtype=np.uint32)
    for column in range(codes.shape[1]):
        out[:, column // per_word] |= codes[:, column].astype(np.uint32) << np.uint32(bits * (column % per_word))
    return torch.from_numpy(out.view(np.int32))


@dataclass(frozen=True)
class Codes:
    """A matrix on a grid: weight = (codes - zeros) * scales of the input's group."""

    codes: np.ndarray  # [n, k], 0 to 2 ** bits - 1
    zeros: np.ndarray  # [n, groups]
    scales: Tensor  # [n, groups], of the dtype that the file has
    group_of: np.ndarray  # [k]

    def weight(self) -> Tensor:
        centred = self.codes.astype(np.float32) - self.zeros.astype(np.float32)[:, self.group_of]
        return torch.from_numpy(centred) * self.scales.float()[:, torch.from_numpy(self.group_of)]


def encode(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype, group_of: np.ndarray | None = None
) -> Codes:
    """Rounded to the nearest, group by group, between the smallest and the largest of a group."""
    n, k = weight.shape
    group_of = np.arange(k) // group if group_of is None else group_of
    top, count = 2**bits - 1, int(group_of.max()) + 1
    codes, zeros, scales = (
        np.zeros((n, k), dtype=np.int64),
        np.zeros((n, count), dtype=np.int64),
        torch.zeros((n, count), dtype=dtype),
    )
    for number in range(count):
        part = weight[:, group_of == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales[:, number] = ((high - low) / top).to(dtype)
        scale = scales[:, number].float()
        zeros[:, number] = (top + 1) // 2 if symmetric else (-low / scale).round().clamp(0, top).numpy()
        found = (part / scale[:, None]).round() + torch.from_numpy(zeros[:, number])[:, None]
        codes[:, group_of == number] = found.clamp(0, top).numpy()
    return Codes(codes, zeros, scales, group_of)


def awq(group: int, dtype: torch.dtype = torch.float16, smaller: float = 1.0) -> Writer:
    """AutoAWQ's gemm layout. smaller: a factor of all scales, for those that float16 does not hold."""

    def write(weight: Tensor) -> Written:
        grid = encode(weight * smaller, 4, group if group > 0 else weight.shape[1], symmetric=False, dtype=dtype)

        def interleaved(columns: np.ndarray) -> Tensor:  # [m, n]
            order = np.concatenate(
                [start + np.array([0, 2, 4, 6, 1, 3, 5, 7]) for start in range(0, columns.shape[1], 8)]
            )
            return words(columns[:, order], 4)

        parts = {"qweight": interleaved(grid.codes.T), "qzeros": interleaved(grid.zeros.T), "scales": grid.scales.T}
        return parts, grid.weight()

    return write


def gptq(
    bits: int, group: int, *, symmetric: bool, version: int = 1, act_order: bool = False, has_g_idx: bool = True
) -> Writer:
    """AutoGPTQ's layout; version 1 stores zeros less one, with the bits that they have."""

    def write(weight: Tensor) -> Written:
        n, k = weight.shape
        size = group if group > 0 else k
        group_of = np.random.default_rng(n + k).permutation(np.arange(k) // size) if act_order else np.arange(k) // size
        grid = encode(weight, bits, size, symmetric=symmetric, dtype=torch.float16, group_of=group_of)
        stored = (grid.zeros - 1) % 2**bits if version == 1 else grid.zeros
        parts = {"qweight": words(grid.codes, bits).T, "qzeros": words(stored.T, bits), "scales": grid.scales.T}
        if has_g_idx:
            parts["g_idx"] = torch.from_numpy(group_of).int()
        return parts, grid.weight()

    return write


def packed(
    bits: int, group: int, *, symmetric: bool = True, act_order: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Writer:
    """compressed-tensors' pack-quantized: signed codes plus half of their range, along the inputs;
    zero points along the outputs.
    """

    def write(weight: Tensor) -> Written:
        n, k = weight.shape
        size = group if group > 0 else k
        group_of = np.random.default_rng(k).permutation(np.arange(k) // size) if act_order else None
        grid = encode(weight, bits, size, symmetric=symmetric, dtype=dtype, group_of=group_of)
        parts = {
            "weight_packed": words(grid.codes, bits),
            "weight_scale": grid.scales,
            "weight_shape": torch.tensor([n, k]),
        }
        if not symmetric:
            parts["weight_zero_point"] = words(grid.zeros.T, bits).T
        if act_order:
            parts["weight_g_idx"] = torch.from_numpy(grid.group_of).int()
        return parts, grid.weight()

    return write


def integers(bits: int, strategy: str, *, group: int = -1, symmetric: bool = True) -> Writer:
    """compressed-tensors' int-quantized: plain int8, scales by tensor, output or group."""

    def write(weight: Tensor) -> Written:
        n, k = weight.shape
        size, half = group if group > 0 else k, 2 ** (bits - 1)
        scaled = weight.reshape(1, -1) if strategy == "tensor" else weight
        grid = encode(
            scaled, bits, scaled.shape[1] if strategy == "tensor" else size, symmetric=symmetric, dtype=torch.bfloat16
        )
        codes = torch.from_numpy(grid.codes - half).to(torch.int8).reshape(n, k)
        parts = {"weight": codes, "weight_scale": grid.scales.reshape(1) if strategy == "tensor" else grid.scales}
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy(grid.zeros - half).to(torch.int8)
        return parts, grid.weight().reshape(n, k)

    return write


def float8(
    shape: str,
    *,
    scale_name: str = "weight_scale",
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float32,
) -> Writer:
    """shape: what has a scale: tensor (of no dimension), one (of one), channel, or block."""

    def write(weight: Tensor) -> Written:
        n, k = weight.shape
        height, width = {"tensor": (n, k), "one": (n, k), "channel": (1, k), "block": block}[shape]
        rows, columns = -(-n // height), -(-k // width)
        scales, stored, meant = (
            torch.zeros((rows, columns), dtype=dtype),
            torch.zeros((n, k), dtype=torch.float8_e4m3fn),
            torch.zeros((n, k)),
        )
        for row in range(rows):
            for column in range(columns):
                part = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
                scales[row, column] = (weight[part].abs().max() / 448).to(dtype)
                stored[part] = (weight[part] / scales[row, column].float()).to(torch.float8_e4m3fn)
                meant[part] = stored[part].float() * scales[row, column].float()
        return {
            "weight": stored,
            scale_name: scales.reshape(() if shape == "tensor" else (1,) if shape == "one" else (rows, columns)),
        }, meant

    return write


def four_bit_floats(kind: str, block: int, *, nested: bool, storage: torch.dtype = torch.uint8) -> Writer:
    """bitsandbytes' Linear4bit: the matrix in one row, two codes a byte, the first in the high half."""

    def write(weight: Tensor) -> Written:
        n, k = weight.shape
        table = torch.tensor(NF4 if kind == "nf4" else FP4)
        flat = torch.nn.functional.pad(weight.flatten(), (0, -n * k % block)).reshape(-1, block)
        largest = flat.abs().amax(1).clamp(min=1e-6)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
        parts = {"weight.quant_map": table, "weight.absmax": largest}
        if nested:
            offset, outer_block = largest.mean().item(), 256
            outer_table = torch.linspace(-1, 1, 256) ** 3
            padded = torch.nn.functional.pad(largest - offset, (0, -len(largest) % outer_block)).reshape(
                -1, outer_block
            )
            outer = padded.abs().amax(1)
            inner = (padded / outer[:, None]).flatten()[: len(largest), None].sub(outer_table).abs().argmin(1)
            largest = outer_table[inner] * outer.repeat_interleave(outer_block)[: len(largest)] + offset
            parts |= {
                "weight.absmax": inner.to(torch.uint8),
                "weight.nested_absmax": outer,
                "weight.nested_quant_map": outer_table,
            }
            state |= {"nested_blocksize": outer_block, "nested_dtype": "float32", "nested_offset": offset}
        codes = (flat / largest[:, None]).unsqueeze(-1).sub(table).abs().argmin(-1)
        meant = (table[codes] * largest[:, None]).flatten()[: n * k].reshape(n, k)
        pairs = codes.flatten()[: n * k].reshape(-1, 2)
        parts["weight"] = (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8).view(storage).unsqueeze(1)
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        return parts, meant

    return write


def llm_int8(weight: Tensor) -> Written:
    """bitsandbytes' Linear8bitLt: int8 by output, and the largest magnitude of each."""
    largest = weight.abs().amax(1)
    codes = (weight * (127 / largest)[:, None]).round().to(torch.int8)
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes.float() * (largest / 127)[:, None]


def scheme(
    bits: int,
    strategy: str,
    *,
    kind: str = "int",
    group: int | None = None,
    symmetric: bool = True,
    targets: tuple[str, ...] = ("Linear",),
) -> Any:
    """A group of compressed-tensors' config_groups."""
    weights = {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "group_size": group,
        "symmetric": symmetric,
        "dynamic": False,
        "observer": "minmax",
    }
    return {"targets": list(targets), "weights": weights, "input_activations": None, "output_activations": None}


def compressed(*groups: Any, layout: str, ignore: tuple[str, ...] = ("lm_head",)) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": list(ignore),
    }
