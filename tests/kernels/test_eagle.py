"""EAGLE-3 heads: both layouts of their files, chains against plain torch on transformers' hidden
states, what is refused, and taps that change no bit.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from services.compute.cache.kv_cache import KVCache
from services.compute.models.decoder import Decoder
from services.compute.sequence import BlockTable, Request, Sequence, Tokens
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from services.compute.speculation import eagle
from services.compute.speculation.eagle import EagleProposer
from services.compute.speculation.eagle_file import EagleWeights, is_eagle, read_eagle
from services.compute.speculation.eagle_head import EagleHead
from services.compute.speculation.proposer import Wanted
from shared.model.sampling_params import SamplingParams
from shared.process.errors import StartupError
from tests.kernels.backends import CPU
from tests.kernels.families import SIZES, Engine, reference_model

FAMILY, HIDDEN, VOCAB, KNOWN, EPS, HEADS, HEAD_DIM = "llama-heads", 64, 512, 100, 1e-5, 4, 32
BLOCK = 16
GREEDY = SamplingParams(temperature=0.0)
Tensors = dict[str, Tensor]


def random(*shape: int, spread: float = 0.2) -> Tensor:
    return torch.randn(shape) * spread


def head(hidden: int = HIDDEN, num_taps: int = 3, known: int = KNOWN) -> Tensors:
    """The makers' own layout."""
    token_ids = torch.randperm(VOCAB)[:known].sort().values
    layer = {
        f"self_attn.{name}_proj.weight": random(HEAD_DIM * num, 2 * hidden)
        for name, num in (("q", HEADS), ("k", 2), ("v", 2))
    }
    layer |= {"self_attn.o_proj.weight": random(hidden, HEAD_DIM * HEADS), "mlp.down_proj.weight": random(hidden, 80)}
    layer |= {f"mlp.{name}_proj.weight": random(80, hidden) for name in ("gate", "up")}
    layer |= {
        f"{name}.weight": 1 + random(hidden) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    }
    return {f"midlayer.{name}": each for name, each in layer.items()} | {
        "fc.weight": random(hidden, num_taps * HIDDEN),
        "norm.weight": 1 + random(hidden),
        "lm_head.weight": random(known, hidden, spread=0.5),
        "d2t": token_ids - torch.arange(known),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, token_ids, value=True),
    }


def makers_own() -> tuple[Tensors, dict[str, Any]]:
    return head(), {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": KNOWN}


def speculators() -> tuple[Tensors, dict[str, Any]]:
    tensors = {name.replace("midlayer", "layers.0"): each for name, each in head(num_taps=2).items() if name != "d2t"}
    tensors |= {
        "input_norm.weight": 1 + random(2 * HIDDEN),
        "embed_tokens.weight": random(VOCAB, HIDDEN),
        "verifier_norm.weight": random(HIDDEN),
    }
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": LAYER,
        "eagle_aux_hidden_state_layer_ids": [3, 0],
        "norm_output": True,
    }
    return tensors, config


def of_another_width() -> tuple[Tensors, dict[str, Any]]:
    """With whatever else there may be: biases, norms of each state and of q and k, a window, layers
    counted from what the first makes.
    """
    tensors = (
        head(96)
        | {"embed_tokens.weight": random(VOCAB, 96)}
        | {f"fc_norm.{number}.weight": 1 + random(HIDDEN) for number in range(3)}
    )
    tensors |= {
        f"midlayer.self_attn.{name}_proj.bias": random(size)
        for name, size in (("q", HEAD_DIM * HEADS), ("v", 2 * HEAD_DIM), ("o", 96))
    }
    tensors |= {f"midlayer.self_attn.{name}_norm.weight": 1 + random(HEAD_DIM) for name in "qk"}
    window = {"use_sliding_window": True, "sliding_window": 24, "layer_types": ["sliding_attention"]}
    layer = LAYER | window | {"hidden_size": 96, "target_hidden_size": HIDDEN}
    return tensors, layer | {"draft_vocab_size": KNOWN, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 2]}}


def without_own() -> tuple[Tensors, dict[str, Any]]:
    """It draws from the whole vocabulary by the model's own LM head."""
    return {name: each for name, each in head().items() if name not in ("lm_head.weight", "d2t", "t2d")}, dict(LAYER)


LAYER = SIZES | {
    "num_hidden_layers": 1,
    "intermediate_size": 80,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": EPS,
    "rope_theta": 500.0,
}
LAYOUTS: list[tuple[Callable[[], tuple[Tensors, dict[str, Any]]], tuple[int, ...]]] = [
    (makers_own, (2, 1, 0)),
    (speculators, (3, 0)),
    (of_another_width, (2, 1, 3)),
    (without_own, (2, 1, 0)),
]


def write(folder: Path, tensors: Tensors, config: dict[str, Any], *, is_pickle: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    if is_pickle:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("model")
    return reference_model(FAMILY, folder), folder


@pytest.fixture(scope="module")
def engine(model: tuple[PreTrainedModel, Path]) -> Engine:
    return Engine(model[1], num_blocks=64)


def decoder(engine: Engine) -> Decoder:
    assert isinstance(engine.runner.model, Decoder)
    return engine.runner.model


class Recording(EagleHead):
    """Keeps the logits that chains were drawn from."""

    def logits(self, results: Tensor) -> Tensor:
        found = super().logits(results)
        self.drawn = [*getattr(self, "drawn", []), found.clone()]
        return found


def proposer(engine: Engine, weights: EagleWeights) -> EagleProposer:
    target = decoder(engine)
    target.tap(weights.taps)
    made = Recording(weights, target.weights.embedding, target.weights.lm_head, VOCAB, target.backend)
    cache = KVCache(made.config, target.backend, num_blocks=64, block_size=BLOCK)
    return EagleProposer(made, cache, engine.runner, target.backend.row_search)


def read(folder: Path, engine: Engine, dtype: torch.dtype) -> EagleWeights:
    config = json.loads((folder / "config.json").read_text())
    return read_eagle(folder, config, decoder(engine).config, dtype, CPU)


@torch.inference_mode()
def reference(
    tensors: Tensors,
    config: dict[str, Any],
    taps: tuple[int, ...],
    target: PreTrainedModel,
    token_ids: list[int],
    drafts: list[int],
) -> Tensor:
    """The head's logits of the token behind token_ids, and behind each of these drafts, [1 +
    drafts, KNOWN or VOCAB]; of transformers' hidden states.
    """
    short = {name.removeprefix("midlayer.").removeprefix("layers.0."): each for name, each in tensors.items()}
    bias = {name: short.get(f"self_attn.{name}_proj.bias") for name in "qkvo"}
    embedding = short.get("embed_tokens.weight", target.get_input_embeddings().weight)
    window = config.get("sliding_window", 1000)

    def norm(x: Tensor, name: str) -> Tensor:
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * short[f"{name}.weight"]
            if f"{name}.weight" in short
            else x
        )

    def rotated(x: Tensor, turns: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * turns.cos() - second * turns.sin(), second * turns.cos() + first * turns.sin()], -1)

    # of the token behind each place; what transformers counts as hidden state 0 is the embedding,
    # which enters layer 0; the last is behind the norm
    inner = target(torch.tensor([token_ids[:-1]]), output_hidden_states=True)
    captured: list[Tensor] = []
    handle = target.model.norm.register_forward_pre_hook(lambda _, args: captured.append(args[0][0]))
    target(torch.tensor([token_ids[:-1]]))
    handle.remove()
    parts = [captured[0] if tap == len(inner.hidden_states) - 1 else inner.hidden_states[tap][0] for tap in taps]
    parts = [norm(part, f"fc_norm.{number}") for number, part in enumerate(parts)]
    states = linear(norm(torch.cat(parts, -1), "input_norm"), short["fc.weight"])
    found, tokens = [], token_ids[1:]
    for number in range(len(drafts) + 1):
        normed = norm(states, "hidden_norm")
        x = torch.cat([norm(embedding[torch.tensor(tokens)], "input_layernorm"), normed], -1)
        q, k, v = (
            linear(x, short[f"self_attn.{name}_proj.weight"], bias[name]).unflatten(-1, (-1, HEAD_DIM))
            for name in "qkv"
        )
        q, k = norm(q, "self_attn.q_norm"), norm(k, "self_attn.k_norm")
        places = torch.arange(len(x))
        turns = (places[:, None] * 500.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))[:, None]
        q, k = rotated(q, turns), rotated(k, turns)
        sees = (places[:, None] >= places) & (places[:, None] - places < window)
        attended = (
            scaled_dot_product_attention(*(each.transpose(0, 1) for each in (q, k, v)), attn_mask=sees, enable_gqa=True)
            .transpose(0, 1)
            .flatten(1)
        )
        y = (normed if "speculators_model_type" in config else states) + linear(
            attended, short["self_attn.o_proj.weight"], bias["o"]
        )
        inside = norm(y, "post_attention_layernorm")
        y = y + linear(
            silu(linear(inside, short["mlp.gate_proj.weight"])) * linear(inside, short["mlp.up_proj.weight"]),
            short["mlp.down_proj.weight"],
        )
        found.append(linear(norm(y, "norm")[-1], short.get("lm_head.weight", target.get_output_embeddings().weight)))
        if number < len(drafts):
            tokens = [*tokens, drafts[number]]
            states = torch.cat([states, (norm(y, "norm") if config.get("norm_output") else y)[-1:]])
    return torch.stack(found)


def step(
    engine: Engine,
    proposer: EagleProposer,
    rows: list[BatchRow],
    decided: dict[int, int],
    copies: tuple[tuple[int, int], ...] = (),
) -> None:
    batch = ScheduledBatch(tuple(rows), sum(row.num_tokens == 1 for row in rows), copies)
    proposer.computed(batch, engine.runner.run(batch), decided)


def row(
    handle: int,
    token_ids: list[int],
    first: int,
    last: int,
    table: tuple[int, ...],
    *,
    num_drafts: int = 0,
    is_last: bool = False,
) -> BatchRow:
    num = last - first
    sampled = range(num - 1 - num_drafts, num) if is_last else range(0)
    return BatchRow(handle, tuple(token_ids[first:last]), first, table, sampled, 3)


def wanted(
    handle: int, token_ids: list[int], table: tuple[int, ...], most: int, params: SamplingParams = GREEDY
) -> Wanted:
    sequence = Sequence(Request(handle, "", params), Tokens(list(token_ids), 3))
    sequence.kv.block_table = BlockTable(table)
    return Wanted(sequence, most)


@pytest.fixture
def sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains are not cut: a random head is never sure."""
    monkeypatch.setattr(eagle, "MIN_CHANCE", 0.0)


TEXTS = [
    torch.randint(2, VOCAB, (size,), generator=torch.Generator().manual_seed(size)).tolist() for size in (50, 30, 5)
]
TABLES = [(3, 9, 1, 20), (8, 2, 30), (7,)]


@pytest.mark.usefixtures("sure")
@pytest.mark.parametrize(("layout", "taps"), LAYOUTS, ids=[layout.__name__ for layout, _ in LAYOUTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["torch", "native"])
def test_chains_are_those_of_plain_torch(
    tmp_path: Path,
    model: tuple[PreTrainedModel, Path],
    layout: Any,
    taps: tuple[int, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever steps the target has taken: chunks, single tokens, some read at once and some when
    drafts are wanted, drafts that stood and that did not.
    """
    torch.manual_seed(len(layout.__name__))
    tensors, config = layout()
    engine = Engine(model[1], num_blocks=64, dtype=dtype)
    folder = write(tmp_path / "head", tensors, config, is_pickle=layout is makers_own)
    weights = read(folder, engine, dtype)
    assert weights.taps == taps and is_eagle(config, [*tensors])
    made = proposer(engine, weights)
    one, two, three = TEXTS
    step(engine, made, [row(1, one, 0, 40, TABLES[0]), row(2, two, 0, 6, TABLES[1])], {})
    step(
        engine,
        made,
        [row(1, one, 40, 41, TABLES[0], is_last=True), row(2, two, 6, 29, TABLES[1], is_last=True)],
        {1: 1, 2: 1},
    )
    made.propose({1: wanted(1, one[:42], TABLES[0], 3)})  # what it has written of its own guesses does not stay
    # of five tokens in the row, four drafts, three are decided: two drafts stand, and one token is behind them
    step(
        engine,
        made,
        [
            row(1, [*one[:44], 5, 6], 41, 46, TABLES[0], num_drafts=4, is_last=True),
            row(3, three, 0, 4, TABLES[2], is_last=True),
        ],
        {1: 3, 3: 1},
    )
    asked = {
        1: wanted(1, one[:45], TABLES[0], 3),
        2: wanted(2, two, TABLES[1], 2),
        3: wanted(3, three, TABLES[2], 1),
        9: wanted(9, two, TABLES[1], 2),
    }
    assert isinstance(made.head, Recording)
    made.head.drawn = []
    drafts = {handle: each.token_ids for handle, each in made.propose(asked).items()}
    assert {handle: len(each) for handle, each in drafts.items()} == {1: 3, 2: 2, 3: 1}
    known = weights.token_ids.tolist() if weights.token_ids is not None else list(range(VOCAB))
    rows_of_place = [[1, 2, 3], [1, 2], [1]]
    for handle, token_ids in ((1, one[:45]), (2, two), (3, three)):
        logits = torch.stack(
            [made.head.drawn[place][rows.index(handle)] for place, rows in enumerate(rows_of_place) if handle in rows]
        )
        assert drafts[handle] == [known[each] for each in logits.argmax(-1).tolist()]
        expected = reference(tensors, config, taps, model[0], token_ids, drafts[handle][:-1])
        if dtype == torch.float32:
            torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
        else:
            assert (logits - expected).norm() < 0.15 * expected.norm()
    assert made.propose(asked) == {}, "it has to hear of the next step first"
    made.forget(1)
    made.forget(77)
    assert set(made._unread) == {2, 3}
    monkeypatch.setattr(eagle, "MAX_SEQUENCES", 2)
    step(engine, made, [row(2, [*two, 7], 29, 30, TABLES[1], is_last=True), row(4, three, 0, 4, (50,))], {2: 1})
    assert set(made._unread) == {2, 4}, "the one that was heard of longest ago goes"


@pytest.mark.usefixtures("sure")
def test_blocks_bring_the_heads_keys_with_them(tmp_path: Path, engine: Engine) -> None:
    """Copied for another choice, shared through the prefix cache, or left by a preempted sequence:
    drafts are as if all had been computed anew.
    """
    torch.manual_seed(4)
    made = proposer(engine, read(write(tmp_path / "head", *makers_own()), engine, torch.float32))
    text, params = TEXTS[0], SamplingParams(seed=5)
    step(engine, made, [row(1, text, 0, 40, TABLES[0], is_last=True)], {1: 1})
    expected = made.propose({1: wanted(1, text[:41], TABLES[0], 4, params)})[1].token_ids
    assert len(expected) == 4
    shared = (*TABLES[0][:2], 40)
    step(engine, made, [row(2, text, 32, 40, shared, is_last=True)], {2: 1})
    assert made.propose({2: wanted(2, text[:41], shared, 4, params)})[2].token_ids == expected
    copied = (50, 51, 52)
    step(
        engine, made, [row(3, text, 39, 40, copied, is_last=True)], {3: 1}, tuple(zip(TABLES[0], copied, strict=False))
    )
    assert made.propose({3: wanted(3, text[:41], copied, 4, params)})[3].token_ids == expected
    step(engine, made, [row(1, text, 0, 40, TABLES[1], is_last=True)], {1: 1})  # it was preempted
    assert made.propose({1: wanted(1, text[:41], TABLES[1], 4, params)})[1].token_ids == expected
    step(engine, made, [row(1, text, 40, 41, TABLES[1], is_last=True)], {})  # ended, or computed again: nothing stands
    assert made.propose({1: wanted(1, text[:42], TABLES[1], 4, params)}) == {}


def test_chains_end_where_the_head_is_not_sure_or_the_text_ends(tmp_path: Path, engine: Engine) -> None:
    torch.manual_seed(3)
    tensors, config = makers_own()
    made = proposer(
        engine,
        read(
            write(tmp_path / "head", {**tensors, "lm_head.weight": tensors["lm_head.weight"] * 0}, config),
            engine,
            torch.float32,
        ),
    )
    step(engine, made, [row(1, TEXTS[2], 0, 4, TABLES[2], is_last=True)], {1: 1})
    assert made.propose({1: wanted(1, TEXTS[2], TABLES[2], 4)}) == {}
    made = proposer(
        engine,
        read(
            write(tmp_path / "head", {**tensors, "lm_head.weight": tensors["lm_head.weight"] * 100}, config),
            engine,
            torch.float32,
        ),
    )
    step(
        engine,
        made,
        [row(1, TEXTS[2], 0, 4, TABLES[2], is_last=True), row(2, TEXTS[2], 0, 4, TABLES[1], is_last=True)],
        {1: 1, 2: 1},
    )
    sure = made.propose({1: wanted(1, TEXTS[2], TABLES[2], 4)})[1].token_ids
    ending = wanted(2, TEXTS[2], TABLES[1], 4, replace(GREEDY, stop_token_ids=(sure[1],)))
    assert len(sure) == 4 and sure[0] != sure[1] and made.propose({2: ending})[2].token_ids == sure[:1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["torch", "native"])
def test_taps_change_no_bit(model: tuple[PreTrainedModel, Path], dtype: torch.dtype) -> None:
    engine = Engine(model[1], num_blocks=64, dtype=dtype)
    prompts = [TEXTS[0], TEXTS[2]]
    tokens = engine.generate(prompts, 6)
    logits = [torch.stack(engine.logits[number]) for number in range(2)]
    taps = tuple(range(4))
    decoder(engine).tap(taps)
    assert engine.generate(prompts, 6) == tokens
    assert all(torch.equal(torch.stack(engine.logits[number]), before) for number, before in enumerate(logits))
    batch = ScheduledBatch((row(1, TEXTS[0], 0, 50, TABLES[0], is_last=True),), 0)
    hidden = engine.runner.run(batch)
    found = engine.runner.tapped_states(batch, hidden, [0, 7, 49]).chunk(4, -1)
    with torch.inference_mode():
        expected = [
            each[0, [0, 7, 49]]
            for each in model[0](torch.tensor([TEXTS[0]]), output_hidden_states=True).hidden_states[:3]
        ]
    for state, near in zip(found, expected, strict=False):
        assert (state - near).norm() < (1e-5 if dtype == torch.float32 else 0.03) * near.norm()
    assert torch.equal(found[3], hidden[[0, 7, 49]])


BROKEN: list[tuple[str, Callable[[Tensors, dict[str, Any]], Any], str]] = [
    (
        "EAGLE-1",
        lambda tensors, _: tensors.pop("midlayer.hidden_norm.weight"),
        "it has no hidden_norm.weight: is it an older EAGLE's?",
    ),
    (
        "another hidden size",
        lambda tensors, _: tensors.update({"fc.weight": random(HIDDEN, 3 * 128)}),
        "not (64, 192): is this another model's head?",
    ),
    ("another vocabulary", lambda _, config: config.update(vocab_size=7), "vocab_size is 7, the model's is 512"),
    (
        "layers that are not there",
        lambda _, config: config.update(eagle_aux_hidden_state_layer_ids=[2, 4, 0]),
        "enters the layers 2, 4, 0, the model has 3",
    ),
    ("no layers", lambda _, config: config.update(eagle_aux_hidden_state_layer_ids="2"), "is 2, not a list of layers"),
    (
        "unknown tokens",
        lambda tensors, _: tensors["d2t"].fill_(VOCAB),
        "d2t leads to tokens that the model does not have",
    ),
    (
        "no numbers",
        lambda tensors, _: tensors["midlayer.mlp.up_proj.weight"].fill_(torch.nan),
        "midlayer.mlp.up_proj.weight holds NaN",
    ),
    (
        "a layer is missing",
        lambda tensors, _: tensors.pop("midlayer.mlp.up_proj.weight"),
        "the head has no mlp.up_proj.weight",
    ),
    (
        "two layers",
        lambda tensors, _: tensors.update({"layers.1.mlp.up_proj.weight": random(80, HIDDEN)}),
        "layers.1.mlp.up_proj.weight is no tensor of",
    ),
    (
        "two layers in the config",
        lambda _, config: config.update(num_hidden_layers=2),
        "num_hidden_layers is 2; an EAGLE-3 head of one layer",
    ),
    (
        "no LM head",
        lambda tensors, _: tensors.pop("lm_head.weight"),
        "it has no lm_head, and the model's does not fit it",
    ),
    (
        "no embedding",
        lambda _, config: config.update(hidden_size=96),
        "it has no embed_tokens, and its hidden_size is 96",
    ),
    ("no config", lambda _, config: config.clear(), "config.json has no"),
]


@pytest.mark.parametrize(("breaks", "reason"), [each[1:] for each in BROKEN], ids=[each[0] for each in BROKEN])
def test_heads_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, engine: Engine, breaks: Callable[..., Any], reason: str
) -> None:
    tensors, config = makers_own()
    breaks(tensors, config)
    with pytest.raises(StartupError) as refused:
        read(write(tmp_path / "head", tensors, config), engine, torch.float32)
    assert reason in str(refused.value) and str(refused.value).startswith("--heads ") and "\n" not in str(refused.value)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, engine: Engine) -> None:
    tensors, config = makers_own()
    write(tmp_path / "head", tensors | {"fc.weight": Path("x")}, config, is_pickle=True)
    with pytest.raises(StartupError, match="it can't be read as plain tensors") as refused:
        read(tmp_path / "head", engine, torch.float32)
    assert "\n" not in str(refused.value)
    (tmp_path / "head" / "pytorch_model.bin").write_bytes(b"not a pickle")
    with pytest.raises(StartupError, match="it can't be read as plain tensors"):
        read(tmp_path / "head", engine, torch.float32)
