"""A folder of Medusa heads, in either of the two layouts that are published.

The makers' own has every head as a list, `0.0.linear.weight` to `0.1.weight`: residual blocks with
biases, and behind them the head's LM head. The other, which vLLM reads and `penstock train-heads`
writes, has `blocks.0.layers.0.weight` and `lm_heads.0.weight`, and may leave biases out, have one
LM head for all, and know only some tokens, whose ids are in `token_map`. How many heads there are
is taken from the tensors: some config.json say another number.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.compute.weights.safetensors_source import SafetensorsSource
from shared.process.errors import StartupError

PREFIXES = re.compile(r"^(medusa_heads?|model)\.")
BLOCK = re.compile(r"(?:blocks\.)?(\d+)\.(?:layers\.)?(\d+)\.(?:linear\.)?(weight|bias)")
LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
SHARED_LM_HEAD, TOKEN_MAP = "lm_head.weight", "token_map"
MAX_HEADS, MAX_LAYERS = 16, 16


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The tensors of some heads, in a model's dtype."""

    # by head and layer: [hidden, hidden], and [hidden] or None
    blocks: list[list[tuple[Tensor, Tensor | None]]]
    # [V, hidden] each: of every head, or one for all; none: the model's own is meant
    lm_heads: list[Tensor]
    token_ids: Tensor | None  # [V] int64: the tokens that the rows of an LM head mean; None: all

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        parts = [part for head in self.blocks for block in head for part in block if part is not None]
        return sum(part.nbytes for part in (*parts, *self.lm_heads))


def read_medusa(
    folder: Path, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> HeadWeights:
    """Read the heads of a model of this size. Raises StartupError."""
    if not folder.is_dir():
        raise StartupError(f"--heads {folder}: no such folder")
    check_config(folder, hidden_size, vocab_size)
    source = SafetensorsSource(folder, dtype, device)
    try:
        return _HeadReader(source, hidden_size, vocab_size).read()
    finally:
        source.close()


def check_config(folder: Path, hidden_size: int, vocab_size: int) -> None:
    """Raises StartupError if config.json says that the heads are another model's."""
    config = read_json(folder)
    for name, wanted in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if config.get(name, wanted) != wanted:
            raise StartupError(
                f"--heads {folder}: {name} is {str(config[name])[:80]}, the model's is {wanted}: these are another "
                "model's heads"
            )


def read_json(folder: Path) -> dict[str, Any]:
    """The folder's config.json; empty, if it has none: the tensors say what is needed. Raises
    StartupError."""
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{folder / 'config.json'}: {error}") from None
    if not isinstance(config, dict):
        raise StartupError(f"{folder / 'config.json'}: expected an object")
    return config


class _HeadReader:
    def __init__(self, source: SafetensorsSource, hidden_size: int, vocab_size: int) -> None:
        self.source = source
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.names = {PREFIXES.sub("", name): name for name in source.file_by_name}
        self.found: dict[tuple[int, int], dict[str, str]] = {}  # by head and layer: names by weight or bias
        self.lm_heads: dict[int, str] = {}
        for short, name in self.names.items():
            if match := BLOCK.fullmatch(short):
                self.found.setdefault((int(match[1]), int(match[2])), {})[match[3]] = name
            elif match := LM_HEAD.fullmatch(short):
                self.lm_heads[int(match[1])] = name
            elif short not in (SHARED_LM_HEAD, TOKEN_MAP):
                raise StartupError(f"--heads {source.folder}: {name} is no tensor of Medusa heads")

    def read(self) -> HeadWeights:
        heads = self._heads()
        # in the makers' layout the last of a head's list is its LM head, which no linear layer is part of
        if (
            not self.lm_heads
            and all(".linear." not in self.found[number, count - 1]["weight"] for number, count in enumerate(heads))
            and self._are_lists()
        ):
            heads = [count - 1 for count in heads]
            self.lm_heads = {number: self.found[number, count]["weight"] for number, count in enumerate(heads)}
        token_ids = self._token_ids()
        lm_heads = self._lm_heads(len(heads), token_ids)
        if token_ids is not None and not lm_heads:
            raise StartupError(f"--heads {self.source.folder}: token_map without an LM head")
        blocks = [
            [self._block(self.found[number, layer]) for layer in range(count)] for number, count in enumerate(heads)
        ]
        return HeadWeights(blocks, lm_heads, token_ids)

    def _heads(self) -> list[int]:
        """How many tensors each head's list has. Raises StartupError where one is missing."""
        folder, numbers = self.source.folder, sorted({number for number, _ in self.found})
        if not numbers:
            raise StartupError(f"--heads {folder}: no Medusa heads are in it")
        counts = [max(layer for each, layer in self.found if each == number) + 1 for number in numbers]
        if numbers[-1] >= MAX_HEADS or max(counts) > MAX_LAYERS + 1:
            raise StartupError(f"--heads {folder}: more than {MAX_HEADS} heads, or than {MAX_LAYERS} layers of one")
        for number in range(numbers[-1] + 1):
            for layer in range(counts[numbers.index(number)] if number in numbers else 1):
                if "weight" not in self.found.get((number, layer), {}):
                    raise StartupError(f"--heads {folder}: layer {layer} of head {number} has no weight")
        return counts

    def _are_lists(self) -> bool:
        return not any(short.startswith("blocks.") for short in self.names)

    def _token_ids(self) -> Tensor | None:
        if TOKEN_MAP not in self.names:
            return None
        token_ids = self.source.tensor(self.names[TOKEN_MAP]).cpu()
        is_whole = not token_ids.is_floating_point() and token_ids.dim() == 1 and len(token_ids) > 0
        if not is_whole or int(token_ids.min()) < 0 or int(token_ids.max()) >= self.vocab_size:
            raise StartupError(f"--heads {self.source.folder}: token_map is not a list of the model's tokens")
        return token_ids.long()

    def _lm_heads(self, num_heads: int, token_ids: Tensor | None) -> list[Tensor]:
        names = [self.lm_heads[number] for number in sorted(self.lm_heads)]
        if SHARED_LM_HEAD in self.names:
            names = [self.names[SHARED_LM_HEAD]]
        if len(names) not in (0, 1, num_heads):
            raise StartupError(f"--heads {self.source.folder}: {num_heads} heads and {len(names)} LM heads")
        size = self.vocab_size if token_ids is None else len(token_ids)
        found = []
        for name in names:
            weight = self.source.tensor(name)
            if token_ids is not None and weight.shape[:1] == (self.vocab_size,):
                weight = weight[token_ids]
            found.append(self._checked(name, weight, (size, self.hidden_size)))
        return found

    def _block(self, names: dict[str, str]) -> tuple[Tensor, Tensor | None]:
        weight = self._checked(
            names["weight"], self.source.tensor(names["weight"]), (self.hidden_size, self.hidden_size)
        )
        bias = (
            self._checked(names["bias"], self.source.tensor(names["bias"]), (self.hidden_size,))
            if "bias" in names
            else None
        )
        return weight, bias

    def _checked(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A copy in the model's dtype. Raises StartupError for another shape, or numbers that are none."""
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise StartupError(
                f"--heads {self.source.folder}: {name} has the shape {tuple(tensor.shape)}, not {shape}: are these "
                "another model's heads?"
            )
        if not bool(tensor.isfinite().all()):
            raise StartupError(f"--heads {self.source.folder}: {name} holds NaN or infinite values")
        return tensor.to(device=self.source.device, dtype=self.source.dtype, copy=True)
