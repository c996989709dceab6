"""States that layers keep of a sequence in place of keys and values: recurrent ones, and the last inputs of
short convolutions.

A state stands behind all tokens so far, and can't go back: a sequence whose last tokens are dropped is
computed again from its beginning.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("inputs", "recurrent")


@dataclass(slots=True)
class LayerState:
    """Tensors whose shapes are the layer's own. The library's modules read them, and may write into them."""

    inputs: Tensor | None = None  # [1, channels, width]: the convolution's last
    recurrent: Tensor | None = None

    def add_inputs(self, inputs: Tensor, width: int | None) -> Tensor:
        """inputs: [1, channels, tokens], the next; width: how many to keep; None: as many as until now, or these.
        Returns what the convolution sees, [1, channels, kept + tokens]: at the beginning these alone, behind
        zeros if they are less than it keeps."""
        if self.inputs is None:
            width = width or inputs.shape[-1]
            seen = F.pad(inputs, (max(0, width - inputs.shape[-1]), 0))
        else:
            width = self.inputs.shape[-1]
            seen = torch.cat([self.inputs, inputs], -1)
        self.inputs = seen[..., -width:].clone()
        return seen

    def set_recurrent(self, state: Tensor) -> Tensor:
        """Keep a copy, for it may be a part of something larger. Returns it."""
        self.recurrent = state.clone() if self.recurrent is None else self.recurrent.copy_(state)
        return self.recurrent


@dataclass(slots=True)
class SequenceStates:
    """The states of one sequence, behind its first `length` tokens."""

    length: int = 0
    layers: dict[tuple[int, int], LayerState] = field(default_factory=dict)  # by layer, and by number in it

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for kind in KINDS for tensor in self.tensors(kind))

    def tensors(self, kind: str) -> list[Tensor]:
        """All layers' of one of the KINDS."""
        found = [getattr(layer, kind) for layer in self.layers.values()]
        return [tensor for tensor in found if tensor is not None]

    def copy(self, *, without: str = "") -> "SequenceStates":
        """without: one of the KINDS, which is all zeros in the copy."""
        layers = {
            place: LayerState(*(copy_of(getattr(layer, kind), is_zero=kind == without) for kind in KINDS))
            for place, layer in self.layers.items()
        }
        return SequenceStates(self.length, layers)


def copy_of(tensor: Tensor | None, *, is_zero: bool) -> Tensor | None:
    if tensor is None:
        return None
    return torch.zeros_like(tensor) if is_zero else tensor.clone()
