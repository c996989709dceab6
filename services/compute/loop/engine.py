"""Engine: a model, its cache and its scheduler, as settings and a checkpoint make them."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, overload

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

from services.compute.backends.backend import Backend, total_bytes
from services.compute.backends.choose import choose_backend, choose_device
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.torch.recurrent import LOG_LENGTH
from services.compute.cache.block_manager import BlockManager
from services.compute.cache.kv_cache import (
    CacheShape,
    KVCache,
    choose_group,
    choose_num_blocks,
    choose_share,
    free_memory,
    token_bytes_of,
)
from services.compute.cache.kv_tier import KVTier
from services.compute.cache.state_slots import StateSlots
from services.compute.execution.model_runner import PROMPT_ROWS, Model, ModelRunner
from services.compute.execution.pooling import DenseLayer, read_dense_layers
from services.compute.images.encoding import ImageEncoding
from services.compute.images.tower import VisionTower, load_tower
from services.compute.loop.warm_up import check_numbers, first_kernels, record_steps, warm_up
from services.compute.models.architectures import is_native, read_config
from services.compute.models.config import Packed
from services.compute.models.decoder import Decoder
from services.compute.models.library_errors import refusals
from services.compute.ranks.group.commands import Loaded
from services.compute.ranks.group.ends import Group, Member
from services.compute.ranks.place import (
    ALONE,
    Placement,
    agree_on_blocks,
    load_decoder,
    make_runner,
    open_place,
    open_stored,
)
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.scheduler import Scheduler
from services.compute.speculation.draft_models import (
    DraftModel,
    load_draft_models,
    make_chain_proposer,
    make_draft_runner,
)
from services.compute.speculation.eagle_head import EagleHead
from services.compute.speculation.heads import load_heads, make_head_proposer
from services.compute.speculation.medusa import MedusaHeads
from services.compute.speculation.proposer import Proposer
from services.compute.weights.fingerprint import fingerprint, vision_fingerprint, with_drafts
from shared.model.files import ModelFiles
from shared.model.grammar import Vocabulary, load_vocabulary
from shared.model.segments import SEGMENT_MULTIPLE
from shared.model.vision.families import Dynamic
from shared.process.errors import StartupError
from shared.process.host_memory import enough_memory, size_text
from shared.process.on_cpu import refused_on_cpu
from shared.process.settings import ComputeSettings, EncoderSettings
from shared.process.telemetry import get_logger

# longer than any step, even with a kernel's compilation, or with 512 tokens of a large model on a few
# slow cores
CUDA_STEP_S, CPU_STEP_S = 300.0, 3600.0
DEFAULT_LENGTH = 1 << 15  # tokens, of a sequence that neither its model nor a cache bounds
SHARED_CORES_INTERVAL_S = 0.05  # text that grows twenty times a second still flows

log = get_logger("penstock.compute")

# sequences and tokens of a step: enough to keep the device busy, and a step short
CUDA_LIMITS, CPU_LIMITS = (256, 2048), (64, 512)


@dataclass(frozen=True, slots=True)
class Engine:
    """The objects that a step runs on."""

    scheduler: Scheduler
    runner: ModelRunner
    load_vocabulary: Callable[[], Vocabulary]  # for grammars, when the first comes
    max_model_len: int  # the longest sequence that fits, prompt and output
    pooling: Literal["mean", "last", "cls"]  # of embeddings whose request names none
    dense_layers: tuple[DenseLayer, ...]  # behind the pooling
    fingerprint: str  # of this replica
    is_encoder: bool  # it makes embeddings, and no tokens
    no_segments: str  # why it takes no prompts of segments; empty: it does
    speculators: tuple[str, ...]  # the names in --speculate that are in use
    proposers: tuple[Proposer, ...]  # those of them that have weights
    tier: KVTier | None  # the prefix cache's second tier, with --kv-disk
    images: ImageEncoding | None  # None if the model takes no images
    max_sampled: int  # rows of logits of a step
    num_stages: int  # of the model, which compute as many steps at once
    publish_interval_s: float  # candidates of steps shorter than this go out together
    step_timeout_s: float  # a step that takes longer has hung


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How large a step may be."""

    max_num_seqs: int
    max_batched_tokens: int


def choose_limits(settings: ComputeSettings, device: torch.device) -> BatchLimits:
    """The limits in the settings, or the device's defaults."""
    num_seqs, num_tokens = CUDA_LIMITS if device.type == "cuda" else CPU_LIMITS
    return BatchLimits(settings.max_num_seqs or num_seqs, settings.max_batched_tokens or num_tokens)


def bound_by_states(settings: ComputeSettings, limits: BatchLimits, model: Model) -> BatchLimits:
    """As many places as there is memory for their sequences' states: by default half of the KV cache's
    share, or all of it where there are no keys and values. Raises StartupError if that is too little for the number
    asked for."""
    if not model.state_bytes:
        return limits
    free, count = free_memory(model.backend.device), limits.max_num_seqs
    wanted = settings.kv_cache_memory
    if not model.has_kv and wanted is not None and wanted > free:
        raise StartupError(f"--kv-cache-memory {size_text(wanted)}: only {size_text(free)} are free beside the weights")
    if settings.max_num_seqs is None:
        share = free * choose_share(settings, model.backend.device)
        memory = share / 2 if model.has_kv else wanted or share
        count = max(1, min(count, int(memory) // model.state_bytes))
    if count * model.state_bytes > free:
        raise StartupError(
            f"--max-num-seqs {count}: the states of as many sequences take {size_text(count * model.state_bytes)}, and "
            f"{size_text(free)} are free beside the weights"
        )
    log.info(
        "the model keeps states of its sequences: each computes its whole prompt, and every token when the log holds "
        "the one before",
        state=size_text(model.state_bytes),
        max_num_seqs=count,
    )
    return replace(limits, max_num_seqs=count)


def choose_dtype(name: str, files: ModelFiles, device: torch.device) -> torch.dtype:
    """The dtype in --dtype, or the checkpoint's; bfloat16 in place of float16 on a CPU, which computes
    that slowly. Raises StartupError for --dtype float16 on a CPU."""
    if name == "float16" and device.type == "cpu":
        raise StartupError("--dtype float16 runs on a GPU only (--device cuda); a CPU takes bfloat16 or float32")
    wanted = (
        name
        if name != "auto"
        else str(files.config.get("dtype") or files.config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    )
    if wanted == "float16" and device.type != "cpu":
        return torch.float16
    return torch.float32 if wanted == "float32" else torch.bfloat16


def choose_speculators(settings: ComputeSettings, model: Model) -> tuple[str, ...]:
    """The names in --speculate, where drafts change no bit of what the model computes."""
    if settings.speculate == "off" or not model.splits_prompts:
        return ()
    if model.state_bytes or not model.is_row_invariant or settings.allow_batch_variance:
        say = log.info if settings.speculate == "auto" else log.warning
        others = "this model's results depend on the other sequences of a step"
        reason = "this model keeps states, which draft tokens would change for good" if model.state_bytes else others
        say(f"no speculation: {reason}", implementation=model.implementation)
        return ()
    return tuple(settings.speculate.split(","))


def load_model(
    settings: ComputeSettings, files: ModelFiles, backend: Backend, max_model_len: int | None, place: Placement = ALONE
) -> Model:
    """The model as the settings want it run, or this place's part of it. max_model_len: of the
    longest sequence, in tokens; None: as many as the cache holds. Raises StartupError."""
    if is_native(files, settings.model_impl):
        config = read_config(files.config, max_model_len)
        return load_decoder(
            place,
            0,
            files.weights,
            config,
            backend,
            quantization=settings.quantization,
            group=int(settings.quantization_group),
            attention_output=settings.quantize_attention_output,
            lm_head=settings.quantize_lm_head,
        )
    try:
        # seconds that a native model need not wait
        from services.compute.models.encoder_model import is_encoder, load_classifier, load_encoder, load_gguf_encoder
        from services.compute.models.transformers_model import check_library_sizes, load_transformers_model
        from services.compute.weights.library_modules import load_library_modules
    except ImportError as error:
        raise StartupError(
            f"{files.name} runs on the transformers library only, which can't be loaded here: {error}"
        ) from None
    with refusals(files.name):
        packing = Packed(
            settings.quantization,
            int(settings.quantization_group),
            settings.quantize_attention_output,
            settings.quantize_lm_head,
        )
        load_modules = partial(load_library_modules, files.weights, backend, packing)
        check_library_sizes(files.config)
        if files.labels or is_encoder(files.config, files.folder):
            if packing.option:
                raise StartupError(f"{packing.option}: {files.name} is an encoder; these are not quantized")
            if files.weights.is_file():
                return load_gguf_encoder(files.folder, backend, load_modules)
            load = load_classifier if files.labels else load_encoder
            return load(files.folder, TorchBackend(backend.dtype, backend.device))
        return load_transformers_model(files.folder, backend, max_model_len, load_modules)


def build_engine(settings: ComputeSettings, files: ModelFiles, group: Group | None = None) -> Engine:
    """Load the model, or rank 0's part of it. Raises StartupError."""
    with room_for(settings, files):
        return load_engine(settings, files, group)


@contextmanager
def room_for(settings: ComputeSettings, files: ModelFiles) -> Iterator[None]:
    """Raise StartupError, in one line, where a model and its cache have too little memory."""
    smaller = "a smaller model" if settings.quantization != "none" else "--quantization w8a8 or w4, or a smaller model"
    cache = (
        f"less than --kv-cache-memory {size_text(settings.kv_cache_memory)}"
        if settings.kv_cache_memory
        else "a small --kv-cache-memory"
    )
    with enough_memory(files.name, f"Try {cache}, {smaller}"):
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"--device cuda: {files.name} does not fit into the GPU's memory: {str(error).splitlines()[0]}"
            ) from None


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The models that all ranks of a group load, each its part: the model, and those that draft for it."""

    place: Placement
    device: torch.device
    backend: Backend
    model: Model
    drafting: list[DraftModel]
    speculators: tuple[str, ...]
    limits: BatchLimits
    limit: int | None  # the longest sequence wanted, in tokens; None: as many as the cache holds

    def describe(self, settings: ComputeSettings, fingerprint: str) -> Loaded:
        """The facts that the ranks compare. fingerprint: of the model. Raises StartupError."""
        taps = self.model.tapped_layers if isinstance(self.model, Decoder) and self.model.stage is not None else ()
        has_disk = settings.kv_disk is not None and settings.prefix_caching and not settings.shard_weights
        return Loaded(with_drafts(fingerprint, settings, self.speculators), self.backend.arithmetic, taps, has_disk)


def load_models(settings: ComputeSettings, files: ModelFiles, end: Group | Member | None) -> LoadedModels:
    """Open the backend, and load the models. Raises StartupError."""
    device = choose_device(settings.device, 0 if end is None or end.memory_fd is None else end.rank)
    backend = open_backend(settings, files, device, settings.num_threads if end is None else end.num_threads)
    if end is not None and not is_native(files, settings.model_impl):  # its dtype is not to blame
        raise StartupError(
            f"{files.name} runs on the transformers library, whole: a group of ranks divides native models only "
            "(--tensor-parallel-size)"
        )
    place, limits = open_place(settings, backend, end), choose_limits(settings, device)
    limit = smallest(settings.max_model_len, files.max_model_len)
    if place.is_first:
        log.info("loading the model", model=files.name, weights=files.weights)
        warn_of_length(settings, files)
    with logging_redirect_tqdm():  # lines of log go above the bar
        model = load_model(settings, files, backend, limit, place)
        if settings.block_size % model.backend.block_multiple:
            multiple, asked = model.backend.block_multiple, settings.block_size
            raise StartupError(
                f"--block-size {asked}: the kernels take a multiple of {multiple} tokens; any number runs in torch "
                "(on a CPU --dtype float32)"
            )
        speculators = choose_speculators(settings, model)
        return LoadedModels(
            place,
            device,
            backend,
            model,
            load_draft_models(speculators, settings, files, model, limit, place),
            speculators,
            bound_by_states(settings, limits, model),
            limit,
        )


def load_engine(settings: ComputeSettings, files: ModelFiles, group: Group | None = None) -> Engine:
    """Open the backend, load the model, size its cache, make its scheduler. Raises StartupError, or
    torch's error where memory is too small."""
    loaded = load_models(settings, files, group)
    place, backend, model, drafting = loaded.place, loaded.backend, loaded.model, loaded.drafting
    speculators, limits, limit, device = loaded.speculators, loaded.limits, loaded.limit, loaded.device
    heads = load_heads(settings, speculators, model)
    images = load_images(settings, limits, files, model)
    is_encoder = not model.splits_prompts
    workspace_bytes, state_bytes = reserve(settings, loaded, heads), limits.max_num_seqs * model.state_bytes
    caches = [*cached_models(loaded, group), *([heads.config] if isinstance(heads, EagleHead) else [])]
    identity = fingerprint(settings, files, model.backend)
    if group is not None:
        group.identify(loaded.describe(settings, identity.name))
    size = (
        size_cache(settings, caches, limit, backend, workspace_bytes, group, state_bytes)
        if model.has_kv
        else count_blocks(settings, limits, model, limit)
    )
    kv_cache = KVCache(
        model.config,
        model.backend,
        num_blocks=size.num_blocks,
        block_size=settings.block_size,
        group=choose_group(settings, model.config),
    )
    embeddings = images.embeddings if images is not None else {}
    runner = make_runner(place, 0, model, kv_cache, backend.row_search, embeddings, limits.max_num_seqs)
    chains = [
        make_chain_proposer(
            each,
            runner,
            limits.max_batched_tokens,
            size.max_model_len,
            make_draft_runner(each, number, runner, settings, place),
        )
        for number, each in enumerate(drafting, 1)
    ]
    with first_kernels(device), nullcontext() if isinstance(model, Decoder) else refusals(files.name):
        check_numbers(runner, files.name)
        if device.type == "cuda" and not is_encoder:
            warm_up(runner, limits.max_num_seqs)
            for chain in chains:
                record_steps(chain.runner, limits.max_num_seqs)
    log.info(
        "model loaded",
        model=files.name,
        implementation=model.implementation,
        device=device.type,
        dtype=str(backend.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        kv_tokens=size.num_blocks * settings.block_size,
        workspace_mib=workspace_bytes >> 20,
        max_model_len=size.max_model_len,
    )
    log_length = LOG_LENGTH if isinstance(model, Decoder) else 0
    slots = StateSlots(limits.max_num_seqs, log_length) if model.state_bytes else None
    scheduler = make_scheduler(settings, limits, size, identity.kv, is_encoder=is_encoder, slots=slots)
    stored = None if is_encoder or slots is not None else open_stored(settings, model, kv_cache, group)
    head_proposers = [] if heads is None else [make_head_proposer(heads, runner, settings)]
    return Engine(
        scheduler,
        runner,
        load_vocabulary=partial(load_vocabulary, files.folder, model.config.vocab_size, files.eos_token_ids),
        max_model_len=size.max_model_len,
        pooling=files.pooling or ("mean" if is_encoder else "last"),
        dense_layers=read_dense_layers(files.folder, files.hidden_size),
        fingerprint=identity.name,
        is_encoder=is_encoder or (isinstance(model, Decoder) and model.config.is_bare),
        no_segments=refuse_segments(model, settings.block_size),
        speculators=speculators,
        proposers=(*head_proposers, *chains),
        tier=None if stored is None else KVTier(stored, scheduler.block_manager),
        images=images,
        max_sampled=max_sampled_of(limits),
        num_stages=settings.pipeline_parallel_size,
        publish_interval_s=choose_publish_interval(settings, device),
        step_timeout_s=choose_step_timeout(settings, device),
    )


def reserve(settings: ComputeSettings, loaded: LoadedModels, heads: MedusaHeads | EagleHead | None = None) -> int:
    """Reserve memory for the largest step. Returns its bytes. heads: if they draft."""
    with first_kernels(loaded.device):
        num_tokens, models = (
            loaded.limits.max_batched_tokens,
            [loaded.model, *(draft.model for draft in loaded.drafting)],
        )
        longest = longest_that_fits(settings, loaded.model, loaded.limit) or num_tokens
        workspaces = [model.workspace(num_tokens, max_sampled_of(loaded.limits), longest) for model in models]
        workspaces += [] if heads is None else [heads.workspace(num_tokens, longest)]
        return total_bytes(workspaces)


def max_sampled_of(limits: BatchLimits) -> int:
    """The rows of logits that a step may have."""
    return max(limits.max_num_seqs, PROMPT_ROWS)


def cached_models(loaded: LoadedModels, end: Group | Member | None) -> list[CacheShape]:
    """The models that have a KV cache: of all ranks together, where these have one memory."""
    models = [loaded.model, *(draft.model for draft in loaded.drafting if draft.has_own_kv)]
    is_one_memory = end is not None and end.memory_fd is not None and loaded.device.type == "cpu"
    if not is_one_memory:
        return [model.config for model in models]
    return [model.cache_of_all_ranks for model in models if isinstance(model, Decoder)]


def load_images(
    settings: ComputeSettings, limits: BatchLimits, files: ModelFiles, model: Model
) -> ImageEncoding | None:
    """The part of the model that sees. Raises StartupError."""
    if files.vision is None or files.vision_folder is None:
        if files.has_images:
            log.warning("the model reads text only: how it sees is not known here", model=files.name)
        return None
    if not isinstance(model, Decoder) and (
        not model.splits_prompts or files.vision.num_whole or isinstance(files.vision, Dynamic)
    ):
        log.warning(
            "the model reads text only: how its images stand in a prompt is known to our own executor alone",
            implementation=model.implementation,
        )
        return None
    if (needed := files.vision.num_whole + limits.max_num_seqs) > limits.max_batched_tokens and files.vision.num_whole:
        reason = (
            f"an image of this model has {files.vision.num_whole} tokens, computed in one step with up to "
            "--max-num-seqs others"
        )
        raise StartupError(f"--max-batched-tokens {limits.max_batched_tokens} must be at least {needed}: {reason}")
    tower = load_vision_tower(files, model.backend.dtype, model.backend.device)
    token_bytes = files.config["hidden_size"] * model.backend.dtype.itemsize
    return ImageEncoding(tower, files.vision_folder, files.vision, settings.image_cache, token_bytes)


def open_tower(settings: EncoderSettings, files: ModelFiles) -> VisionTower:
    """The part that sees alone, for an encoder. Raises StartupError."""
    device = choose_device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(settings.num_threads or os.cpu_count() or 1)
    return load_vision_tower(files, choose_dtype(settings.dtype, files, device), device)


def load_vision_tower(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """Raises StartupError."""
    assert files.vision_folder is not None
    return load_tower(
        files.vision_folder, dtype, device, files.mmproj, vision_fingerprint(files, str(dtype), device.type)
    )


def refuse_segments(model: Model, block_size: int) -> str:
    """Why no prompts of segments run here; empty: they do."""
    if not model.takes_segments:
        if model.state_bytes:
            return f"{model.implementation} keeps states of whole sequences, which are not of segments"
        return f"{model.implementation} attends in its own code, which takes none"
    return f"--block-size {block_size} does not divide {SEGMENT_MULTIPLE}" if SEGMENT_MULTIPLE % block_size else ""


def longest_that_fits(settings: ComputeSettings, model: Model, limit: int | None) -> int | None:
    """The limit, but for sequences that all free memory could not hold: a file may say any number. On
    a GPU also where there is no limit, for nothing may grow there later."""
    token_bytes = token_bytes_of(settings, model.config, model.backend)
    if token_bytes == 0 or (limit is None and model.backend.device.type == "cpu"):
        return limit
    return smallest(limit, max(free_memory(model.backend.device) // token_bytes, 1))


def open_backend(settings: ComputeSettings, files: ModelFiles, device: torch.device, num_threads: int) -> Backend:
    """The backend of a device, with the settings' dtype. num_threads: on a CPU; 0: all cores. Raises
    StartupError."""
    if device.type == "cpu":
        if refusal := refused_on_cpu(settings):
            raise StartupError(refusal)
        torch.set_num_threads(num_threads or os.cpu_count() or 1)
    dtype = choose_dtype(settings.dtype, files, device)
    return choose_backend(
        dtype, device, activations=settings.activations, allow_batch_variance=settings.allow_batch_variance
    )


def warn_of_length(settings: ComputeSettings, files: ModelFiles) -> None:
    """Log that --max-model-len asks for more than the model was made for."""
    if (
        settings.max_model_len is not None
        and files.max_model_len is not None
        and settings.max_model_len > files.max_model_len
    ):
        log.warning(
            "--max-model-len is more than the model was made for, and what that is holds",
            asked=settings.max_model_len,
            max_model_len=files.max_model_len,
        )


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """How many blocks the cache has, and how long a sequence can become in them."""

    num_blocks: int
    max_model_len: int  # tokens, prompt and output


def size_cache(
    settings: ComputeSettings,
    configs: Sequence[CacheShape],
    limit: int | None,
    backend: Backend,
    workspace_bytes: int,
    end: Group | Member | None,
    state_bytes: int = 0,
) -> CacheCapacity:
    """The cache that fits in memory, on all ranks of a group. configs: of all models that have one;
    limit: the longest sequence wanted, in tokens; None: as many as the cache holds; state_bytes: as for
    choose_num_blocks. Raises StartupError."""
    num_blocks = choose_num_blocks(settings, configs, backend, workspace_bytes, state_bytes)
    if end is not None:
        num_blocks = agree_on_blocks(end, num_blocks)
    return CacheCapacity(num_blocks, smallest(limit, num_blocks * settings.block_size))


def count_blocks(settings: ComputeSettings, limits: BatchLimits, model: Model, limit: int | None) -> CacheCapacity:
    """Blocks that account for lengths, of a model without keys and values: for as many of the longest sequences as a
    step has places. limit: as for size_cache."""
    longest = smallest(limit, model.longest_text) or (DEFAULT_LENGTH if model.splits_prompts else None)
    num_blocks = limits.max_num_seqs * -(-(longest or limits.max_batched_tokens) // settings.block_size)
    return CacheCapacity(num_blocks, smallest(longest, num_blocks * settings.block_size))


@overload
def smallest(limit: int | None, other: int) -> int: ...


@overload
def smallest(limit: int | None, other: int | None) -> int | None: ...


def smallest(limit: int | None, other: int | None) -> int | None:
    """The smaller of two limits; None stands for no limit."""
    return min((known for known in (limit, other) if known is not None), default=None)


def make_scheduler(
    settings: ComputeSettings,
    limits: BatchLimits,
    size: CacheCapacity,
    kv_fingerprint: str,
    *,
    is_encoder: bool,
    slots: StateSlots | None,
) -> Scheduler:
    """The scheduler that the settings ask for. An encoder computes each text whole, so the longest
    fits in a step, and no text shares another's blocks. kv_fingerprint: of the cache's contents; slots:
    of states, if the model keeps some."""
    block_manager = BlockManager(
        size.num_blocks,
        settings.block_size,
        prefix_caching=settings.prefix_caching and not is_encoder,
        fingerprint=kv_fingerprint,
        slots=slots,
    )
    return Scheduler(
        block_manager,
        make_admission(settings.admission, block_manager, confidence=settings.admission_confidence),
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=max(limits.max_batched_tokens, size.max_model_len)
        if is_encoder
        else limits.max_batched_tokens,
        aging_s=settings.aging_s,
        target_itl_s=settings.target_itl_ms / 1000 if settings.target_itl_ms is not None else None,
        run_ahead=settings.run_ahead if slots is None else 0,
    )


def choose_publish_interval(settings: ComputeSettings, device: torch.device) -> float:
    """Seconds. Where the other stages run on the model's own cores, what they do between two steps
    is time that the model loses."""
    if settings.publish_interval_ms is not None:
        return settings.publish_interval_ms / 1000
    num_threads = torch.get_num_threads() * (1 if settings.master else settings.num_ranks)
    return SHARED_CORES_INTERVAL_S if device.type == "cpu" and num_threads >= (os.cpu_count() or 1) else 0.0


def choose_step_timeout(settings: ComputeSettings, device: torch.device) -> float:
    """Seconds after which a step counts as hung."""
    return settings.step_timeout_s or (CUDA_STEP_S if device.type == "cuda" else CPU_STEP_S)
