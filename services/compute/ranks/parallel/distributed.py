"""Ranks of several hosts, and stages: what they exchange goes through torch.distributed (gloo on CPUs,
NCCL on GPUs)."""

import os
import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from services.compute.ranks.parallel.share import Share
from shared.process.errors import StartupError

MAX_SENT = 4  # tensors on their way to the next stage
LOOPBACK = "127.0.0.1"
# of what ranks exchange once they have met: the group's own watch ends a process long before
TIMEOUT = timedelta(hours=12)


def choose_interface(address: str) -> None:
    """Have gloo use the network interface that has this address of the host. By itself it takes the
    address of the host's name, which may be one that other hosts can't reach (127.0.1.1 on Debian)."""
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address.partition("%")[0] for each in found):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def listen(host: str, wait: timedelta) -> Any:
    """Rank 0's meeting point, a TCPStore at a free port of this address alone. wait: for the others.
    Raises OSError or RuntimeError."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, 0), family=family)  # a TCPStore's own would listen at all addresses
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listener.detach()
    )


def join(host: str, port: int, wait: timedelta) -> Any:
    """The same, for the other ranks. Raises RuntimeError."""
    return dist.TCPStore(host, port, is_master=False, timeout=wait)  # type: ignore[attr-defined]


def refuse_shared_device(store: Any, rank: int, device: str) -> None:
    """Raises StartupError if a rank before this one has the same device. device: a name of this rank's,
    which no other device of any host has."""
    store.set(f"device of rank {rank}", device)
    for other in range(rank):
        if store.get(f"device of rank {other}").decode() == device:
            raise StartupError(
                f"rank {rank} has the same GPU as rank {other}: with --master, give each rank of a host its own by "
                "CUDA_VISIBLE_DEVICES"
            )


def meet_at(store: Any, rank: int, num_ranks: int, device: torch.device, wait: timedelta) -> dist.ProcessGroup:
    """Open the connections of all ranks; returns when all are there. Raises RuntimeError for one that
    does not come, or that can't be reached."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=num_ranks, timeout=wait
    )
    group: dist.ProcessGroup = dist.new_group(timeout=TIMEOUT)  # gloo keeps the timeout that a group was made with
    store.set_timeout(TIMEOUT)  # NCCL asks it for addresses later
    return group


class DistributedRanks:
    """A Ranks whose memory is their own. Bytes are moved, and nothing is computed."""

    meeting = None

    def __init__(self, share: Share, members: Sequence[int], device: torch.device) -> None:
        """members: of the world, by their rank here. All of the world call this, in the same order."""
        self.share = share
        self.members = members
        self.device = device
        self._held: dict[str, Tensor] = {}
        self._group = dist.new_group(list(members), timeout=TIMEOUT)

    def region(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size, held = torch.Size(shape).numel() * dtype.itemsize, self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return held[:size].view(dtype).view(shape)

    def all_gather_in_place(self, whole: Tensor, parts: Sequence[range], dim: int = -1) -> None:
        own = parts[self.share.rank]
        if len(own) == whole.shape[dim] and own == parts[0] == parts[-1]:
            return  # each has computed all of it
        for part, found in zip(parts, self._exchange(whole.narrow(dim, own.start, len(own)), parts, dim), strict=True):
            whole.narrow(dim, part.start, len(part)).copy_(found)

    def all_gather(self, part: Tensor, parts: Sequence[range], dim: int = -1) -> Tensor:
        return torch.cat(self._exchange(part, parts, dim), dim)

    def broadcast(self, name: str, of_first: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        whole = self.region(name, shape, dtype)
        if of_first is not None:
            whole.copy_(of_first)
        dist.broadcast(as_bytes(whole), self.members[0], group=self._group)
        return whole

    def _exchange(self, part: Tensor, parts: Sequence[range], dim: int) -> list[Tensor]:
        """All ranks' parts, by rank. As a collective takes pieces of one size, shorter ones are padded."""
        first = part.movedim(dim, 0).contiguous()
        longest = max(len(each) for each in parts)
        own = first.new_zeros((longest, *first.shape[1:]))
        own[: len(first)] = first
        found = first.new_empty((len(parts), *own.shape))
        dist.all_gather(list(as_bytes(found).chunk(len(parts))), as_bytes(own), group=self._group)
        return [each[: len(of)].movedim(0, dim) for each, of in zip(found, parts, strict=True)]


class Pipe:
    """A stage's way to the others."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
        """group: of all ranks; ranks: of them, the one of each stage that has a Pipe."""
        self.group = group
        self.ranks = ranks
        self.device = device
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()
        # not waited for: gloo's connection stands still for ever once a tensor that it receives into is
        # gone. At most as many steps are under way as there are stages, with a tensor of each
        self._expected: deque[Arriving] = deque()
        self._most_expected = len(ranks) ** 2

    def send(self, x: Tensor, stage: int) -> None:
        """Begin to send a copy to a stage, without a wait."""
        held = x.clone()
        if held.numel():
            self._sent.append((dist.isend(as_bytes(held), self.ranks[stage], group=self.group), held))
        while len(self._sent) > MAX_SENT:
            wait(self._sent.popleft()[0])

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, stage: int) -> "Arriving":
        """The next tensor that comes from a stage. It is received even if `wait` is never called."""
        x = torch.empty(shape, dtype=dtype, device=self.device)
        arriving = Arriving(x, dist.irecv(as_bytes(x), self.ranks[stage], group=self.group) if x.numel() else None)
        while self._expected and (self._expected[0].is_here or len(self._expected) == self._most_expected):
            self._expected.popleft().wait()
        self._expected.append(arriving)
        return arriving


class Arriving:
    """A tensor that is being received, or was."""

    def __init__(self, x: Tensor, work: dist.Work | None = None) -> None:
        self._x = x
        self._work = work

    @property
    def is_here(self) -> bool:
        """Whether it was waited for."""
        return self._work is None

    def wait(self) -> Tensor:
        wait(self._work)
        self._work = None
        return self._x


def wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def as_bytes(x: Tensor) -> Tensor:
    """A view of x, which must be contiguous, as uint8."""
    return x.view(-1).view(torch.uint8)
