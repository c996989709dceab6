"""The heads in the folder that --heads names, be they Medusa's or EAGLE-3's, as a proposer."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from services.compute.cache.kv_cache import KVCache, choose_group
from services.compute.execution.model_runner import Model, ModelRunner
from services.compute.models.decoder import Decoder
from services.compute.speculation.eagle import EagleProposer
from services.compute.speculation.eagle_file import is_eagle, read_eagle, read_taps
from services.compute.speculation.eagle_head import EagleHead
from services.compute.speculation.medusa import MedusaHeads, MedusaProposer
from services.compute.speculation.medusa_file import read_json, read_medusa
from services.compute.speculation.proposer import Proposer
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")


def load_heads(settings: ComputeSettings, speculators: Sequence[str], model: Model) -> MedusaHeads | EagleHead | None:
    """The heads that --heads names, for a model whose drafts are asked for; an EAGLE head taps the
    model. A folder that is missing is refused where no drafts are wanted, too. Raises StartupError."""
    if not settings.heads:
        return None
    folder = Path(settings.heads).expanduser()
    found, kind = open_heads(folder)
    if not speculators:
        return None
    if not isinstance(model, Decoder):
        raise StartupError(
            f"--heads {settings.heads}: heads are for models of the native implementation (--model-impl)"
        )
    config, backend = model.whole, model.backend
    if not {"auto", kind} & set(speculators):
        raise StartupError(f"--speculate {settings.speculate}: the heads in {folder} are of another kind, {kind}")
    if kind == "eagle":
        weights = read_eagle(folder, found, config, backend.dtype, backend.device)
        log.info("an EAGLE-3 head loaded", heads=settings.heads, taps=weights.taps, mib=weights.num_bytes >> 20)
        model.tap(weights.taps)
        return EagleHead(weights, model.weights.embedding, model.weights.lm_head, config.vocab_size, backend)
    medusa = read_medusa(folder, config.hidden_size, config.vocab_size, backend.dtype, backend.device)
    log.info("heads loaded", heads=settings.heads, num_heads=len(medusa.blocks), mib=medusa.num_bytes >> 20)
    return MedusaHeads(medusa, model.weights.lm_head, config.vocab_size, backend)


def tap_stage(settings: ComputeSettings, speculators: Sequence[str], model: Model) -> None:
    """On another rank than 0, of a model of stages: tap the layers that rank 0's EAGLE head reads, if it
    has one. Raises StartupError."""
    if settings.heads and speculators and isinstance(model, Decoder) and model.stage is not None:
        folder = Path(settings.heads).expanduser()
        found, kind = open_heads(folder)
        if kind == "eagle":
            model.tap(read_taps(folder, found, model.whole.num_layers))


def open_heads(folder: Path) -> tuple[dict[str, Any], str]:
    """The config.json of a folder with heads, and their kind. Raises StartupError."""
    if not folder.is_dir():
        raise StartupError(f"--heads {folder}: no such folder")
    found = read_json(folder)
    return found, "eagle" if is_eagle(found, tensor_names(folder)) else "medusa"


def make_head_proposer(heads: MedusaHeads | EagleHead, target: ModelRunner, settings: ComputeSettings) -> Proposer:
    """The proposer of heads. target: the runner of the model that they guess for."""
    if isinstance(heads, MedusaHeads):
        return MedusaProposer(heads, target, target.row_search)
    cache, group = target.kv_cache, choose_group(settings, heads.config)
    own = KVCache(heads.config, heads.backend, num_blocks=cache.num_blocks, block_size=cache.block_size, group=group)
    return EagleProposer(heads, own, target, target.row_search)


def tensor_names(folder: Path) -> list[str]:
    """The names of the tensors in a folder's safetensors. What can't be read is reported when it is
    wanted."""
    names: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(SafetensorError, OSError), safe_open(file, framework="pt") as tensors:
            names += tensors.keys()
    return names
