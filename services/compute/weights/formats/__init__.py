"""The quantized formats of safetensors checkpoints: one file each, from a layer's tensors to a
Matrix."""

from services.compute.weights.formats.registry import read_format
from services.compute.weights.formats.stored import Format, Kept, StoredLayer

__all__ = ["Format", "Kept", "StoredLayer", "read_format"]
