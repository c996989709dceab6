"""Ranks as threads of one process: each has its own backend, weights and KV cache. They meet in memory
as processes do; if they keep the weights for rank 0, they send them by gloo."""

import json
import os
import queue
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.compute.backends.choose import choose_backend, ranks_of_host
from services.compute.backends.host_memory import shared_memory
from services.compute.cache.kv_cache import KVCache
from services.compute.execution.model_runner import ModelRunner
from services.compute.models.architectures import read_config
from services.compute.ranks.group.commands import RunHead, RunStep, decode, encode
from services.compute.ranks.parallel.ranks import GROUP_BYTES
from services.compute.ranks.parallel.share import Share
from services.compute.ranks.place import Placement, load_decoder, make_runner, run_model
from shared.model.files import ModelFiles, text_config
from tests.kernels.backends import CPU

BLOCK_SIZE = 16


class Team:
    """`runner` is rank 0's. A context manager: the other ranks end with it."""

    def __init__(
        self,
        model: Path | ModelFiles,
        size: int,
        *,
        num_blocks: int = 256,
        kv_group: int = 0,
        shard_weights: bool = False,
        **packing: Any,
    ) -> None:
        location, found = (
            (model.weights, model.config)
            if isinstance(model, ModelFiles)
            else (model, json.loads((model / "config.json").read_text()))
        )
        config = read_config(text_config(found))
        self.fd = os.memfd_create("team")
        self.commands: list[queue.Queue[bytes | None]] = [queue.Queue() for _ in range(size - 1)]
        self.errors: list[BaseException] = []
        store = dist.HashStore()

        def start(rank: int) -> ModelRunner:
            backend = choose_backend(torch.bfloat16, CPU)
            tell = self.tell if rank == 0 else None
            if shard_weights:
                place = Placement(shards=dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60)), tell=tell)
            else:
                place = Placement(
                    ranks_of_host(backend, Share(rank, size), shared_memory(self.fd, GROUP_BYTES)), tell=tell
                )
            model = load_decoder(place, 0, location, config, backend, **packing)
            cache = KVCache(model.config, backend, num_blocks=num_blocks, block_size=BLOCK_SIZE, group=kv_group)
            return make_runner(place, 0, model, cache, backend.row_search)

        def follow(rank: int) -> None:
            try:
                runner = start(rank)
                while (command := self.commands[rank - 1].get()) is not None:
                    run_model(decode(command), [runner])
            except BaseException as error:
                self.errors.append(error)
                raise

        self.threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, size)]
        for thread in self.threads:
            thread.start()
        self.runner = start(0)

    def tell(self, command: RunStep | RunHead) -> None:
        assert not self.errors
        for commands in self.commands:
            commands.put(encode(command))

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        for commands in self.commands:
            commands.put(None)
        for thread in self.threads:
            thread.join(10)
        os.close(self.fd)
        assert not self.errors
