"""Models that draft: the target itself in four bits, on the target's own keys and values, and a
second, smaller model with a cache of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tokenizers import Tokenizer

from services.compute.backends.backend import Backend
from services.compute.cache.kv_cache import KVCache, choose_group
from services.compute.execution.model_runner import Model, ModelRunner
from services.compute.models.architectures import lack_of, read_config
from services.compute.models.decoder import Decoder
from services.compute.ranks.place import ALONE, Placement, load_decoder, make_runner
from services.compute.speculation.chains import ChainProposer
from services.compute.speculation.draft_kv import DraftKV, OwnKV, TargetKV
from services.compute.weights.loader import check_quantizable, open_source
from shared.model.files import ModelFiles, open_model
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings

MIN_SHARED = 0.99  # of two vocabularies, for drafts of one to be worth the other's while
# what decides where and how a key or a value is stored
SHAPE = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "full_shape",
    "rope_of_layer",
    "sliding_windows",
)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that is loaded to draft."""

    name: Literal["self", "draft"]  # in --speculate
    model: Decoder
    max_model_len: int | None  # tokens that it was made for

    @property
    def has_own_kv(self) -> bool:
        return self.name == "draft"


def load_draft_models(
    names: Sequence[str],
    settings: ComputeSettings,
    files: ModelFiles,
    model: Model,
    limit: int | None,
    place: Placement = ALONE,
) -> list[DraftModel]:
    """The models that --speculate names, or this place's parts of them; the target is number 0. files,
    model: the target's; limit: the longest sequence wanted, in tokens. Raises StartupError, for a
    model that is missing also where no drafts are wanted."""
    for path in filter(None, (settings.self_draft, settings.draft_model)):
        open_model(path)
    found: list[DraftModel] = []
    if "self" in names:
        assert isinstance(model, Decoder)
        found.append(DraftModel("self", load_self(settings, files, model, limit, place), files.max_model_len))
    if "draft" in names:
        found.append(load_other(settings.draft_model, files, model.backend, limit, place, 1 + len(found)))
    return found


def load_self(
    settings: ComputeSettings, files: ModelFiles, model: Decoder, limit: int | None, place: Placement
) -> Decoder:
    """The target's layers in four bits: rounded to nearest as they are read, or as `penstock
    quantize` left them."""
    config = read_config(files.config, limit)
    if settings.self_draft:
        other_config = read_config(open_model(settings.self_draft, weights=True).config, limit)
        other = next((name for name in SHAPE if getattr(other_config, name) != getattr(config, name)), None)
        if other is not None:
            raise StartupError(
                f"--self-draft {settings.self_draft}: it is another model than {files.name}, with another {other}"
            )
        draft = load_decoder(
            place, 1, open_model(settings.self_draft, weights=True).weights, other_config, model.backend
        )
    else:
        if settings.quantization in ("w4", "nf4") or (
            config.packed is not None and config.packed.quantization != "none"
        ):
            raise StartupError(
                f"--speculate self: {files.name} is quantized itself; drafts of its own weights are for models in 16 "
                "bits, or --quantization w8a8"
            )
        source = open_source(files.weights, config, model.backend)
        source.close()
        check_quantizable(files.weights, source.quantized_as, "--speculate self")
        draft = load_decoder(
            place,
            1,
            files.weights,
            config,
            model.backend,
            quantization="w4",
            group=int(settings.quantization_group),
            attention_output=True,
        )
    draft.weights = replace(draft.weights, embedding=model.weights.embedding)
    return draft


def load_other(
    path: str, files: ModelFiles, backend: Backend, limit: int | None, place: Placement, number: int
) -> DraftModel:
    """The model of --draft-model, which has the target's vocabulary. number: among the replica's."""
    found = open_model(path, weights=True)
    if reason := lack_of(found.config):
        raise StartupError(f"--draft-model {path}: {reason}")
    check_tokenizer(path, found, files)
    config = read_config(found.config, limit)
    if config.recurrence is not None:
        raise StartupError(f"--draft-model {path}: its layers keep states, which do not go back when a draft is wrong")
    return DraftModel("draft", load_decoder(place, number, found.weights, config, backend), found.max_model_len)


def check_tokenizer(path: str, found: ModelFiles, files: ModelFiles) -> None:
    """Raises StartupError where a token's id says little about the same token of the other
    model."""
    ours, theirs = (
        Tokenizer.from_file(str(each.folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
        for each in (files, found)
    )
    num_same = sum(theirs.get(token) == token_id for token, token_id in ours.items())
    if num_same < MIN_SHARED * max(len(ours), len(theirs)):
        raise StartupError(
            f"--draft-model {path}: its tokenizer does not fit that of {files.name}: {num_same} of {len(ours)} tokens "
            "are the same"
        )


def make_draft_runner(
    draft: DraftModel, number: int, target: ModelRunner, settings: ComputeSettings, place: Placement
) -> ModelRunner:
    """The runner of a draft model, on the target's cache or on its own, of as many blocks. number:
    among the replica's models."""
    cache, config = target.kv_cache, draft.model.config
    if draft.has_own_kv:
        group = choose_group(settings, config)
        cache = KVCache(
            config, draft.model.backend, num_blocks=cache.num_blocks, block_size=cache.block_size, group=group
        )
    return make_runner(place, number, draft.model, cache, target.row_search)


def make_chain_proposer(
    draft: DraftModel, target: ModelRunner, max_batched_tokens: int, max_model_len: int, runner: ModelRunner
) -> ChainProposer:
    """The proposer of a draft model. target: the runner of the model that it drafts for;
    max_batched_tokens, max_model_len: of a step, and of a sequence there; runner: the draft model's."""
    cache = target.kv_cache
    kv: DraftKV = OwnKV(cache.num_blocks, cache.block_size) if draft.has_own_kv else TargetKV()
    return ChainProposer(
        draft.name,
        runner,
        kv,
        max_batched_tokens=max_batched_tokens,
        max_model_len=min(max_model_len, draft.max_model_len or max_model_len),
        vocab_size=target.vocab_size,
    )
