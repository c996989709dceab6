"""CudaBuffers: the numbers that a step is filled with lie side by side, here and on the device, and
go there in one piece."""

import torch
from torch import Tensor

from services.compute.backends.buffers import Buffers
from shared.model.arrays import Array

SMALLEST = 512  # bytes of a name, at least


class CudaBuffers(Buffers):
    """Each name has its place, which moves only when it becomes too small."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.num_uploads = 0
        self._is_pinned = device.type == "cuda"
        # after the last upload: until then the host's side must stay as it is
        self._copied: torch.cuda.Event | None = None
        self._places: dict[str, tuple[int, int]] = {}  # first byte, bytes
        self._filled: set[str] = set()
        # that were filled where they no longer are: the step that asked for more memory still reads
        # them there, and so does its recording
        self._moved: set[str] = set()
        self._first, self._last = 0, 0  # of what is filled and not uploaded
        self._hold(1 << 15)

    def reserve(self, name: str, count: int, dtype: torch.dtype = torch.int64) -> None:
        self._place(name, count * dtype.itemsize)

    def fill(self, name: str, values: list[int] | Array, dtype: torch.dtype = torch.int64) -> Tensor:
        if not len(values):
            return self._held_there[:0].view(dtype)
        num_bytes = len(values) * dtype.itemsize
        first = self._place(name, num_bytes)
        last = first + num_bytes
        self.generation += name in self._moved
        self._moved.discard(name)
        self._filled.add(name)
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        self._host[first:last].view(dtype).copy_(torch.as_tensor(values, dtype=dtype))
        self._first, self._last = (min(self._first, first), max(self._last, last)) if self._last else (first, last)
        return self._held_there[first:last].view(dtype)

    def upload(self) -> None:
        """Make one copy, of all from the first to the last of what was filled since the one
        before."""
        if not self._last:
            return
        self._held_there[self._first : self._last].copy_(self._host[self._first : self._last], non_blocking=True)
        self._first, self._last = 0, 0
        self.num_uploads += 1
        if self._is_pinned:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._held_there.nbytes

    def _place(self, name: str, size: int) -> int:
        """The first byte of a name's place."""
        first, held = self._places.get(name, (0, 0))
        if size <= held:
            return first
        self.generation += name in self._places
        wanted = max(SMALLEST, 1 << (size - 1).bit_length())
        if self._used + wanted > len(self._host):
            self.upload()  # holders of a part of the old buffer read it from the device
            self._hold(2 * (self._used + wanted))
        self._places[name] = self._used, wanted
        self._used += wanted
        return self._places[name][0]

    def _hold(self, size: int) -> None:
        """Give out the places again, in more memory."""
        with torch.inference_mode(False):
            self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=self._is_pinned)
            self._held_there = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.generation += 1
        self._moved = set(self._filled)
        self._used = 0
        for name, (_, held) in self._places.items():
            self._places[name] = self._used, held
            self._used += held
