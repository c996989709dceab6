"""Placement: a process' place among those that are one replica, and what it loads there."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from services.compute.backends.backend import Backend, RowSearch
from services.compute.backends.choose import context_of, has_same_columns, ranks_of_host
from services.compute.backends.cpu.linear import move_in, move_out
from services.compute.backends.gathered import ELSEWHERE
from services.compute.backends.host_memory import shared_memory
from services.compute.cache.kv_cache import KVCache
from services.compute.cache.kv_store import KVStore
from services.compute.cache.stored_cache import BlockStore, NothingStored, StoredCache
from services.compute.execution.executor import DrawnTokens
from services.compute.execution.model_runner import NO_IMAGES, Model, ModelRunner
from services.compute.models.config import ModelConfig
from services.compute.models.decoder import Decoder, ModelWeights
from services.compute.models.parts import whole_layer
from services.compute.models.rank import config_of_rank, cut_of, linears_to_keep, sharded_layer, weights_of_rank
from services.compute.ranks.group.commands import (
    BlockCount,
    FindBlocks,
    FoundBlocks,
    KeptLayers,
    LoadBlocks,
    Rendezvous,
    RoomFor,
    RunHead,
    RunStep,
    SaveBlocks,
    decode,
    encode,
)
from services.compute.ranks.group.ends import Group, Member
from services.compute.ranks.parallel.distributed import (
    LOOPBACK,
    DistributedRanks,
    Pipe,
    choose_interface,
    join,
    listen,
    meet_at,
    refuse_shared_device,
)
from services.compute.ranks.parallel.ranks import GROUP_BYTES, Ranks
from services.compute.ranks.parallel.sharded import Messages, Receiver, Sender, receive_bytes, send_bytes
from services.compute.ranks.parallel.share import WHOLE, Portion, Share, check_stages, layers_of_stage
from services.compute.ranks.parallel.stage import PipelineStage
from services.compute.sequence.batch import ScheduledBatch
from services.compute.weights.loader import load_parts, load_weights
from shared.process.errors import StartupError, Unready, words_of
from shared.process.group_settings import split_address
from shared.process.settings import ComputeSettings, split_place
from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")


@dataclass(frozen=True, slots=True)
class Placement:
    """Alone, or one of several ranks. Rank 0 tells the others what to run."""

    ranks: Ranks | None = None  # that divide this stage's layers; None: this one has them whole
    stage: PipelineStage | None = None  # None: all layers are here
    tell: Callable[[Any], None] | None = None  # rank 0's, and it alone has one, if there are others
    shards: Messages | None = None  # where the others keep weights for rank 0: on which they send them

    @property
    def is_alone(self) -> bool:
        return self.ranks is None and self.stage is None and self.shards is None

    @property
    def is_first(self) -> bool:
        """Whether it is rank 0, or there is no other."""
        return self.is_alone or self.tell is not None

    def stage_of(self, config: ModelConfig) -> PipelineStage | None:
        """The stage, with a model's layers. Stages are to take as long as each other, and in a step of a
        few tokens a layer takes as long as its weights are many. Raises StartupError for fewer layers
        than stages."""
        if self.stage is None:
            return None
        count = self.stage.count
        check_stages(count, config.num_layers)
        attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        mlp = 3 * (
            config.intermediate_size
            if config.moe is None
            else config.moe.intermediate_size * config.moe.router.num_active
        )
        head = config.vocab_size / (attention + mlp)
        return replace(
            self.stage, layers=tuple(layers_of_stage(number, count, config.num_layers, head) for number in range(count))
        )


ALONE = Placement()


def open_place(settings: ComputeSettings, backend: Backend, end: Group | Member | None) -> Placement:
    """This process' place in its group, connected to the others. end: None, there is no group. Raises
    StartupError."""
    if end is None:
        return ALONE
    check_group(settings, backend)
    if settings.shard_weights:
        return Placement(
            tell=end.send if isinstance(end, Group) else None, shards=connect(settings, backend.device, end)
        )
    size, count, memory = settings.tensor_parallel_size, settings.pipeline_parallel_size, None
    if end.memory_fd is not None and backend.device.type == "cpu" and size > 1:
        memory = shared_memory(end.memory_fd, count * GROUP_BYTES)
    ranks: Ranks | None = None
    number = end.rank // size
    world = connect(settings, backend.device, end) if memory is None or count > 1 else None
    if size > 1 and memory is not None:
        ranks = ranks_of_host(
            backend, Share(end.rank % size, size), memory[number * GROUP_BYTES : (number + 1) * GROUP_BYTES]
        )
    elif size > 1:
        for first in range(0, size * count, size):  # all make all groups
            members = range(first, first + size)
            made = DistributedRanks(Share(end.rank % size, size), members, backend.device)
            ranks = made if end.rank in members else ranks
    stage, pipe = None, None
    if count > 1:
        assert world is not None
        if end.rank % size == 0:
            pipe = Pipe(world, range(0, size * count, size), backend.device)
        stage = PipelineStage(number, count, pipe)
    return Placement(ranks, stage, end.send if isinstance(end, Group) else None)


def check_group(settings: ComputeSettings, backend: Backend) -> None:
    """Raises StartupError for what a group can't do, and where the backend's bits are not the same in
    one."""
    if settings.tensor_parallel_size > 1 and not has_same_columns(backend):
        raise StartupError(
            f"--tensor-parallel-size {settings.tensor_parallel_size}: on a CPU this needs bfloat16 and the native "
            "kernels (penstock build-kernels): "
            "the bits of torch's products depend on how many columns are computed"
        )
    if settings.shard_weights and context_of(backend) is None:
        raise StartupError(
            f"--shard-weights is for CPUs, not for {backend.device.type}: without it, --tensor-parallel-size divides "
            "the work, too"
        )
    if settings.allow_batch_variance:
        raise StartupError(
            "--allow-batch-variance: the vendor's products depend on how many columns are computed, so ranks would "
            "not give one process' bits"
        )


def connect(settings: ComputeSettings, device: torch.device, end: Group | Member) -> ProcessGroup:
    """Open torch.distributed's connections between all ranks. Raises StartupError."""
    host, wait = (
        split_address(settings.master)[0] if settings.master else LOOPBACK,
        timedelta(seconds=settings.group_wait_s),
    )
    choose_interface(end.peers[0].channel.connection.getsockname()[0] if settings.master else LOOPBACK)
    try:
        if isinstance(end, Group):
            store = listen(host, wait)
            end.send(Rendezvous(store.port, device.type))
        else:
            rendezvous: Rendezvous = end.hear()
            if rendezvous.device != device.type:
                raise StartupError(
                    f"rank {end.rank} has the device {device.type}, and rank 0 has {rendezvous.device}: the ranks of "
                    "a group must have the same"
                )
            store = join(host, rendezvous.port, wait)
        if device.type == "cuda":
            refuse_shared_device(
                store, end.rank, f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
            )
        return meet_at(store, end.rank, settings.num_ranks, device, wait)
    except (OSError, RuntimeError) as error:
        raise Unready(
            f"the ranks did not meet within --group-wait-s {settings.group_wait_s:g}, at a port of {host}: "
            f"{words_of(error)}"
        ) from None


def agree_on_blocks(end: Group | Member, num_blocks: int) -> int:
    """The blocks of the KV cache that all ranks have, given how many fit on this one."""
    if isinstance(end, Member):
        end.answer(RoomFor(num_blocks))
        agreed: BlockCount = end.hear()
        return agreed.num_blocks
    found: int = min(num_blocks, *(end.receive(peer.rank).num_blocks for peer in end.peers))
    end.send(BlockCount(found))
    return found


def load_decoder(
    place: Placement, number: int, location: Path, config: ModelConfig, backend: Backend, **packing: Any
) -> Decoder:
    """A model, or this place's part of it. number: of the model among those of the replica; packing:
    load_weights'. Raises StartupError."""
    if config.recurrence is not None and not place.is_alone:
        raise StartupError(
            "a model that keeps states of its sequences is not divided among ranks: start it without "
            "--tensor-parallel-size and --pipeline-parallel-size"
        )
    if place.is_alone:
        return Decoder(config, load_weights(location, config, backend, **packing), backend)
    if config.full_shape is not None:
        raise StartupError(
            f"{location.name}: its layers have heads of several sizes, which a group of ranks does not divide: run it "
            "without --tensor-parallel-size, --pipeline-parallel-size and --shard-weights"
        )
    if place.shards is not None:
        return load_sharded(place.shards, location, config, backend, **packing)
    stage, share = place.stage_of(config), WHOLE if place.ranks is None else place.ranks.share
    numbers = range(config.num_layers) if stage is None else stage.layers[stage.number]
    has_head = stage is None or stage.is_first
    portion = Portion(share, numbers, has_embedding=place.is_first, has_head=has_head)
    parts = load_parts(location, config, backend, portion, **packing)
    own = config_of_rank(config, share, numbers)
    if place.ranks is None:
        layers = [whole_layer(layer, own, backend) for layer in parts.layers]
        weights = ModelWeights(
            ELSEWHERE if parts.embedding is None else parts.embedding, layers, parts.norm, parts.lm_head or ELSEWHERE
        )
        return Decoder(own, weights, backend, None, stage, config)

    def announce(num_rows: int, is_normed: bool) -> None:
        assert place.tell is not None
        place.tell(RunHead(number, num_rows, is_normed))

    cut = cut_of(config, place.ranks)
    weights = weights_of_rank(parts, config, backend, cut, announce if has_head else None)
    return Decoder(own, weights, backend, cut, stage, config)


def load_sharded(shards: Messages, location: Path, config: ModelConfig, backend: Backend, **packing: Any) -> Decoder:
    """Rank 0's whole model, whose parts the others keep; or another rank's, which has no layers and sends
    what it keeps. Raises StartupError."""
    if config.moe is not None:
        raise StartupError(
            "--shard-weights: a mixture of experts is not sent layer by layer; without it, --tensor-parallel-size "
            "divides the experts"
        )
    share, context = Share(shards.rank(), shards.size()), context_of(backend)
    is_first = share.rank == 0
    assert context is not None
    portion = Portion(share, range(config.num_layers), has_embedding=is_first, has_head=is_first, is_sharded=True)
    parts = load_parts(location, config, backend, portion, **packing)
    if not is_first:
        kept = []
        while parts.layers:  # each is freed when its bytes have moved
            kept.append(move_out(linears_to_keep(parts.layers.pop(0), config)))
        send_bytes(shards, encode(KeptLayers(tuple(outline for outline, _ in kept))))
        nothing = ModelWeights(ELSEWHERE, [], parts.norm, ELSEWHERE)
        return Decoder(
            config_of_rank(config, WHOLE, range(0)), nothing, backend, shards=Sender(shards, [held for _, held in kept])
        )
    assert parts.embedding is not None and parts.lm_head is not None
    outlines = [decode(receive_bytes(shards, rank)).layers for rank in range(1, share.size)]
    receiver = Receiver(shards, [[each.num_bytes for each in of_layers] for of_layers in outlines])
    layers = []
    for number, own in enumerate(parts.layers):
        memory = receiver.memory[number % 2]
        layers.append(
            sharded_layer(
                own, [move_in(context, each[number], held) for each, held in zip(outlines, memory, strict=True)], config
            )
        )
    return Decoder(config, ModelWeights(parts.embedding, layers, parts.norm, parts.lm_head), backend, shards=receiver)


def make_runner(
    place: Placement,
    number: int,
    model: Model,
    kv_cache: KVCache,
    row_search: RowSearch,
    images: Mapping[str, torch.Tensor] | None = NO_IMAGES,
    num_slots: int = 0,
) -> ModelRunner:
    """The runner of a model, or of this place's part: rank 0's tells the others each step. images, num_slots:
    ModelRunner's."""
    if place.tell is None:
        return ModelRunner(model, kv_cache, row_search, images if place.is_first else None, num_slots)
    return LeadingRunner(model, kv_cache, row_search, images, place.tell, number)


class LeadingRunner(ModelRunner):
    """Rank 0's, of a model that other ranks run with it."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        row_search: RowSearch,
        images: Mapping[str, torch.Tensor] | None,
        tell: Callable[[Any], None],
        number: int,
    ) -> None:
        super().__init__(model, kv_cache, row_search, images)
        self.tell = tell
        self.number = number

    def run(self, batch: ScheduledBatch, drawn: DrawnTokens | None = None) -> Any:
        self.tell(RunStep(self.number, batch))
        return super().run(batch, drawn)


def open_stored(
    settings: ComputeSettings, model: Model, kv_cache: KVCache, end: Group | Member | None
) -> BlockStore | None:
    """The copies of the cache's blocks that --kv-disk asks for, of all ranks that have a part of the
    cache; None if it is not set. Raises StartupError."""
    has_parts = end is not None and not settings.shard_weights
    if settings.kv_disk is None or not settings.prefix_caching or (isinstance(end, Member) and not has_parts):
        return None
    block_bytes = sum(kv_cache.block_bytes)
    if not block_bytes:
        return NothingStored()
    (folder, size), part = split_place(settings.kv_disk), ""
    if has_parts and isinstance(model, Decoder):
        part = model.cached_part
        if end is not None and end.memory_fd is not None:  # all are on this host
            size //= model.num_cached_parts
    store = KVStore(folder, size, block_bytes, part)
    log.info("KV on disk", file=store.path, blocks=store.num_blocks, tokens=store.num_blocks * kv_cache.block_size)
    own = StoredCache(store, kv_cache)
    return StoredRanks(own, end) if isinstance(end, Group) and has_parts else own


class StoredRanks:
    """The BlockStore of the cache that all ranks of a group have together."""

    def __init__(self, own: StoredCache, group: Group) -> None:
        self.own = own
        self.group = group
        self.read_s = 0.0
        self._is_broken_elsewhere = False

    @property
    def num_written(self) -> int:
        return self.own.num_written

    @property
    def num_dropped(self) -> int:
        return self.own.num_dropped

    @property
    def is_broken(self) -> bool:
        return self.own.is_broken or self._is_broken_elsewhere

    def save(self, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        self.group.send(SaveBlocks(tuple(names), tuple(block_ids)))
        self.own.save(names, block_ids)

    def find(self, names: Sequence[bytes]) -> int:
        if not self.own.has(names[0]):
            return 0
        self.group.send(FindBlocks(tuple(names)))
        num_found = self.own.find(names)
        self.read_s = self.own.read_s
        for peer in self.group.peers:
            answer: FoundBlocks = self.group.receive(peer.rank)
            self._is_broken_elsewhere |= answer.is_broken
            self.read_s = max(self.read_s, answer.read_s)
            num_found = min(num_found, answer.count)
        return num_found

    def load(self, block_ids: Sequence[int]) -> None:
        self.group.send(LoadBlocks(tuple(block_ids)))
        self.own.load(block_ids)

    def close(self) -> None:
        self.own.close()


def carry_out(
    command: Any, runners: Sequence[ModelRunner], stored: BlockStore | None, answer: Callable[[Any], None]
) -> None:
    """Do this rank's part of what rank 0 does. runners: of the replica's models, by number; answer: tells
    rank 0."""
    if isinstance(command, RunStep | RunHead):
        return run_model(command, runners)
    assert stored is not None
    if isinstance(command, SaveBlocks):
        stored.save(command.names, command.block_ids)
    elif isinstance(command, FindBlocks):
        answer(FoundBlocks(stored.find(command.names), stored.read_s, stored.is_broken))
    elif isinstance(command, LoadBlocks):
        stored.load(command.block_ids)


def run_model(command: RunStep | RunHead, runners: Sequence[ModelRunner]) -> None:
    runner = runners[command.model]
    assert isinstance(runner.model, Decoder)
    if isinstance(command, RunHead):
        runner.model.serve_head(command.num_rows, is_normed=command.is_normed)
    elif isinstance(runner.model.shards, Sender):
        runner.model.shards.send()
    else:
        runner.run(command.batch)
