"""Safetensors: a folder with one file, or with several and an index."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from services.compute.backends.matrix import Dense, Matrix
from shared.errors import StartupError

Tensor = torch.Tensor


class SafetensorsSource:
    """A WeightSource; and of a packed checkpoint, the parts of its layers."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.file_by_name = self._index()
        self._bar = tqdm(total=len(self.file_by_name), desc="loading weights", unit="tensor", file=sys.stderr, mininterval=0.5)
        self._open: dict[Path, Any] = {}

    def _index(self) -> dict[str, Path]:
        index = self.folder / "model.safetensors.index.json"
        try:
            if index.is_file():
                return {name: self.folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
            files = sorted(self.folder.glob("*.safetensors"))
            names = {}
            for file in files:
                with safe_open(file, framework="pt") as tensors:
                    names.update(dict.fromkeys(tensors.keys(), file))
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise StartupError(f"{self.folder}: the weights can't be read: {error}") from None
        if not names:
            raise StartupError(f"{self.folder} holds no *.safetensors; other formats are not read")
        return names

    def _get(self, name: str) -> Tensor:
        """The tensor as it is in its file. Raises StartupError."""
        file = self.file_by_name.get(name)
        if file is None:
            raise StartupError(f"{self.folder}: the checkpoint has no tensor {name}")
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            tensor: Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{file}: {error}") from None
        self._bar.update()
        return tensor

    def dense(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._get(name)
        if tuple(tensor.shape) != shape:
            raise StartupError(f"{self.file_by_name[name]}: {name} has the shape {tuple(tensor.shape)}, config.json says {shape}")
        return tensor.to(device=self.device, dtype=self.dtype, copy=True)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        return Dense(self.dense(name + "weight", shape))

    def tied_head(self, embedding: Tensor) -> Matrix:
        return Dense(embedding)

    def parts(self, prefix: str) -> dict[str, Tensor]:
        """A packed layer's parts, as they are."""
        return {name.removeprefix(prefix): self._get(name) for name in self.file_by_name if name.startswith(prefix)}

    def close(self) -> None:
        self._bar.close()
        self._open.clear()
