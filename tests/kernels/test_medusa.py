"""Medusa heads: both layouts of their files against plain torch, the draw of drafts, and which
state they are made of.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.compute.backends.backend import Backend
from services.compute.backends.matrix import Dense
from services.compute.candidates.reduction import reduce
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from services.compute.speculation.medusa import MedusaHeads, MedusaProposer, guess
from services.compute.speculation.medusa_file import HeadWeights, read_medusa
from services.compute.speculation.proposer import Wanted
from shared.model.sampling_params import SamplingParams
from shared.process.errors import StartupError
from tests.kernels.backends import CPU, FLOAT32, native_backend
from tests.kernels.families import Engine, reference_model

HIDDEN, VOCAB, HEADS, LAYERS, KNOWN = 64, 200, 3, 2, 50
Tensors = dict[str, Tensor]


def random(*shape: int, spread: float = 0.3) -> Tensor:
    return torch.randn(shape) * spread


def makers_own() -> Tensors:
    """FasterDecoding's: each head a list, its LM head the last of it."""
    tensors = {f"{head}.{LAYERS}.weight": random(VOCAB, HIDDEN) for head in range(HEADS)}
    for head in range(HEADS):
        for layer in range(LAYERS):
            tensors |= {
                f"{head}.{layer}.linear.weight": random(HIDDEN, HIDDEN),
                f"{head}.{layer}.linear.bias": random(HIDDEN),
            }
    return tensors


def other(**extra: Tensor) -> Tensors:
    """vLLM's, without biases: blocks, and LM heads apart."""
    return {
        f"blocks.{head}.layers.{layer}.weight": random(HIDDEN, HIDDEN)
        for head in range(HEADS)
        for layer in range(LAYERS)
    } | extra


def with_lm_heads() -> Tensors:
    return {
        f"medusa_heads.{name}": each
        for name, each in other(**{f"lm_heads.{head}.weight": random(VOCAB, HIDDEN) for head in range(HEADS)}).items()
    }


def with_one_lm_head() -> Tensors:
    return other(**{"lm_heads.0.weight": random(KNOWN, HIDDEN)}, token_map=torch.randperm(VOCAB)[:KNOWN])


def with_whole_lm_head_and_map() -> Tensors:
    return other(**{"lm_head.weight": random(VOCAB, HIDDEN)}, token_map=torch.randperm(VOCAB)[:KNOWN])


LAYOUTS: list[Callable[[], Tensors]] = [makers_own, with_lm_heads, with_one_lm_head, with_whole_lm_head_and_map, other]
OWN_HEAD = random(VOCAB, HIDDEN)


def write(
    folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, name: str = "medusa_lm_head.safetensors"
) -> Path:
    save_file(tensors, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def reference(tensors: Tensors, x: Tensor, head: int) -> Tensor:
    """x: [R, hidden]. Returns the head's logits over the whole vocabulary, or minus infinity."""
    found = {name.removeprefix("medusa_heads."): each for name, each in tensors.items()}
    is_list = f"{head}.0.linear.weight" in found
    for layer in range(LAYERS):
        prefix = f"{head}.{layer}.linear." if is_list else f"blocks.{head}.layers.{layer}."
        x = x + torch.nn.functional.silu(
            torch.nn.functional.linear(x, found[prefix + "weight"], found.get(prefix + "bias"))
        )
    names = (f"{head}.{LAYERS}.weight", f"lm_heads.{head}.weight", "lm_heads.0.weight", "lm_head.weight")
    lm_head = next((found[name] for name in names if name in found), OWN_HEAD)
    if (token_map := found.get("token_map")) is None:
        return x @ lm_head.T
    rows = lm_head if len(lm_head) == KNOWN else lm_head[token_map]
    return torch.full((len(x), VOCAB), -torch.inf).index_copy(1, token_map, x @ rows.T)


def heads_of(weights: HeadWeights, backend: Backend) -> MedusaHeads:
    return MedusaHeads(weights, backend.make_linear(Dense(OWN_HEAD.to(backend.dtype))), VOCAB, backend)


def whole(logits: Tensor, heads: MedusaHeads) -> Tensor:
    """Logits over the whole vocabulary."""
    if heads.token_ids is None:
        return logits.clone()
    return torch.full((len(logits), VOCAB), -torch.inf).index_copy(1, torch.from_numpy(heads.token_ids), logits)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("depth", [1, HEADS])
def test_heads_compute_what_plain_torch_does(tmp_path: Path, layout: Callable[[], Tensors], depth: int) -> None:
    tensors, x = layout(), random(5, HIDDEN, spread=1.0)
    folder = write(tmp_path, tensors, {"medusa_num_heads": 7, "hidden_size": HIDDEN, "vocab_size": VOCAB})
    expected = torch.stack([reference(tensors, x, head) for head in range(depth)], 1).flatten(0, 1)
    exact = heads_of(read_medusa(folder, HIDDEN, VOCAB, torch.float32, CPU), FLOAT32)
    assert len(exact) == HEADS, "the tensors say how many there are, not config.json"
    torch.testing.assert_close(whole(exact.logits(x, depth), exact), expected, atol=2e-5, rtol=1e-5)
    native = heads_of(read_medusa(folder, HIDDEN, VOCAB, torch.bfloat16, CPU), native_backend())
    found, is_known = whole(native.logits(x, depth), native), expected.isfinite()
    assert (found.isfinite() == is_known).all()
    assert (found[is_known] - expected[is_known]).norm() < 0.02 * expected[is_known].norm()


BROKEN: list[tuple[str, Callable[[Tensors], Any], str]] = [
    ("a layer is missing", lambda tensors: tensors.pop("blocks.1.layers.0.weight"), "layer 0 of head 1 has no weight"),
    (
        "a head is missing",
        lambda tensors: [tensors.pop(f"blocks.1.layers.{layer}.weight") for layer in range(LAYERS)],
        "layer 0 of head 1 has no weight",
    ),
    ("of another size", lambda tensors: tensors.update({"blocks.0.layers.0.weight": random(32, 32)}), "not (64, 64)"),
    ("no numbers", lambda tensors: tensors["blocks.2.layers.1.weight"].fill_(torch.nan), "holds NaN"),
    (
        "unknown tokens",
        lambda tensors: tensors["token_map"].fill_(VOCAB),
        "token_map is not a list of the model's tokens",
    ),
    (
        "no list of tokens",
        lambda tensors: tensors.update(token_map=random(KNOWN)),
        "token_map is not a list of the model's tokens",
    ),
    (
        "too few LM heads",
        lambda tensors: tensors.update({"lm_heads.1.weight": random(KNOWN, HIDDEN)}),
        "3 heads and 2 LM heads",
    ),
    ("a map without head", lambda tensors: tensors.pop("lm_heads.0.weight"), "token_map without an LM head"),
    (
        "too many heads",
        lambda tensors: tensors.update({"blocks.16.layers.0.weight": random(HIDDEN, HIDDEN)}),
        "more than 16 heads",
    ),
    (
        "EAGLE",
        lambda tensors: tensors.update({"midlayer.mlp.up_proj.weight": random(HIDDEN, HIDDEN)}),
        "is no tensor of Medusa heads",
    ),
    (
        "a model",
        lambda tensors: (
            [tensors.pop(name) for name in [*tensors]] and tensors.update({"lm_head.weight": random(VOCAB, HIDDEN)})
        ),
        "no Medusa heads",
    ),
]


@pytest.mark.parametrize(("breaks", "reason"), [each[1:] for each in BROKEN], ids=[each[0] for each in BROKEN])
def test_broken_files_are_refused_in_one_line(tmp_path: Path, breaks: Callable[[Tensors], Any], reason: str) -> None:
    tensors = with_one_lm_head()
    breaks(tensors)
    with pytest.raises(StartupError) as refused:
        read_medusa(write(tmp_path, tensors), HIDDEN, VOCAB, torch.float32, CPU)
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_other_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no such folder"):
        read_medusa(tmp_path / "nowhere", HIDDEN, VOCAB, torch.float32, CPU)
    (tmp_path / "medusa_lm_head.pt").touch()
    with pytest.raises(StartupError, match=r"medusa_lm_head\.pt is a pickle, .*: convert it to safetensors"):
        read_medusa(tmp_path, HIDDEN, VOCAB, torch.float32, CPU)
    write(tmp_path, other(), {"hidden_size": 4096})
    with pytest.raises(StartupError, match="hidden_size is 4096, the model's is 64: these are another model's heads"):
        read_medusa(tmp_path, HIDDEN, VOCAB, torch.float32, CPU)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(StartupError, match="expected an object"):
        read_medusa(tmp_path, HIDDEN, VOCAB, torch.float32, CPU)


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(top_k=5, seed=1),
    SamplingParams(top_p=0.6, seed=9),
    SamplingParams(temperature=1.4, min_p=0.1, seed=2),
    SamplingParams(seed=1 << 63),
]


def test_a_head_that_agrees_with_the_model_draws_its_tokens() -> None:
    """From equal logits, whatever the request's parameters are, and whichever part of the vocabulary the head knows."""
    search, logits = FLOAT32.row_search, random(len(PARAMS), 60, spread=2.0)
    sequences = [Sequence(Request(number, "", params), Tokens([1, 2, 3], 2)) for number, params in enumerate(PARAMS)]
    positions = [sequence.next_position for sequence in sequences]
    expected = reduce(logits.clone(), sequences, search).chosen
    assert guess(logits, PARAMS, positions, None, search).token_ids.tolist() == expected.tolist()
    order = torch.randperm(60).sort().indices
    assert (
        guess(logits[:, order].contiguous(), PARAMS, positions, order.numpy(), search).token_ids.tolist()
        == expected.tolist()
    )
    sure = guess(random(2, 60, spread=0.01).index_fill(1, torch.tensor([7]), 9.0), PARAMS[:1] * 2, [1, 1], None, search)
    assert sure.token_ids.tolist() == [7, 7] and (sure.chances > 0.98).all() and np.isfinite(sure.chances).all()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    reference_model("llama2", folder)
    return Engine(folder)


def echo(engine: Engine) -> MedusaProposer:
    """Heads that change nothing: on the model's own head they say once more what it has just drawn."""
    hidden, backend = engine.runner.model.config.hidden_size, engine.runner.model.backend
    weights = HeadWeights([[(torch.zeros(hidden, hidden), None)]] * 2, [], None)
    head = engine.runner.model.weights.lm_head
    return MedusaProposer(
        MedusaHeads(weights, head, engine.runner.vocab_size, backend), engine.runner, backend.row_search
    )


def test_drafts_are_made_of_the_state_behind_the_last_token_that_stands(engine: Engine) -> None:
    proposer = echo(engine)
    tokens = [5, 9, 12, 7, 30, 8]
    rows = (
        BatchRow(1, (3, 4), 0, (0,), range(1, 2), 2),
        BatchRow(2, tuple(tokens), 0, (1,), range(3, 6), 4),
        BatchRow(3, (6,), 0, (2,)),
    )
    batch = ScheduledBatch(rows, 0)
    hidden = engine.runner.run(batch)
    drawn = engine.runner.logits(batch, hidden).argmax(-1).tolist()
    for count in (1, 2, 3):  # of the second's tokens: so many stand
        proposer.computed(batch, hidden, {1: 1, 2: count})
        first = Sequence(Request(1, "", SamplingParams(temperature=0.0)), Tokens([3, 4, drawn[0]], 2))
        second = Sequence(
            Request(2, "", SamplingParams(temperature=0.0)), Tokens([*tokens[: 3 + count], drawn[count]], 4)
        )
        unknown = Sequence(replace(first.request, handle=9), Tokens([3, 4, drawn[0]], 2))
        drafts = proposer.propose({1: Wanted(first, 5), 2: Wanted(second, 1), 9: Wanted(unknown, 5)})
        said = {handle: each.token_ids for handle, each in drafts.items()}
        assert said == {
            handle: each for handle, each in {1: [drawn[0]] * 2, 2: [drawn[count]]}.items() if handle in said
        }
        chances = engine.runner.logits(batch, hidden).softmax(-1).amax(-1)
        assert (1 in said) == bool(chances[0] >= 0.15) and (2 in said) == bool(chances[count] >= 0.15)
    assert 9 not in drafts
    proposer.forget(2)
    proposer.forget(77)
    assert set(proposer._states) == {1}


def test_what_was_computed_before_a_cut_proposes_nothing(engine: Engine) -> None:
    proposer = echo(engine)
    batch = ScheduledBatch((BatchRow(1, (3, 4), 0, (0,), range(1, 2), 2),), 0)
    proposer.computed(batch, engine.runner.run(batch), {1: 1})
    assert (
        proposer.propose(
            {1: Wanted(Sequence(Request(1, "", SamplingParams(temperature=0.0)), Tokens([3, 4, 5, 6], 2)), 5)}
        )
        == {}
    )
    assert (
        proposer.propose({1: Wanted(Sequence(Request(1, "", SamplingParams(temperature=0.0)), Tokens([3, 4], 2)), 5)})
        == {}
    )
