"""Ranks on the GPU's backend, in Triton's interpreter: processes that exchange columns through
torch.distributed, as GPUs do. This is a rank that is not the first: python -m
tests.kernels.cuda.ranks PORT RANK SIZE FOLDER QUANTIZATION"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu.models import LoadedModel
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.cache.kv_cache import KVCache
from services.compute.execution.model_runner import ModelRunner
from services.compute.ranks.group.commands import decode, encode
from services.compute.ranks.parallel.distributed import LOOPBACK, TIMEOUT, DistributedRanks, join, listen, meet_at
from services.compute.ranks.parallel.share import Share
from services.compute.ranks.place import Placement, load_decoder, make_runner, run_model
from tests.kernels.backends import CPU

NUM_BLOCKS = 64


class Ranks(LoadedModel):
    """A model whose other ranks are processes."""

    def __init__(self, folder: Path, size: int, quantization: str) -> None:
        super().__init__(folder, CudaBackend(torch.bfloat16, CPU), quantization=quantization)
        self.size = size
        store = listen(LOOPBACK, TIMEOUT)
        command = [sys.executable, "-m", "tests.kernels.cuda.ranks", str(store.port)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        self.others = [
            subprocess.Popen([*command, *map(str, (rank, size, folder, quantization))], env=environment)
            for rank in range(1, size)
        ]
        meet_at(store, 0, size, CPU, TIMEOUT)
        self.runner = open_rank(0, size, folder, quantization, self.tell)

    def make_runner(self, num_blocks: int) -> ModelRunner:
        assert num_blocks == NUM_BLOCKS
        return self.runner

    def tell(self, command: Any) -> None:
        """Give the others a command; None: they are to end."""
        encoded = b"" if command is None else encode(command)
        for rank in range(1, self.size):
            dist.send(torch.tensor([len(encoded)]), rank)
            if encoded:
                dist.send(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), rank)

    def close(self) -> None:
        self.tell(None)
        for each in self.others:
            assert each.wait(60) == 0
        dist.destroy_process_group()


def open_rank(rank: int, size: int, folder: Path, quantization: str, tell: Any = None) -> ModelRunner:
    backend = CudaBackend(torch.bfloat16, CPU)
    place = Placement(DistributedRanks(Share(rank, size), range(size), CPU), tell=tell)
    config = LoadedModel.config_of(folder)
    model = load_decoder(place, 0, folder, config, backend, quantization=quantization)
    return make_runner(
        place, 0, model, KVCache(model.config, backend, num_blocks=NUM_BLOCKS, block_size=16), backend.row_search
    )


def main() -> None:
    port, rank, size = map(int, sys.argv[1:4])
    meet_at(join(LOOPBACK, port, TIMEOUT), rank, size, CPU, TIMEOUT)
    runner = open_rank(rank, size, Path(sys.argv[4]), sys.argv[5])
    while True:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, 0)
        if not length:
            break
        data = torch.zeros(int(length), dtype=torch.uint8)
        dist.recv(data, 0)
        run_model(decode(data.numpy().tobytes()), [runner])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
