"""Heads in the pipeline, Medusa's and EAGLE-3's: useless, harmful or good, the logs are byte for
byte those without, and so is the fingerprint.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.compute.cache.kv_cache import KVCache
from services.compute.execution.model_runner import ModelRunner
from services.compute.loop.engine import build_engine
from services.compute.models.decoder import Decoder
from services.compute.sequence.batch import BatchRow
from services.compute.speculation.eagle import EagleProposer
from services.compute.speculation.medusa import MedusaProposer
from services.compute.speculation.model_free import make_proposers
from services.compute.speculation.proposer import Proposer
from services.operator.cli import main
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings, UpSettings, load_settings
from tests.conftest import running_redis
from tests.stages.line_of_stages import FILES, LineOfStages, hurried
from tests.stages.test_speculation import answer, speculate

HIDDEN = FILES.config["hidden_size"]
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory": "16MiB", "num_threads": 1}


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[LineOfStages]:
    with running_redis(tmp_path_factory.mktemp("heads"), redis_binary) as url, hurried():
        line = LineOfStages(url)
        with line.running():
            yield line


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    flags = ["--tokens", "2000", "--vocabulary", "400", "--epochs", "2", "--temperature", "0.7", "--num-threads", "1"]
    assert main(["train-heads", "demo", str(out), *flags]) == 0
    return out


@pytest.fixture(scope="module")
def useless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random blocks on the model's own head."""
    out = tmp_path_factory.mktemp("useless")
    sizes = {"weight": (HIDDEN, HIDDEN), "bias": (HIDDEN,)}
    tensors = {
        f"blocks.{head}.layers.{layer}.{part}": torch.randn(size)
        for head in range(4)
        for layer in (0, 1)
        for part, size in sizes.items()
    }
    save_file(tensors, out / "model.safetensors")
    return out


def proposer(line: LineOfStages, heads: Path) -> MedusaProposer:
    """The heads as an engine loads them, for the model that the pipeline runs."""
    [loaded] = build_engine(ComputeSettings(heads=str(heads), speculate="medusa", **SETTINGS), FILES).proposers
    assert isinstance(loaded, MedusaProposer)
    executor = line.compute.executor
    return MedusaProposer(loaded.heads, executor, executor.row_search)


class Noting(EagleProposer):
    """Keeps what it hears of each sequence: by handle and place, the token there, and the state."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.heard: dict[int, dict[int, tuple[int, Tensor]]] = {}

    def _hear(self, row: BatchRow, states: Tensor) -> None:
        super()._hear(row, states)
        places = enumerate(zip(row.token_ids, states, strict=False), row.num_computed_tokens)
        self.heard.setdefault(row.handle, {}).update(
            {place: (token_id, state.clone()) for place, (token_id, state) in places}
        )


def eagle(line: LineOfStages, folder: Path) -> Noting:
    """The head in a folder as an engine loads it, on the pipeline's model."""
    [loaded] = build_engine(ComputeSettings(heads=str(folder), speculate="eagle", **SETTINGS), FILES).proposers
    assert isinstance(loaded, EagleProposer)
    executor = line.compute.executor
    assert isinstance(executor, ModelRunner) and isinstance(executor.model, Decoder)
    executor.model.tap(loaded.head.taps)
    cache = KVCache(
        loaded.head.config,
        executor.model.backend,
        num_blocks=executor.kv_cache.num_blocks,
        block_size=executor.kv_cache.block_size,
    )
    return Noting(loaded.head, cache, executor, executor.row_search)


def write_linear_head(
    folder: Path, weight: Tensor, norm: Tensor, taps: tuple[int, ...] = (FILES.config["num_hidden_layers"],)
) -> Path:
    """A head that adds a linear function [HIDDEN, 2 * HIDDEN] of the next token and the state to the
    state, which is the first tap's: what the last layer makes, if nothing else is said."""
    layer = {"self_attn.v_proj": weight, "self_attn.o_proj": torch.eye(HIDDEN)} | {
        f"self_attn.{name}_proj": torch.zeros(HIDDEN, 2 * HIDDEN) for name in "qk"
    }
    layer |= {f"mlp.{name}_proj": torch.zeros(32, HIDDEN) for name in ("gate", "up")} | {
        "mlp.down_proj": torch.zeros(HIDDEN, 32)
    }
    layer |= {name: torch.ones(HIDDEN) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    tensors = {f"midlayer.{name}.weight": each for name, each in layer.items()} | {
        "fc.weight": torch.eye(HIDDEN, len(taps) * HIDDEN),
        "norm.weight": norm,
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    sizes = {
        name: FILES.config[name]
        for name in ("hidden_size", "vocab_size", "num_attention_heads", "max_position_embeddings", "rms_norm_eps")
    }
    window = {"use_sliding_window": True, "sliding_window": 1}
    config = sizes | window | {"intermediate_size": 32, "eagle_aux_hidden_state_layer_ids": list(taps)}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLMEagle3"]}))
    return folder


def fitted(noted: Noting) -> Tensor:
    """The linear function that is nearest to what was heard, by least squares."""

    def normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    pairs = [
        (heard[place], heard[place + 1]) for heard in noted.heard.values() for place in heard if place + 1 in heard
    ]
    before, after = (torch.stack([pair[which][1].double() for pair in pairs]) for which in (0, 1))
    embeddings = noted.head.embedding[torch.tensor([pair[1][0] for pair in pairs])].double()
    x = torch.cat([normed(embeddings), normed(before)], 1)
    weight: Tensor = torch.linalg.solve(x.T @ x + 0.1 * torch.eye(2 * HIDDEN).double(), x.T @ (after - before))
    return weight.T.float().contiguous()


def logs(line: LineOfStages, *proposers: Proposer) -> tuple[dict[str, Any], int]:
    """The logs of all requests, and how many drafts stood."""
    speculation = speculate(line, *proposers)
    return answer(line), speculation.total.num_accepted_tokens


def test_logs_are_the_same_with_heads(line: LineOfStages, useless: Path, trained: Path) -> None:
    expected, _ = logs(line)
    found, _ = logs(line, proposer(line, useless))
    assert found == expected
    heads = proposer(line, trained)
    found, num_accepted = logs(line, heads)
    assert found == expected and num_accepted > 0
    assert heads._states == {}, "who has ended is forgotten"


def test_logs_are_the_same_with_an_eagle_head(line: LineOfStages, tmp_path: Path) -> None:
    """One that knows nothing; and one that was fitted to the states that the first heard."""
    expected, _ = logs(line)
    model = line.compute.executor.model
    useless = eagle(
        line, write_linear_head(tmp_path / "useless", torch.randn(HIDDEN, 2 * HIDDEN), model.weights.norm.float())
    )
    found, _ = logs(line, useless)
    assert found == expected
    head = eagle(line, write_linear_head(tmp_path / "fitted", fitted(useless), model.weights.norm.float()))
    found, num_accepted = logs(line, head)
    assert found == expected and num_accepted > 20
    assert head._unread == {}, "who has ended is forgotten"


def test_auto_takes_heads_that_are_given_and_the_fingerprint_knows_nothing_of_them(
    trained: Path, line: LineOfStages
) -> None:
    plain, given = (build_engine(ComputeSettings(heads=heads, **SETTINGS), FILES) for heads in ("", str(trained)))
    assert plain.fingerprint == given.fingerprint and plain.proposers == ()
    assert [each.name for each in make_proposers(given.speculators, line.compute.constraints, given.proposers)] == [
        "grammar",
        "prediction",
        "lookup",
        "medusa",
    ]
    assert build_engine(ComputeSettings(heads=str(trained), speculate="off", **SETTINGS), FILES).proposers == ()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--speculate", "medusa"], "--speculate medusa needs --heads"),
        (["--speculate", "eagle"], "--speculate eagle needs --heads"),
        (["--speculate", "lookup", "--heads", "x"], "--speculate lookup does not use --heads"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], reason: str) -> None:
    for settings in (ComputeSettings, UpSettings):
        with pytest.raises(StartupError, match=reason):
            load_settings(settings, flags)


def test_a_folder_says_which_kind_it_holds(useless: Path, tmp_path: Path) -> None:
    head = write_linear_head(tmp_path / "head", torch.zeros(HIDDEN, 2 * HIDDEN), torch.ones(HIDDEN))
    plain, given = (build_engine(ComputeSettings(heads=heads, **SETTINGS), FILES) for heads in ("", str(head)))
    assert [each.name for each in given.proposers] == ["eagle"] and given.fingerprint == plain.fingerprint
    assert given.scheduler.block_manager.num_blocks < plain.scheduler.block_manager.num_blocks, (
        "its keys and values are a part of --kv-cache-memory"
    )
    for kind, folder in (("medusa", head), ("eagle", useless)):
        with pytest.raises(StartupError, match=f"--speculate {kind}: the heads in .* are of another kind, "):
            build_engine(ComputeSettings(heads=str(folder), speculate=kind, **SETTINGS), FILES)
    (head / "config.json").unlink()
    with pytest.raises(StartupError, match="config.json has no"):  # an EAGLE head by its tensors
        build_engine(ComputeSettings(heads=str(head), **SETTINGS), FILES)


def test_heads_of_another_model_are_refused(useless: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    for heads, reason in ((tmp_path, "another model's heads"), (tmp_path / "none", "no such folder")):
        with pytest.raises(StartupError, match=reason):
            build_engine(ComputeSettings(heads=str(heads), **SETTINGS), FILES)
