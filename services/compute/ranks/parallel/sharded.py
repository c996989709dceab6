"""Sharded weights: each rank keeps its part of every layer, and rank 0 alone computes. While it computes
a layer, the other ranks' parts of the next one arrive. (ZeRO's third stage: Rajbhandari et al., "ZeRO",
2020; Zhao et al., "PyTorch FSDP", 2023. There all ranks compute, each its own rows.)"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

TAG = 0


class Messages(Protocol):
    """A process group of torch.distributed: what two ranks send each other arrives in its order."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], sender: int, tag: int, /) -> dist.Work: ...


class Sender:
    """The end of a rank that keeps parts."""

    def __init__(self, group: Messages, layers: Sequence[Tensor]) -> None:
        """layers: the rank's part of each layer, [bytes] uint8."""
        self.group = group
        self.layers = [layer for layer in layers if layer.numel()]

    def send(self) -> None:
        """Send all layers, once. Returns when rank 0 has them."""
        for work in [self.group.send([layer], 0, TAG) for layer in self.layers]:
            work.wait()


class Receiver:
    """Rank 0's end: memory for the other ranks' parts of two layers, which take turns."""

    def __init__(self, group: Messages, sizes: Sequence[Sequence[int]]) -> None:
        """sizes: of each other rank, the bytes of its part of each layer."""
        self.group = group
        self.sizes = sizes
        self.memory = [[torch.empty(max(of_layers), dtype=torch.uint8) for of_layers in sizes] for _ in range(2)]
        self._coming: list[dist.Work] = []

    def begin(self) -> None:
        """Let the first layer come: a step begins, and every sender was told so."""
        self._receive(0)

    def await_layer(self, number: int) -> None:
        """Wait until the parts of a layer are in memory[number % 2], and let those of the next one come in
        the place of those before."""
        for work in self._coming:
            work.wait()
        self._receive(number + 1)

    def _receive(self, number: int) -> None:
        memory = self.memory[number % 2]
        sizes = [0 if number == len(of_layers) else of_layers[number] for of_layers in self.sizes]
        self._coming = [self.group.recv([memory[at][:size]], at + 1, TAG) for at, size in enumerate(sizes) if size]


def send_bytes(group: Messages, data: bytes) -> None:
    """Send rank 0 a message of any length."""
    for each in (torch.tensor([len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8)):
        group.send([each], 0, TAG).wait()


def receive_bytes(group: Messages, sender: int) -> bytes:
    """The next message of send_bytes."""
    length = torch.zeros(1, dtype=torch.int64)
    group.recv([length], sender, TAG).wait()
    data = torch.empty(int(length), dtype=torch.uint8)
    group.recv([data], sender, TAG).wait()
    return data.numpy().tobytes()
