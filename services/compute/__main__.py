"""`python -m services.compute`: settings, objects, run."""

from contextlib import nullcontext

from services.compute.ranks.group.ends import Group, Member, join_group, open_group, rank_of
from services.compute.ranks.parallel.share import check_stages
from shared.model.files import ModelFiles, open_model
from shared.process.host_memory import enough_memory
from shared.process.settings import ComputeSettings, load_settings
from shared.wire.stage import Stage, run_stage, start_logging

IMPORTS_TORCH = "torch alone needs some 700 MiB: raise the limit (ulimit -v)"


def main() -> None:
    settings = load_settings(ComputeSettings)
    rank = rank_of(settings)
    start_logging(settings, rank)
    files = open_model(settings.model, settings.served_model_name, weights=True)

    if (num_layers := files.config.get("num_hidden_layers")) is not None:
        check_stages(settings.pipeline_parallel_size, num_layers)

    # torch takes seconds to import: only the functions below do, so that a bad setting, or a rank that
    # does not fit in, ends the program at once
    if rank:
        with join_group(settings) as member:
            return follow(settings, files, member)
    with open_group(settings) or nullcontext() as group:
        serve(settings, files, group)
        if group is not None:
            group.close()


def follow(settings: ComputeSettings, files: ModelFiles, member: Member) -> None:
    with enough_memory("compute", IMPORTS_TORCH):
        from services.compute.ranks.rank import run_rank

    run_rank(settings, files, member)


def serve(settings: ComputeSettings, files: ModelFiles, group: Group | None) -> None:
    with enough_memory("compute", IMPORTS_TORCH):
        from services.compute.loop.engine import build_engine
        from services.compute.loop.service import ComputeService
        from services.compute.weights.sizes import sizes_of, weights_of

    engine = build_engine(settings, files, group)
    stage = Stage(
        "compute",
        settings,
        model=files.name,
        aliases=files.aliases,
        max_model_len=engine.max_model_len,
        step_timeout_s=engine.step_timeout_s,
    )
    stage.fingerprint = engine.fingerprint
    stage.is_encoder = engine.is_encoder
    stage.labels, stage.is_multi_label = files.labels, files.is_multi_label
    stage.sizes, stage.weights = sizes_of(files), weights_of(files, settings.quantization)
    stage.takes_images = engine.images is not None
    stage.ranks = () if group is None else tuple(f"{peer.host}:{peer.pid}" for peer in group.peers)
    blocks = engine.scheduler.block_manager
    if blocks.prefix_caching:
        stage.kv_fingerprint, stage.block_size = blocks.fingerprint, blocks.block_size
    ComputeService(stage, settings, engine).run()


if __name__ == "__main__":
    run_stage(main)
