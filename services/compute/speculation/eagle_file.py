"""A folder with an EAGLE-3 head, in either of the two layouts that are published.

The makers' own calls the head's one layer `midlayer`, and its config.json is that of a Llama of one
layer, with draft_vocab_size. The speculators library calls it `layers.0`, and puts the layer's
config into transformer_layer_config. All else has the same names in both: `fc` makes one state of
three of the target's, `d2t` says how far the id of each token that the head knows is from the
target's. The first heads were published as pytorch_model.bin alone, which is read as plain tensors.
"""

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.compute.models.architectures import read_config
from services.compute.models.config import ModelConfig
from services.compute.models.library_errors import first_line
from services.compute.weights.safetensors_source import SafetensorsSource
from shared.process.errors import StartupError

PICKLE = "pytorch_model.bin"
PREFIXES = re.compile(r"^(model\.)?(midlayer\.|layers\.0\.)?")
# what a file may hold in addition to the head: tables that the config gives too, and parts of the target
LEFT_OUT = re.compile(r"(self_attn\.)?rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight")
NAMES = re.compile(
    r"fc\.weight|input_norm\.weight|fc_norm\.\d+\.weight|(input_layernorm|hidden_norm|post_attention_layernorm|norm)\.weight|d2t|t2d"
    r"|self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)|mlp\.(gate|up|down)_proj\.weight|lm_head\.weight|embed_tokens\.weight"
)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MAX_TAPS = 16


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """The tensors of a head, in a model's dtype, by their names without the layer's."""

    config: ModelConfig  # of its one layer
    taps: tuple[int, ...]  # the target's layers whose inputs it reads; their number: what the last makes
    has_normed_residual: bool  # whether the layer adds to the state behind its norm
    has_normed_output: bool  # whether it is fed its last state behind the last norm
    tensors: dict[str, Tensor]
    token_ids: Tensor | None  # [V] int64: the tokens that the rows of its LM head mean; None: themselves

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def is_eagle(config: Mapping[str, Any], names: list[str]) -> bool:
    """Whether a folder with this config.json, and tensors of these names, holds an EAGLE head."""
    kinds = [config.get("speculators_model_type"), *(config.get("architectures") or [])]
    return (
        any("eagle" in str(kind).lower() for kind in kinds)
        or "draft_vocab_size" in config
        or any(PREFIXES.sub("", name) == "fc.weight" for name in names)
    )


def read_eagle(
    folder: Path, config: Mapping[str, Any], target: ModelConfig, dtype: torch.dtype, device: torch.device
) -> EagleWeights:
    """Read the head in a folder, with this config.json, for a target. Raises StartupError."""
    if next(folder.glob("*.safetensors"), None) is None and (folder / PICKLE).is_file():
        held = read_pickle(folder / PICKLE)
        return _EagleReader(folder, config, target, [*held], held.__getitem__).read(dtype, device)
    source = SafetensorsSource(folder, dtype, device)
    try:
        return _EagleReader(folder, config, target, [*source.file_by_name], source.tensor).read(dtype, device)
    finally:
        source.close()


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickle. Nothing else is read from it, and nothing is run. Raises
    StartupError."""
    try:
        held: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"{file}: it can't be read as plain tensors: {first_line(error)}") from None
    if not isinstance(held, dict) or not all(
        isinstance(name, str) and isinstance(each, Tensor) for name, each in held.items()
    ):
        raise StartupError(f"{file}: it holds other things than tensors by name")
    return held


def read_taps(folder: Path, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads. Raises StartupError.

    Where config.json does not say: the makers' choice. A list that begins with 1 counts what layers
    make, from the first's on: so do those of whom SGLang learned to tell the two apart.
    """
    within = config.get("eagle_config")
    found: Any = (
        config.get(LAYER_IDS)
        or (within.get(LAYER_IDS) if isinstance(within, dict) else None)
        or [2, num_layers // 2, num_layers - 3]
    )
    if not isinstance(found, list) or not 0 < len(found) <= MAX_TAPS or not all(type(each) is int for each in found):
        raise StartupError(f"--heads {folder}: {LAYER_IDS} is {str(found)[:80]}, not a list of layers")
    taps = tuple(each + (found[0] == 1) for each in found)
    if min(taps) < 0 or max(taps) > num_layers:
        raise StartupError(
            f"--heads {folder}: it reads what enters the layers {', '.join(map(str, taps))}, the model has {num_layers}"
        )
    return taps


def layer_config(folder: Path, config: Mapping[str, Any]) -> ModelConfig:
    """The config of the head's layer, which is a Llama's. Raises StartupError."""
    found: Any = config.get("transformer_layer_config", config)
    if not isinstance(found, Mapping):
        raise StartupError(f"--heads {folder}: transformer_layer_config is not an object")
    if found.get("num_hidden_layers", 1) != 1:
        raise StartupError(
            f"--heads {folder}: num_hidden_layers is {str(found['num_hidden_layers'])[:80]}; an EAGLE-3 head of one "
            "layer is read"
        )
    has_window = bool(found.get("use_sliding_window"))
    kinds = {"layer_types": list(found.get("layer_types") or ["sliding_attention"])[:1]} if has_window else {}
    quantized = config.get("quantization_config") or found.get("quantization_config")
    if quantized:
        raise StartupError(f"--heads {folder}: it is quantized; heads are read in 16 or 32 bits")
    try:
        return read_config(
            {
                **found,
                **kinds,
                "num_hidden_layers": 1,
                "architectures": ["MinistralForCausalLM" if has_window else "LlamaForCausalLM"],
            }
        )
    except StartupError as error:
        raise StartupError(f"--heads {folder}: {error}") from None


class _EagleReader:
    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        target: ModelConfig,
        names: list[str],
        read: Callable[[str], Tensor],
    ) -> None:
        """read: a tensor by its name in the file."""
        self.folder = folder
        self.config = config
        self.target = target
        self.read_tensor = read
        self.names: dict[str, str] = {}
        for name in names:
            short = PREFIXES.sub("", name)
            if NAMES.fullmatch(short):
                self.names[short] = name
            elif not LEFT_OUT.fullmatch(short):
                raise StartupError(f"--heads {folder}: {name} is no tensor of an EAGLE-3 head")

    def read(self, dtype: torch.dtype, device: torch.device) -> EagleWeights:
        for name in ("fc.weight", "hidden_norm.weight"):
            if name not in self.names:
                raise StartupError(
                    f"--heads {self.folder}: it has no {name}: is it an older EAGLE's? Only EAGLE-3 heads are read"
                )
        for name, value in (("target_hidden_size", self.target.hidden_size), ("vocab_size", self.target.vocab_size)):
            found = self.config.get(name, (self.config.get("transformer_layer_config") or {}).get(name))
            if found is not None and found != value:
                raise StartupError(
                    f"--heads {self.folder}: {name} is {str(found)[:80]}, the model's is {value}: this is another "
                    "model's head"
                )
        layer, taps = (
            layer_config(self.folder, self.config),
            read_taps(self.folder, self.config, self.target.num_layers),
        )
        token_ids = self._token_ids()
        shapes = self._shapes(layer, len(taps), self.target.vocab_size if token_ids is None else len(token_ids))
        tensors = {
            name: self._checked(name, shape).to(device=device, dtype=dtype, copy=True) for name, shape in shapes.items()
        }
        return EagleWeights(
            layer,
            taps,
            bool(self.config.get("norm_before_residual", "speculators_model_type" in self.config)),
            bool(self.config.get("norm_output")),
            tensors,
            token_ids,
        )

    def _shapes(self, layer: ModelConfig, num_taps: int, num_tokens: int) -> dict[str, tuple[int, ...]]:
        """The tensors that are wanted. Raises StartupError where others of the target's can't do
        for those that are not there."""
        hidden, inner, target = layer.hidden_size, layer.intermediate_size, self.target.hidden_size
        q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, num_taps * target),
            "hidden_norm.weight": (hidden,),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "norm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, 2 * hidden),
            "self_attn.k_proj.weight": (kv, 2 * hidden),
            "self_attn.v_proj.weight": (kv, 2 * hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        optional: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.bias": (q,),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.bias": (kv,),
            "self_attn.o_proj.bias": (hidden,),
            "self_attn.q_norm.weight": (layer.head_dim,),
            "self_attn.k_norm.weight": (layer.head_dim,),
            "input_norm.weight": (num_taps * target,),
            "embed_tokens.weight": (self.target.vocab_size, hidden),
            "lm_head.weight": (num_tokens, hidden),
        } | {f"fc_norm.{number}.weight": (target,) for number in range(num_taps)}
        if "embed_tokens.weight" not in self.names and hidden != target:
            raise StartupError(
                f"--heads {self.folder}: it has no embed_tokens, and its hidden_size is {hidden}, the model's is "
                f"{target}"
            )
        is_own = "lm_head.weight" not in self.names
        if is_own and (hidden != target or num_tokens != self.target.vocab_size):
            raise StartupError(f"--heads {self.folder}: it has no lm_head, and the model's does not fit it")
        missing = next((name for name in shapes if name not in self.names), None)
        if missing is not None:
            raise StartupError(f"--heads {self.folder}: the head has no {missing}")
        return shapes | {name: shape for name, shape in optional.items() if name in self.names}

    def _token_ids(self) -> Tensor | None:
        """The target's tokens, by the head's. Raises StartupError for others."""
        if "d2t" in self.names:
            distances = self._whole_numbers("d2t")
            token_ids = torch.arange(len(distances)) + distances
        elif "t2d" in self.names:
            token_ids = self._whole_numbers("t2d").nonzero().flatten()
        else:
            return None
        if not len(token_ids) or int(token_ids.min()) < 0 or int(token_ids.max()) >= self.target.vocab_size:
            raise StartupError(f"--heads {self.folder}: d2t leads to tokens that the model does not have")
        return token_ids

    def _whole_numbers(self, name: str) -> Tensor:
        numbers = self.read_tensor(self.names[name]).cpu()
        if numbers.is_floating_point() or numbers.dim() != 1:
            raise StartupError(f"--heads {self.folder}: {name} is not a list of whole numbers")
        return numbers.long()

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.read_tensor(self.names[name])
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise StartupError(
                f"--heads {self.folder}: {self.names[name]} has the shape {tuple(tensor.shape)}, not {shape}: is this "
                "another model's head?"
            )
        if not bool(tensor.isfinite().all()):
            raise StartupError(f"--heads {self.folder}: {self.names[name]} holds NaN or infinite values")
        return tensor
