"""GGUF: one file or several parts, memory-mapped. Matrices stay in the file's own blocks where those are groups of
32; other types are dequantized to the model's dtype."""

import math
import mmap
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from services.compute.backends.matrix import Dense, Matrix, concatenate
from services.compute.models.decoder import EmbeddingRows
from services.compute.weights.gguf_blocks import FORMATS, has_wide_scales, to_grouped
from services.compute.weights.gguf_layouts import TensorLayout, find_layout, layouts_of
from services.compute.weights.progress import LoadingProgress
from services.compute.weights.source import EMBEDDING, in_halves, take_rows
from shared.model.gguf.family import count_layers
from shared.model.gguf.library_families import LIBRARY_FAMILIES
from shared.model.gguf.parts import read_model
from shared.model.gguf.reader import GgufHead, TensorInfo
from shared.process.errors import StartupError
from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")


FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}
SLICE = 1 << 22  # weights that are dequantized at once: in float32 they take four bytes each

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?")
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
}
# which follow from the metadata
UNNEEDED = re.compile(r"blk\.\d+\.(rope_freqs|attn_rot_embd|rope_factors_long|rope_factors_short)\.weight")
OF_KEYS_AND_VALUES = re.compile(r"blk\.(\d+)\.(?:attn_k|attn_v|attn_k_norm)\.weight")
IN_POST_NORM_LAYER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
IN_LAYER_OF: dict[str, dict[str, str]] = {
    **dict.fromkeys(("gemma2", "gemma3", "olmo2", "exaone4"), IN_POST_NORM_LAYER),
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "gpt-oss": {
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.sinks": "attn_sinks",
        "mlp.router": "ffn_gate_inp",
    },
}
# an expert's matrix or bias, which is a part of all experts' in one tensor; gates and ups may be one,
# too
EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:\w+\.)?experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
# whose files have the rows of q and k in another order
PERMUTED = ("llama", "mistral3", "granite", "smollm3")
# whose files have norms as 1 + weight, but for those of heads of linear attention
SHIFTED = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
# whose last layers take keys and values from others
SHARING = ("gemma3n", "gemma4")
# one of several matrices that are one tensor of the file
STACKED = re.compile(r"(model\.altup_(?:unembed_)?projections)\.(\d+)\.weight")
# makes keys and values of compressed ones (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1)
EXPANSION = ".kv_b_proj.weight"


@dataclass(frozen=True, slots=True)
class GgufRows:
    """An embedding that stays as the file has it, in its blocks. Dense, it would take two to four times
    the memory, in a small model nearly as much as all layers: 525 MB in the shape llama-3.2-1b, whose
    file in Q4_K_M has 802. Those rows that are asked for are dequantized: 0.12 ms for one of
    2,048 in Q6_K, 12 ms for 512."""

    data: mmap.mmap  # of the whole file; the matrix keeps it open
    offset: int  # bytes
    num_rows: int
    row_bytes: int
    kind: GGMLQuantizationType
    dtype: torch.dtype

    def __getitem__(self, ids: Tensor, /) -> Tensor:
        """ids: [T] int64, one at least. Returns [T, columns] in `dtype`."""
        rows = np.frombuffer(self.data, np.uint8, self.num_rows * self.row_bytes, self.offset).reshape(
            self.num_rows, self.row_bytes
        )
        return torch.from_numpy(gguf.dequantize(rows[ids.numpy()], self.kind)).to(self.dtype)


class GgufSource:
    """A WeightSource."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, *, is_native: bool = True) -> None:
        """is_native: for our own executor, not for transformers' modules."""
        self.folder = path
        self.dtype = dtype
        self.device = device
        self.head: GgufHead = read_model(path)
        self.architecture = self.head.text("general.architecture")
        self._library_names = (
            library_names(self.head, self.architecture) if self.architecture in LIBRARY_FAMILIES else None
        )
        self.layouts = layouts_of(self.head, is_native=is_native)
        self._read: set[str] = set()
        self._kinds = {name: self._check(info) for name, info in self.head.tensors.items()}
        self._maps = {each: _map_file(each) for each in {info.path for info in self.head.tensors.values()}}
        # a tied embedding is read twice, and a tensor of experts once for each
        of_experts = sum(info.shape[0] - 1 for info in self.head.tensors.values() if "_exps." in info.name)
        num_reads = len(self._kinds) + ("output.weight" not in self._kinds) + of_experts
        self._progress = LoadingProgress(num_reads)

    def _check(self, info: TensorInfo) -> GGMLQuantizationType:
        """The tensor's type. Raises StartupError."""
        try:
            kind = GGMLQuantizationType(info.type_id)
        except ValueError:
            raise StartupError(f"{self.folder}: {info.name} has an unknown type, number {info.type_id}") from None
        if info.shape[-1] % GGML_QUANT_SIZES[kind][0]:
            raise StartupError(
                f"{self.folder}: {info.name} has rows of {info.shape[-1]}, which blocks of {kind.name} don't fill"
            )
        return kind

    @property
    def quantized_as(self) -> str:
        """The type of most of the tensors that keep their form; what is dequantized anyway may be
        quantized again."""
        kept = Counter(kind.name for kind in self._kinds.values() if self._is_kept(kind)).most_common(1)
        return f"GGUF, {kept[0][0]}" if kept else ""

    def report(self, layers: range | None = None) -> None:
        """Log in one line which types the file has, and how each is kept. Raises StartupError if
        tensors of these layers were not read. layers: None means all."""
        left = [
            name
            for name in self._kinds
            if _is_of_layers(name, layers) and name not in self._read and not self._is_unneeded(name)
        ]
        if left:
            others = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise StartupError(
                f"{self.folder}: {left[0]}{others} belong to no layer that Penstock knows: without them the model "
                "would answer wrongly"
            )
        counts = Counter(self._kinds.values()).most_common()
        grouped = ", ".join(f"{count} {kind.name}" for kind, count in counts if self._is_kept(kind))
        dense = ", ".join(f"{count} {kind.name}" for kind, count in counts if not self._is_kept(kind))
        kept = [f"{grouped} as they are"] if grouped else []
        kept += [f"{dense} in {str(self.dtype).removeprefix('torch.')}"] if dense else []
        log.info("GGUF weights", file=self.folder.name, tensors="; ".join(kept))

    def _is_unneeded(self, name: str) -> bool:
        """Also what layers have that take keys and values from others, as all of Gemma 3n's files
        have it; and the layers that foresee tokens."""
        num_layers = count_layers(self.head, f"{self.architecture}.")
        shared = (
            int(self.head.metadata.get(f"{self.architecture}.attention.shared_kv_layers", 0))
            if self.architecture in SHARING
            else 0
        )
        found = OF_KEYS_AND_VALUES.fullmatch(name)
        return (
            UNNEEDED.fullmatch(name) is not None
            or (found is not None and int(found[1]) >= num_layers - shared)
            or _is_of_layers(name, range(num_layers, self.head.number(f"{self.architecture}.block_count")))
        )

    def _is_kept(self, kind: GGMLQuantizationType) -> bool:
        """Whether a matrix of that type keeps its form. In float32, for which no kernel reads any,
        it is dequantized."""
        return kind in FORMATS and self.dtype != torch.float32

    def dense(
        self, name: str, shape: tuple[int, ...], rows: Sequence[range] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """dtype: another than the model's."""
        if (found := find_layout(self.layouts, name)) is not None:
            return self._arranged(*found, name, shape).to(device=self.device, dtype=dtype or self.dtype)
        if name.endswith(EXPANSION) and not self.has(name):
            return self._expansion(name.removesuffix(EXPANSION), shape)
        if rows is not None and len(shape) == 1:
            return take_rows(self.dense(name, shape, dtype=dtype), rows)
        info, kind = self._find(name, shape)
        return self._dense(info, kind, name, shape, rows, dtype)

    def _arranged(self, layout: TensorLayout, start: str, name: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter of what the file has in another form, in float32 if it does."""
        self.check(name, shape)
        parts = [
            self._dense(
                info, self._kinds[info.name], info.name, info.shape, layout.part_of(info.shape[0]), torch.float32
            )
            for info in (self.head.tensors[start + each] for each in layout.tensors)
        ]
        values = torch.cat(parts, dim=max(parts[0].dim() - 2, 0)) if len(parts) > 1 else parts[0]
        values = values if layout.values is None else layout.values(values, shape)
        values = values if layout.rows is None else values[layout.rows(self.head)]
        return values if layout.columns is None else values[:, layout.columns(self.head)]

    def _dense(
        self,
        info: TensorInfo,
        kind: GGMLQuantizationType,
        name: str,
        shape: tuple[int, ...],
        rows: Sequence[range] | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        is_shifted = self.architecture in SHIFTED and name.endswith("norm.weight") and "linear_attn." not in name
        offset = 1.0 if is_shifted else 0.0
        data = self._rows(info, kind, name, rows)
        if kind in FLOATS:
            values = data.view(FLOATS[kind])
            return (
                (values.float() - offset if offset else values)
                .to(device=self.device, dtype=dtype or self.dtype)
                .reshape(-1, *shape[1:])
            )
        return self._dequantize(data, kind, shape if rows is None else (len(data), *shape[1:])).to(
            device=self.device, dtype=dtype
        )

    def matrix(
        self, name: str, shape: tuple[int, int], rows: Sequence[range] | None = None, dtype: torch.dtype | None = None
    ) -> Matrix:
        """dtype: of a matrix that is dense in the file, and has no layout, another than the model's."""
        if (found := find_layout(self.layouts, name + "weight")) is None:
            return self._matrix(*self._find(name + "weight", shape), name, shape, rows, dtype)
        if not self.keeps(name + "weight"):
            return Dense(self.dense(name + "weight", shape))
        self.check(name + "weight", shape)
        layout, start = found
        infos = [self.head.tensors[start + each] for each in layout.tensors]
        return concatenate(
            [
                self._matrix(
                    each,
                    self._kinds[each.name],
                    each.name,
                    (each.shape[0], shape[1]),
                    layout.part_of(each.shape[0]),
                )
                for each in infos
            ],
            self.dtype,
        )

    def _matrix(
        self,
        info: TensorInfo,
        kind: GGMLQuantizationType,
        name: str,
        shape: tuple[int, int],
        rows: Sequence[range] | None,
        dtype: torch.dtype | None = None,
    ) -> Matrix:
        if not self._is_kept(kind):
            return Dense(self._dense(info, kind, name, shape, rows, dtype))
        # all of a matrix decides whether float16 can hold its scales
        size, is_judged = GGML_QUANT_SIZES[kind][1], kind == GGMLQuantizationType.MXFP4
        data = self._rows(info, kind, name, None if is_judged else rows)
        is_wide = has_wide_scales(data, kind, size)
        data = take_rows(data, rows) if is_judged else data
        if is_wide:
            log.warning(
                "float16 can't hold this tensor's scales: it is dequantized", file=self.folder.name, tensor=info.name
            )
            return Dense(self._dequantize(data, kind, (len(data), shape[1])).to(self.device))
        grouped = to_grouped(data, kind, size)
        moved: dict[str, Any] = {
            each.name: part.to(self.device)
            for each in fields(grouped)
            if isinstance(part := getattr(grouped, each.name), Tensor)
        }
        return replace(grouped, **moved)

    def expert(self, name: str, number: int, shape: tuple[int, int], *, is_transposed: bool) -> Matrix:
        """An expert's matrix [n, k], of the library's parameter of all of them."""
        if is_transposed:
            raise StartupError(f"{self.folder}: {name}: no files of experts that transformers transposes are read")
        of_module, _, part = name.rpartition(".")
        if part != "gate_up_proj":
            return self.matrix(f"{of_module}.{number}.{part}.", shape)
        half = shape[0] // 2, shape[1]
        gate, up = (self.matrix(f"{of_module}.{number}.{which}_proj.", half) for which in ("gate", "up"))
        return concatenate([gate, up], self.dtype)

    def has(self, name: str) -> bool:
        return find_layout(self.layouts, name) is not None or self._translate(name) in self._kinds

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises StartupError if there is no such tensor, or in another shape."""
        if (found := find_layout(self.layouts, name)) is None:
            self._find(name, shape)
            return
        layout, start = found
        if missing := [each for each in layout.tensors if start + each not in self.head.tensors]:
            raise StartupError(f"{self.folder}: the file has no tensor {start}{missing[0]} ({name})")
        shapes = [self.head.tensors[start + each].shape for each in layout.tensors]
        if sum(map(math.prod, shapes)) != math.prod(shape) * (1 if layout.third is None else 3):
            raise StartupError(
                f"{self.folder}: {start}{layout.tensors[0]} has the shape {shapes[0]}, the metadata say that {name} "
                f"is {shape}"
            )

    def check_modules(self, model: Any) -> None:
        """Raises StartupError for a parameter of the library's modules that the file has not, or in another shape:
        before any takes memory."""
        for name, parameter in model.named_parameters():
            shape, (start, _, part) = tuple(parameter.shape), name.rpartition(".")
            if part in ("gate_up_proj", "down_proj") and not self.has(name):
                is_down = part == "down_proj"
                self.check(
                    f"{start}.0.{part if is_down else 'gate_proj'}.weight", (shape[1] // (2 - is_down), shape[2])
                )
            elif self.has(name) or (name != "lm_head.weight" and not name.endswith(EXPANSION)):
                self.check(name, shape)

    def keeps(self, name: str) -> bool:
        """Whether the matrix of that name, if there is one, keeps its form."""
        if (found := find_layout(self.layouts, name)) is not None:
            layout, start = found
            kinds = [self._kinds.get(start + each) for each in layout.tensors]
            return layout.values is None and all(kind is not None and self._is_kept(kind) for kind in kinds)
        kind = self._kinds.get(self._translate(name))
        return kind is not None and self._is_kept(kind)

    def orders(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """The place of each row and of each column of a matrix in what `matrix` returns; None: they
        are in their order."""
        if (found := find_layout(self.layouts, name)) is None or not self.keeps(name):
            return None, None
        rows, columns = found[0].rows, found[0].columns
        return (rows and rows(self.head).to(self.device)), (columns and columns(self.head).to(self.device))

    def embedding(self, shape: tuple[int, int], name: str = EMBEDDING) -> Tensor | GgufRows:
        info, kind = self._find(name, shape)
        if self.device.type != "cpu" or not self._is_kept(kind):
            return self.dense(name, shape)
        self._read.add(info.name)
        self._progress.update()
        return GgufRows(_map_file(info.path), info.offset, shape[0], info.size_bytes // shape[0], kind, self.dtype)

    def kept_embedding(self, shape: tuple[int, int], name: str) -> Tensor | GgufRows | None:
        """An embedding that keeps its form; None: it does not."""
        return self.embedding(shape, name) if self.keeps(name) else None

    def is_tied(self, head: str, embedding: str) -> bool:  # noqa: ARG002
        """Whether these parameters are one tensor of the file."""
        return not self.has(head)

    def tied_head(
        self,
        embedding: EmbeddingRows | None,  # noqa: ARG002
        shape: tuple[int, int],
        rows: Sequence[range] | None = None,  # noqa: ARG002, RUF100
    ) -> Matrix:
        return self.matrix("model.embed_tokens.", shape, rows)

    def close(self) -> None:
        self._progress.close()
        for each in self._maps.values():
            each.close()

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[TensorInfo, GGMLQuantizationType]:
        """The tensor of a Hugging Face name, of that shape. Raises StartupError."""
        if (match := EXPERT.fullmatch(name)) is not None:
            return self._find_expert(f"blk.{match[1]}.ffn_", int(match[2]), match[3], f"_exps.{match[4]}", shape)
        if (match := STACKED.fullmatch(name)) is not None:
            stack, kind = self._find(
                match[1] + ".weight", (self.head.number(f"{self.architecture}.altup.num_inputs") - 1, *shape)
            )
            part = replace(stack, shape=shape)
            return replace(part, offset=stack.offset + int(match[2]) * part.size_bytes), kind
        gguf_name = self._translate(name)
        info = self.head.tensors.get(gguf_name)
        if info is not None and info.shape == shape[1:] and shape[0] == 1:  # a matrix of one row may be a row
            info = replace(info, shape=shape)
        if info is None:
            raise StartupError(f"{self.folder}: the file has no tensor {gguf_name} ({name})")
        if info.shape != shape:
            raise StartupError(f"{self.folder}: {gguf_name} has the shape {info.shape}, the metadata says {shape}")
        return info, self._kinds[gguf_name]

    def _find_expert(
        self, start: str, number: int, which: str, end: str, shape: tuple[int, ...]
    ) -> tuple[TensorInfo, GGMLQuantizationType]:
        """The place of an expert's matrix, or bias, in the tensor of all experts, whose name has this
        start and end. Raises StartupError."""
        name, height = start + which + end, shape[0]
        if name not in self.head.tensors and which != "down":
            name, height = start + "gate_up" + end, 2 * shape[0]
        info = self.head.tensors.get(name)
        if info is None:
            raise StartupError(f"{self.folder}: the file has no tensor {start}{which}{end} (of experts)")
        expected = (self.head.number(f"{self.architecture}.expert_count"), height, *shape[1:])
        if info.shape != expected:
            raise StartupError(f"{self.folder}: {name} has the shape {info.shape}, the metadata says {expected}")
        part = replace(info, shape=shape)
        place = number * (height // shape[0]) + (height > shape[0] and which == "up")
        return replace(part, offset=info.offset + place * part.size_bytes), self._kinds[name]

    def _translate(self, name: str) -> str:
        """A Hugging Face name as GGUF has it."""
        if self._library_names is not None:
            return translate_library_name(self._library_names, name)
        in_layer = IN_LAYER | IN_LAYER_OF.get(self.architecture, {})
        if (match := LAYER.fullmatch(name)) is not None and match[2] in in_layer:
            return f"blk.{match[1]}.{in_layer[match[2]]}.{match[3] or 'weight'}"
        stem, _, kind = name.rpartition(".")
        return f"{TOP[stem]}.{kind}" if stem in TOP else name

    def _rows(self, info: TensorInfo, kind: GGMLQuantizationType, name: str, rows: Sequence[range] | None) -> Tensor:
        """A copy of these rows' bytes, or of all rows', [rows, bytes of a row] uint8, with the rows as
        Hugging Face has them."""
        num_rows = math.prod(info.shape[:-1]) if len(info.shape) > 1 else info.shape[0] if kind in FLOATS else 1
        mapped = np.frombuffer(self._maps[info.path], np.uint8, info.size_bytes, info.offset).reshape(num_rows, -1)
        places = self._places(name, num_rows, rows)
        parts = (
            [mapped[each.start : each.stop] for each in rows or [range(num_rows)]]
            if places is None
            else [mapped[places]]
        )
        data = torch.from_numpy(np.concatenate(parts))
        _forget(self._maps[info.path], info.offset, info.size_bytes)
        self._read.add(info.name)
        self._progress.update()
        return data

    def _places(self, name: str, num_rows: int, rows: Sequence[range] | None) -> np.ndarray | None:
        """Where the file has the rows of a matrix; None: in their order."""
        heads = {".self_attn.q_proj.": "head_count", ".self_attn.k_proj.": "head_count_kv"}
        for part, key in heads.items():
            if self.architecture in PERMUTED and part in name:
                attention = f"{self.architecture}.attention."
                num_heads = self.head.number(attention + key, self.head.number(attention + "head_count"))
                # there, a head's two halves, which RoPE turns together, alternate row by row
                return take_rows(in_halves(num_rows, num_rows // num_heads), rows).numpy()
        return None

    def _expansion(self, attention: str, shape: tuple[int, ...]) -> Tensor:
        """The matrix that newer files have in two tensors: of each head [rank, keys] and [values, rank]. Returns
        [heads * (keys + values), rank]."""
        num_heads = self.head.number(f"{self.architecture}.attention.head_count")
        keys = self.head.tensors.get(self._translate(f"{attention}.k_b_proj.weight"))
        num_keys = 0 if keys is None else keys.shape[-1]
        sizes = (num_heads, shape[1], num_keys), (num_heads, shape[0] // num_heads - num_keys, shape[1])
        parts = [
            self.dense(f"{attention}.{which}_b_proj.weight", size) for which, size in zip("kv", sizes, strict=True)
        ]
        return torch.cat([parts[0].transpose(1, 2), parts[1]], dim=1).flatten(0, 1)

    def _dequantize(self, rows: Tensor, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Tensor:
        """Widen to the model's dtype, a slice of rows at a time."""
        result = torch.empty(rows.shape[0], shape[-1], dtype=self.dtype)
        step = max(1, SLICE // shape[-1])
        for begin in range(0, rows.shape[0], step):
            try:
                values = gguf.dequantize(rows[begin : begin + step].numpy(), kind)
            except NotImplementedError:
                raise StartupError(f"{self.folder}: tensors of the type {kind.name} can't be dequantized") from None
            result[begin : begin + step] = torch.from_numpy(values)
        return result.reshape(shape)


def library_names(head: GgufHead, architecture: str) -> gguf.TensorNameMap:
    """The names of transformers' parameters as GGUF has them, from the `gguf` package."""
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, head.number(f"{architecture}.block_count"))


def translate_library_name(names: gguf.TensorNameMap, name: str) -> str:
    """name: of a parameter, which ends otherwise than a file's tensor if it belongs to no layer of
    the library's."""
    if not name.endswith((".weight", ".bias")):
        name = name.removesuffix("_bias") + ".bias" if name.endswith("_bias") else name + ".weight"
    suffixes = (".weight", ".bias")
    # the names of a checkpoint, which the library changed, or our own executor
    published = name.replace("model.", "backbone.", 1), name.replace("model.norm.", "model.embedding_norm.")
    return next((found for each in (name, *published) if (found := names.get_name(each, suffixes))), name)


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _forget(mapped: mmap.mmap, offset: int, size: int) -> None:
    """Pages that were copied need not count as the process' memory any longer."""
    begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, begin, offset + size - begin)


def _is_of_layers(name: str, layers: range | None) -> bool:
    """Whether the tensor is of one of these layers; None: of any."""
    return name.startswith("blk.") and (layers is None or name.split(".")[1] in map(str, layers))
