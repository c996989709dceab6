"""`python -m services.compute`: settings, objects, run."""

import os

import torch

from services.compute.cache.block_manager import BlockManager
from services.compute.cache.kv_cache import KVCache, choose_group, choose_num_blocks
from services.compute.exchange.exchange import Exchange
from services.compute.model_runner import ModelRunner
from services.compute.models.config import read_config
from services.compute.models.decoder import Decoder
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.scheduler import Scheduler
from services.compute.service import ComputeService, choose_device
from services.compute.weights.loader import load_weights
from shared.errors import StartupError
from shared.model_files import ModelFiles, open_model
from shared.settings import ComputeSettings, load_settings
from shared.stage import Stage, run_stage, start_logging
from shared.streams import prompts
from shared.telemetry import get_logger

log = get_logger("penstock.compute")


def choose_dtype(name: str, files: ModelFiles) -> torch.dtype:
    """The dtype asked for, or the checkpoint's (float16, which the CPU computes slowly, becomes bfloat16)."""
    wanted = name if name != "auto" else str(files.config.get("dtype") or files.config.get("torch_dtype") or "bfloat16")
    return torch.float32 if wanted == "float32" else torch.bfloat16


def build_engine(settings: ComputeSettings, files: ModelFiles) -> tuple[Scheduler, ModelRunner, int]:
    """The model, its cache and its scheduler, and the longest sequence they take."""
    device = choose_device(settings.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: torch sees no CUDA device")
    if device.type == "cpu":
        torch.set_num_threads(settings.num_threads or os.cpu_count() or 1)
    dtype = choose_dtype(settings.dtype, files)
    config = read_config(files.config)
    weights = load_weights(
        files.folder, config, dtype, device, quantization=settings.quantization, group=int(settings.quantization_group),
        attention_output=settings.quantize_attention_output,
    )  # fmt: skip
    model = Decoder(config, weights)
    longest = min(settings.max_model_len or files.max_model_len, files.max_model_len)
    num_blocks = choose_num_blocks(settings, config, dtype=dtype, device=device)
    longest = min(longest, num_blocks * settings.block_size)
    kv_cache = KVCache(config, num_blocks=num_blocks, block_size=settings.block_size, dtype=dtype, device=device, group=choose_group(settings, config))
    block_manager = BlockManager(num_blocks, settings.block_size, prefix_caching=settings.prefix_caching)
    scheduler = Scheduler(
        block_manager,
        make_admission(settings.admission, block_manager, confidence=settings.admission_confidence),
        max_num_seqs=settings.max_num_seqs,
        max_batched_tokens=settings.max_batched_tokens,
        aging_s=settings.aging_s,
        target_itl_s=settings.target_itl_ms / 1000 if settings.target_itl_ms is not None else None,
    )
    log.info(
        "model loaded", model=files.name, device=device.type, dtype=str(dtype).removeprefix("torch."), threads=torch.get_num_threads(),
        kv_tokens=num_blocks * settings.block_size, max_model_len=longest,
    )  # fmt: skip
    return scheduler, ModelRunner(model, kv_cache, device), longest


def main() -> None:
    settings = load_settings(ComputeSettings)
    start_logging(settings)
    files = open_model(settings.model, settings.served_model_name, weights=True)
    scheduler, runner, longest = build_engine(settings, files)
    stage = Stage("compute", settings, model=files.name, aliases=files.aliases, max_model_len=longest)
    ComputeService(stage, settings, scheduler, runner, Exchange(stage, prompts(files.name))).run()


if __name__ == "__main__":
    run_stage(main)
