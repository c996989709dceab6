"""Safetensors: a folder with one file, or with several and an index."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.compute.backends.matrix import Dense, Matrix
from services.compute.models.decoder import EmbeddingRows
from services.compute.weights.formats import StoredLayer, WeightFormat, read_format
from services.compute.weights.progress import LoadingProgress
from services.compute.weights.source import EMBEDDING, take_rows
from shared.process.errors import StartupError
from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


# of a multimodal checkpoint's text part, in older files and newer ones
TEXT_PREFIXES = ("language_model.model.", "model.language_model.", "model.text_model.")

# by a part of a name that tells them: LFM 2's names, and those of Granite 4 with and without mixtures; with those of
# most families
OTHER_NAMES: dict[str, dict[str, str]] = {
    "model.embedding_norm.": {
        "model.embedding_norm.": "model.norm.",
        ".operator_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".q_layernorm.": ".q_norm.",
        ".k_layernorm.": ".k_norm.",
        ".feed_forward.expert_bias": ".mlp.e_score_correction_bias",
        ".feed_forward.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
    },
    ".block_sparse_moe.router.": {
        ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
        ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
        ".block_sparse_moe.router.layer.": ".mlp.gate.",
        ".shared_mlp.input_linear.": ".mlp.shared_experts.gate_up_proj.",
        ".shared_mlp.output_linear.": ".mlp.shared_experts.down_proj.",
    },
    ".shared_mlp.": {
        ".shared_mlp.input_linear.": ".mlp.gate_up_proj.",
        ".shared_mlp.output_linear.": ".mlp.down_proj.",
    },
}

# of the model without its head, as embedding models are published (Qwen 3 Embedding)
BARE_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class StoredRows:
    """An embedding that stays in its file, mapped."""

    tensor: Tensor
    dtype: torch.dtype

    def __getitem__(self, ids: Tensor, /) -> Tensor:
        """ids: [T] int64. Returns [T, columns] in `dtype`."""
        return self.tensor[ids].to(self.dtype)


class SafetensorsSource:
    """A WeightSource; and of a packed checkpoint, the parts of its layers. The text part of a
    multimodal checkpoint has the names of a text model."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        quantization_config: dict[str, Any] | None = None,
        *,
        has_own_names: bool = False,
    ) -> None:
        """quantization_config: config.json's, of a format of weights/formats/; has_own_names: whether
        tensors keep the names that the files have. Raises StartupError."""
        self.folder = folder
        self.dtype = dtype
        self.device = device
        files = self._index()
        self._name_in_file = {name if has_own_names else _text_name(name): name for name in files}
        if not has_own_names:
            self._name_in_file = _with_common_names(self._name_in_file)
        if BARE_EMBEDDING in self._name_in_file and not has_own_names:
            self._name_in_file = {
                name if name.startswith("lm_head.") else f"model.{name}": of_file
                for name, of_file in self._name_in_file.items()
            }
        self.file_by_name = {name: files[of_file] for name, of_file in self._name_in_file.items()}
        self.format: WeightFormat | None = (
            read_format(config) if (config := quantization_config or self._older_config()) else None
        )
        self.kept: Counter[str] = Counter()  # quantized matrices, by how they are kept
        self._progress = LoadingProgress(len(self.file_by_name))
        self._open: dict[Path, Any] = {}

    def _index(self) -> dict[str, Path]:
        index = self.folder / "model.safetensors.index.json"
        try:
            if index.is_file():
                names = self._indexed(json.loads(index.read_text(encoding="utf-8")))
            else:
                names = {}
                files = sorted(self.folder.glob("*.safetensors"))
                for file in files:
                    with safe_open(file, framework="pt") as tensors:
                        names.update(dict.fromkeys(tensors.keys(), file))
                if files and not names:
                    raise ValueError(f"{files[0].name} holds no tensor")
        except (SafetensorError, OSError, ValueError, KeyError, RecursionError) as error:
            raise StartupError(f"{self.folder}: the weights can't be read: {error}") from None
        if not names:
            pickles = sorted(file.name for suffix in PICKLES for file in self.folder.glob("*" + suffix))
            why = (
                f"; {pickles[0]} is a pickle, which may run code when it is read: convert it to safetensors"
                if pickles
                else "; other formats are not read"
            )
            raise StartupError(f"{self.folder} holds no *.safetensors{why}")
        return names

    def _indexed(self, index: Any) -> dict[str, Path]:
        """The index's weight_map. Raises ValueError for one that is not of this folder's files."""
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict):
            raise ValueError("model.safetensors.index.json has no weight_map")
        for file in files.values():
            is_here = (
                isinstance(file, str)
                and file.isprintable()
                and not Path(file).is_absolute()
                and ".." not in Path(file).parts
            )
            if not is_here or not file.endswith(".safetensors"):
                raise ValueError(
                    f"model.safetensors.index.json names {str(file)[:80]!r}, which is not a safetensors file in the "
                    "folder"
                )
        return {name: self.folder / file for name, file in files.items()}

    def _older_config(self) -> dict[str, Any] | None:
        """The quantize_config.json that AutoGPTQ wrote before config.json said the same."""
        if not any(name.endswith(".qweight") for name in self.file_by_name):
            return None
        file = self.folder / "quantize_config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise StartupError(
                f"{self.folder} is quantized, and config.json has no quantization_config that says how"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise StartupError(f"{file}: {error}") from None
        if not isinstance(config, dict):
            raise StartupError(f"{file}: expected an object")
        return {"quant_method": "gptq"} | config

    def _file(self, name: str) -> Any:
        """The open file that holds the tensor. Raises StartupError."""
        file = self.file_by_name.get(name)
        if file is None:
            raise StartupError(f"{self.folder}: the checkpoint has no tensor {name}")
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{file}: {error}") from None
        return self._open[file]

    def tensor(self, name: str) -> Tensor:
        """The tensor as it is in its file, mapped. Raises StartupError."""
        file = self._file(name)
        try:
            tensor: Tensor = file.get_tensor(self._name_in_file[name])
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{self.file_by_name[name]}: {error}") from None
        self._progress.update()
        return tensor

    def stored_dtype(self, name: str) -> str:
        """The dtype as the file's header has it: BF16, I8, F8_E4M3. Raises StartupError."""
        file = self._file(name)
        try:
            return str(file.get_slice(self._name_in_file[name]).get_dtype())
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{self.file_by_name[name]}: {error}") from None

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape as the file's header has it. Raises StartupError."""
        file = self._file(name)
        try:
            return tuple(file.get_slice(self._name_in_file[name]).get_shape())
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{self.file_by_name[name]}: {error}") from None

    def dense(
        self, name: str, shape: tuple[int, ...], rows: Sequence[range] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        tensor = self.tensor(name)
        if tuple(tensor.shape) != shape:
            raise StartupError(
                f"{self.file_by_name[name]}: {name} has the shape {tuple(tensor.shape)}, config.json says {shape}"
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise StartupError(
                f"{self.file_by_name[name]}: {name} is {kind}, and config.json has no quantization_config that says "
                "how to read it"
            )
        return take_rows(tensor, rows).to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def has(self, name: str) -> bool:
        return name in self.file_by_name

    def matrix(
        self, name: str, shape: tuple[int, int], rows: Sequence[range] | None = None, dtype: torch.dtype | None = None
    ) -> Matrix:
        """dtype: of a matrix that is dense in the file, another than the model's."""
        layer = StoredLayer(self, name, *shape, rows)
        if self.format is None or not self.format.holds(layer):
            return Dense(self.dense(name + "weight", shape, rows, dtype))
        return self.matrix_of(layer)

    def matrix_of(self, layer: StoredLayer) -> Matrix:
        """The wanted rows of a quantized layer. Raises StartupError."""
        if self.format is None:
            raise layer.refuse("weight", "is quantized, and config.json has no quantization_config that says how")
        kept = self.format.matrix(layer)
        self.kept[kept.how] += 1
        return kept.matrix

    def one_of(self, name: str, number: int, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """The part `number` of a tensor [count, *shape] of one of these dtypes, as it is in its file.
        Raises StartupError."""
        file = self._file(name)
        try:
            whole = file.get_slice(self._name_in_file[name])
            if whole.get_shape()[1:] != list(shape) or number >= whole.get_shape()[0]:
                raise StartupError(
                    f"{self.file_by_name[name]}: {name} has the shape {tuple(whole.get_shape())}, config.json says "
                    f"{shape} for each expert"
                )
            part: Tensor = whole[number]
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{self.file_by_name[name]}: {error}") from None
        if part.dtype not in dtypes:
            kinds = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise StartupError(
                f"{self.file_by_name[name]}: {name} is {str(part.dtype).removeprefix('torch.')}; expected: {kinds}"
            )
        if number == 0:
            self._progress.update()
        return part.to(self.device)

    def embedding(self, shape: tuple[int, int], name: str = EMBEDDING) -> EmbeddingRows:
        """The model's own is read into memory, for a tied head; others stay in the file, on a CPU."""
        if name == EMBEDDING or self.device.type != "cpu":
            return self.dense(name, shape)
        tensor = self.tensor(name)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point() or tensor.element_size() < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise StartupError(
                f"{self.file_by_name[name]}: {name} is {kind} of the shape {tuple(tensor.shape)}; expected: float32, "
                f"float16 or bfloat16 of {shape}"
            )
        return StoredRows(tensor, self.dtype)

    def tied_head(
        self, embedding: EmbeddingRows | None, shape: tuple[int, int], rows: Sequence[range] | None = None
    ) -> Matrix:
        assert embedding is None or isinstance(embedding, Tensor)
        return Dense(self.dense(EMBEDDING, shape, rows) if embedding is None else take_rows(embedding, rows))

    def parts(self, prefix: str) -> dict[str, Tensor]:
        """A packed layer's parts, as they are."""
        return {name.removeprefix(prefix): self.tensor(name) for name in self.file_by_name if name.startswith(prefix)}

    @property
    def quantized_as(self) -> str:
        return "" if self.format is None else self.format.description

    def report(self, layers: range | None = None) -> None:  # noqa: ARG002
        if self.format is not None:
            kept = "; ".join(f"{count} {how}" for how, count in self.kept.most_common())
            log.info("the checkpoint is quantized", format=self.format.description, matrices=kept or "all dense")

    def close(self) -> None:
        self._progress.close()
        self._open.clear()


def _text_name(name: str) -> str:
    for prefix in TEXT_PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_head.") else name


def _with_common_names(names: dict[str, str]) -> dict[str, str]:
    """The names, and what they stand for, under those that most families have."""
    table = next((table for sign, table in OTHER_NAMES.items() if any(sign in name for name in names)), {})
    found = {}
    for name, meaning in names.items():
        for other, common in table.items():
            name = name.replace(other, common)
        found[name] = meaning
    return found
