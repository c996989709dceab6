"""The quantized formats of safetensors checkpoints: one file each, from a layer's tensors to a
Matrix."""

from services.compute.weights.formats.registry import read_format
from services.compute.weights.formats.stored import StoredLayer, StoredWeight, WeightFormat

__all__ = ["WeightFormat", "StoredWeight", "StoredLayer", "read_format"]
