"""Outlines of packed layers: what another process has to know of them, to compute with their bytes in
memory of its own."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MatrixOutline:
    """A packed matrix of a backend, without its parts."""

    n: int
    k: int
    is_gated: bool
    has_bias: bool
    form: tuple[Any, ...]  # the backend's, as the two tuples are
    numbers: tuple[int, ...]


LinearOutline = tuple[MatrixOutline, ...]  # of a layer's matrices, one behind the other; empty: no part of the layer


@dataclass(frozen=True, slots=True)
class LayerOutline:
    """A rank's part of a decoder's layer: its linear layers follow each other in so many bytes."""

    num_bytes: int
    qkv: LinearOutline
    output: LinearOutline
    gate_up: LinearOutline
    down: LinearOutline
