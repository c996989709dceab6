"""A rank of a group that is not the first: it runs its part of each step, as rank 0 tells it. It knows
nothing of requests, and does not speak to Redis."""

from services.compute.cache.kv_cache import KVCache, choose_group
from services.compute.cache.stored_cache import BlockStore
from services.compute.execution.model_runner import ModelRunner
from services.compute.loop.engine import cached_models, choose_step_timeout, load_models, reserve, room_for, size_cache
from services.compute.ranks.group.ends import Member
from services.compute.ranks.place import carry_out, make_runner, open_stored
from services.compute.speculation.draft_models import make_draft_runner
from services.compute.speculation.heads import tap_stage
from services.compute.weights.fingerprint import fingerprint
from shared.model.files import ModelFiles
from shared.process.settings import ComputeSettings


def run_rank(settings: ComputeSettings, files: ModelFiles, member: Member) -> None:
    """Load, and run what rank 0 tells until it closes the group. Raises StartupError."""
    with room_for(settings, files):
        runners, stored = load_runners(settings, files, member)
    for command in member.commands(choose_step_timeout(settings, runners[0].model.backend.device)):
        carry_out(command, runners, stored, member.answer)
    if stored is not None:
        stored.close()


def load_runners(
    settings: ComputeSettings, files: ModelFiles, member: Member
) -> tuple[list[ModelRunner], BlockStore | None]:
    """This rank's part of the model, and of those that draft for it, by number; and the copies of its
    part of the KV cache, if there are any."""
    loaded = load_models(settings, files, member)
    model, backend = loaded.model, loaded.backend
    tap_stage(settings, loaded.speculators, model)
    workspace_bytes = reserve(settings, loaded)
    member.identify(loaded.describe(settings, fingerprint(settings, files, backend).name))
    size = size_cache(settings, cached_models(loaded, member), loaded.limit, backend, workspace_bytes, member)
    cache = KVCache(
        model.config,
        backend,
        num_blocks=size.num_blocks,
        block_size=settings.block_size,
        group=choose_group(settings, model.config),
    )
    target = make_runner(loaded.place, 0, model, cache, backend.row_search)
    runners = [
        target,
        *(
            make_draft_runner(each, number, target, settings, loaded.place)
            for number, each in enumerate(loaded.drafting, 1)
        ),
    ]
    return runners, open_stored(settings, model, cache, member)
