"""Buffers: what a step fills before its forward pass, and the pass reads. They stay where they are,
so that a pass can be recorded once and run again."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from services.compute.backends.host_memory import mapped_zeros
from shared.model.arrays import Array

ALIGNMENT = 16  # bytes: by it kernels are compiled once more for what begins elsewhere


def to_device(values: Array, device: torch.device) -> Tensor:
    """A tensor of the numbers. They are copied to a GPU through pinned memory, without a wait for
    its work; on a CPU the memory is shared."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_device_together(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Tensors of several arrays' numbers, as to_device makes them, in one copy."""
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    held = np.zeros(max(sum(sizes), ALIGNMENT), np.uint8)  # an empty tensor can't be pinned and viewed
    starts = list(accumulate(sizes, initial=0))
    for each, start in zip(arrays, starts, strict=False):
        held[start : start + each.nbytes].view(each.dtype)[:] = each.ravel()
    there = to_device(held, device)
    return [
        there[start : start + each.nbytes].view(getattr(torch, each.dtype.name)).view(each.shape)
        for each, start in zip(arrays, starts, strict=False)
    ]


def ensure_works(device: torch.device) -> None:
    """Raises what has gone wrong on a GPU, if anything has. It computes nothing from then on, and
    its error comes up wherever the host asks it next."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Buffers:
    """Tensors by name, which grow to the largest step. What a step gets is good until the next step
    takes the same name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generation = 0  # rises whenever something that was taken before has moved
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape, at the name's place; what is in it is left from before."""
        size, held = math.prod(shape), self._held.get(name)
        if held is None or held.numel() < size:
            with torch.inference_mode(False):  # else only inference could write to it
                is_host = self.device.type == "cpu"
                held = (
                    mapped_zeros(size * dtype.itemsize).view(dtype)
                    if is_host
                    else torch.empty(size, dtype=dtype, device=self.device)
                )
            self.generation += name in self._held
            self._held[name] = held
        return held[:size].view(shape)

    def fill(self, name: str, values: list[int] | Array, dtype: torch.dtype = torch.int64) -> Tensor:
        """The numbers, to be read after `upload`."""
        return self.take(name, (len(values),), dtype).copy_(torch.as_tensor(values, dtype=dtype))

    def reserve(self, name: str, count: int, dtype: torch.dtype = torch.int64) -> None:
        """Make room for so many numbers to be filled."""
        self.take(name, (count,), dtype)

    def upload(self) -> None:
        """Copy what has been filled to the device. Here it is as soon as it is filled."""

    @property
    def num_bytes(self) -> int:
        return sum(held.nbytes for held in self._held.values())


class Taps:
    """Copies of what flows between a decoder's layers, in a step: the residual, whole, as it enters
    some of them. They are good until the next step, and change nothing of it."""

    def __init__(self, layers: tuple[int, ...], hidden_size: int, dtype: torch.dtype, buffers: Buffers) -> None:
        """layers: by number; the number of layers itself stands for what the last one makes."""
        self.layers = layers
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.buffers = buffers

    def pieces(self, num_layers: int) -> list[tuple[int, int]]:
        """The layers [first, last) that run without a look between them."""
        return list(pairwise(sorted({0, *self.layers, num_layers})))

    def keep(self, number: int, x: Tensor) -> None:
        """Copy x [T, hidden], which enters the layer of this number, if it is one of them."""
        for place, layer in enumerate(self.layers):
            if layer == number:
                self.take(len(x))[:, place * self.hidden_size : (place + 1) * self.hidden_size].copy_(x)

    def take(self, num_tokens: int) -> Tensor:
        """The rows held for a step's first tokens, [num_tokens, layers * hidden]."""
        return self.buffers.take("taps", (num_tokens, len(self.layers) * self.hidden_size), self.dtype)
