"""Recurrent layers: the definition against the library's modules, and the same bits however a sequence is cut
into steps, in any company, with any of its last tokens computed again."""

import shutil
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from services.compute.backends.torch import recurrent
from services.compute.backends.torch.recurrent import (
    RecurrenceConfig,
    RecurrentWeights,
    StateLayer,
    StateRows,
    TorchRecurrence,
    make_state_layer,
    tree_sum,
)
from services.compute.loop.engine import build_engine
from services.compute.models.architectures import read_config
from services.compute.models.config import Packed
from services.compute.ranks.parallel.stage import PipelineStage
from services.compute.ranks.place import Placement, load_decoder
from services.compute.speculation.draft_models import load_other
from services.modeltools.quantize import quantize
from shared.model.files import DEMO_MODEL, open_model
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from tests.examples import examples
from tests.kernels.backends import CPU, FLOAT32
from tests.kernels.families import Engine, reference_model
from tests.kernels.test_models import prompts

SIZES = RecurrenceConfig("delta", num_heads=6, num_key_heads=2, key_dim=16, value_dim=24, kernel=4)
CONVOLUTION = RecurrenceConfig("convolution", num_heads=1, num_key_heads=1, key_dim=1, value_dim=40, kernel=3)
MAMBA2 = RecurrenceConfig(
    "mamba2", num_heads=6, num_key_heads=2, key_dim=16, value_dim=24, kernel=4, norm_group=72, is_gate_first=True
)
NUM_TOKENS, NUM_SLOTS, EPS = 40, 3, 1e-6
LONGEST_LOG = 6


def random_weights(sizes: RecurrenceConfig) -> RecurrentWeights:
    return RecurrentWeights(
        torch.randn(sizes.kernel, sizes.channels),
        -torch.randn(sizes.num_heads).exp(),
        torch.randn(sizes.num_heads),
        torch.randn(sizes.norm_group or sizes.value_dim),
        torch.randn(sizes.channels),
        torch.randn(sizes.num_heads) if sizes.kind == "mamba2" else None,
    )


def dirty_layer(sizes: RecurrenceConfig, ring: int, dtype: torch.dtype = torch.float32) -> StateLayer:
    """With what other sequences have left in its slots."""
    return StateLayer(
        torch.randn(NUM_SLOTS, *sizes.state_shape), torch.randn(NUM_SLOTS, ring, sizes.logged, dtype=dtype)
    )


@pytest.mark.parametrize("num_key_heads", [2, 6])
@torch.inference_mode()
def test_gated_delta_net_is_the_librarys(num_key_heads: int) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        hidden_size=64,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_num_key_heads=num_key_heads,
        linear_num_value_heads=6,
    )
    module = Qwen3_5GatedDeltaNet(config, 0).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    sizes = RecurrenceConfig("delta", 6, num_key_heads, 16, 24, 4)
    weights = RecurrentWeights(
        module.conv1d.weight[:, 0].T.contiguous(), -module.A_log.exp(), module.dt_bias, module.norm.weight
    )
    parts = (module.in_proj_qkv, module.in_proj_b, module.in_proj_a, module.in_proj_z)
    x = torch.randn(130, 64)
    projected = torch.cat([part(x) for part in parts], 1)
    recurrence, cache = TorchRecurrence(sizes, CPU), make_state_layer(sizes, 1, torch.float32, CPU)
    states = recurrence.plan(StateRows([0], [len(x)], [0], [0], [len(x)]))
    found = module.out_proj(recurrence(projected, cache, states, weights, eps=config.rms_norm_eps))
    torch.testing.assert_close(found, module(x[None])[0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_heads_in_turns_are_those_of_keys_side_by_side() -> None:
    """GGUF's order of heads of values is another order of the same results."""
    torch.manual_seed(0)
    beside, tiled = SIZES, RecurrenceConfig("delta", 6, 2, 16, 24, 4, is_tiled=True)
    order = torch.arange(6).view(2, 3).T.flatten()  # in the tiled row, the head of the other that stands there
    values = (order[:, None] * 24 + torch.arange(24)).flatten()
    keys = 2 * 2 * 16
    columns = torch.cat(
        [
            torch.arange(keys),
            keys + values,
            beside.channels + order,
            beside.channels + 6 + order,
            beside.logged + values,
        ]
    )
    projected, weights = torch.randn(20, beside.width), random_weights(beside)
    turned = RecurrentWeights(
        weights.convolution[:, columns[: beside.channels]],
        weights.decay[order],
        weights.dt_bias[order],
        weights.norm,
        weights.convolution_bias[columns[: beside.channels]],
    )
    rows = StateRows([0], [20], [0], [0], [20])
    results = []
    for sizes, row, own in ((beside, projected, weights), (tiled, projected[:, columns], turned)):
        recurrence, cache = TorchRecurrence(sizes, CPU), make_state_layer(sizes, 1, torch.float32, CPU)
        results.append(recurrence(row, cache, recurrence.plan(rows), own, eps=EPS))
    assert torch.equal(results[0][:, values], results[1])


@dataclass
class Cut:
    """A sequence on its way through steps, as the scheduler takes it: some last tokens of a step may be dropped, and
    are computed again."""

    slot: int
    rows: Tensor  # [tokens, width], projected
    num_computed: int = 0
    num_folded: int = 0
    results: dict[int, Tensor] = field(default_factory=dict)


@given(st.data())
@examples(60)
@torch.inference_mode()
def test_any_steps_give_the_same_bits(data: st.DataObject) -> None:
    """Sequences side by side, each in chunks of its own, with a log that is folded now or later, or cut."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    sizes = data.draw(st.sampled_from([SIZES, CONVOLUTION, MAMBA2]))
    weights, recurrence = random_weights(sizes), TorchRecurrence(sizes, CPU)
    projected = torch.randn(NUM_SLOTS, NUM_TOKENS, sizes.width).to(dtype)
    lengths = [data.draw(st.integers(1, NUM_TOKENS)) for _ in range(data.draw(st.integers(1, NUM_SLOTS)))]
    expected = []
    for rows, length in zip(projected, lengths, strict=False):
        cache = dirty_layer(sizes, sizes.ring, dtype)
        states = recurrence.plan(StateRows([1], [length], [0], [0], [length]))
        expected.append((recurrence(rows[:length], cache, states, weights, eps=EPS), cache.state[1]))
    cache = dirty_layer(sizes, sizes.kernel - 1 + LONGEST_LOG, dtype)
    slots = data.draw(st.permutations(range(NUM_SLOTS)))
    cuts = [
        Cut(slot, rows[:length]) for slot, rows, length in zip(slots, projected[: len(lengths)], lengths, strict=False)
    ]
    while running := [cut for cut in cuts if cut.num_folded < len(cut.rows)]:
        step = [cut for cut in running if not data.draw(st.booleans())] or running[:1]
        ends, folds = [], []
        for cut in step:
            length = len(cut.rows)
            if cut.num_computed == length or data.draw(st.booleans()):  # its last tokens are dropped
                cut.num_computed = data.draw(st.integers(cut.num_folded, min(cut.num_computed, length - 1)))
            ends.append(length - data.draw(st.integers(0, length - cut.num_computed - 1)))
            folds.append(ends[-1] - data.draw(st.integers(0, min(LONGEST_LOG, ends[-1] - cut.num_folded))))
        counts = [end - cut.num_computed for cut, end in zip(step, ends, strict=True)]
        rows = StateRows(
            [cut.slot for cut in step],
            counts,
            [cut.num_computed for cut in step],
            [cut.num_folded for cut in step],
            folds,
        )
        given_rows = torch.cat([cut.rows[cut.num_computed : end] for cut, end in zip(step, ends, strict=True)])
        results = recurrence(given_rows, cache, recurrence.plan(rows), weights, eps=EPS)
        for cut, (first, last), fold in zip(step, pairwise(accumulate(counts, initial=0)), folds, strict=True):
            cut.results |= {cut.num_computed + at: results[first + at] for at in range(last - first)}
            cut.num_computed, cut.num_folded = cut.num_computed + last - first, fold
    for cut, (results, state) in zip(cuts, expected, strict=True):
        assert torch.equal(torch.stack([cut.results[at] for at in range(len(cut.rows))]), results)
        assert torch.equal(cache.state[cut.slot], state)


@pytest.mark.parametrize("num_at_once", [1, 2])
@torch.inference_mode()
def test_states_that_are_scanned_in_groups(num_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weights, recurrence = random_weights(SIZES), TorchRecurrence(SIZES, CPU)
    rows = StateRows([2, 0, 1], [5, 9, 1], [0, 0, 0], [0, 0, 0], [4, 9, 1])
    projected, states, found = torch.randn(15, SIZES.width), recurrence.plan(rows), []
    for most in (recurrent.MOST_NUMBERS, num_at_once * 6 * 16 * 24):
        monkeypatch.setattr(recurrent, "MOST_NUMBERS", most)
        cache = make_state_layer(SIZES, NUM_SLOTS, torch.float32, CPU)
        found.append((recurrence(projected, cache, states, weights, eps=EPS), cache.state))
    assert all(torch.equal(*each) for each in zip(*found, strict=True))
    assert recurrence.workspace(2) < recurrence.workspace(500)


def test_what_states_do_not_allow_is_refused_by_name(tmp_path: Path) -> None:
    reference_model("qwen3-5", tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, tmp_path)
    files = open_model(str(tmp_path), weights=True)
    stage = Placement(stage=PipelineStage(0, 2, None))
    with pytest.raises(StartupError, match="is not divided among ranks: start it without --tensor-parallel-size"):
        load_decoder(stage, 0, files.weights, read_config(files.config), FLOAT32)
    with pytest.raises(StartupError, match="its layers keep states, which do not go back when a draft is wrong"):
        load_other(str(tmp_path), files, FLOAT32, 64, Placement(), 1)
    engine = build_engine(ComputeSettings(dtype="float32", num_threads=1, kv_cache_memory=16 << 20), files)
    assert engine.speculators == () and engine.scheduler.run_ahead == 0 and engine.tier is None
    assert engine.no_segments == "native keeps states of whole sequences, which are not of segments"


@pytest.mark.parametrize("family", ["qwen3-5", "lfm2", "granite4-h"])
def test_a_packed_checkpoint_has_the_bits_of_one_quantized_as_it_is_read(family: str, tmp_path: Path) -> None:
    reference_model(family, tmp_path / "dense")
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path / "dense")
    quantize(str(tmp_path / "dense"), tmp_path / "packed", Packed("w8a8", 32))
    some, logits = prompts(5, 512), []
    for folder, quantization in (("dense", "w8a8"), ("packed", "none")):
        engine = Engine(tmp_path / folder, dtype=torch.bfloat16, quantization=quantization)
        engine.generate(some, 6)
        logits.append(torch.stack([row for rows in engine.logits.values() for row in rows]))
    assert torch.equal(*logits)
    with pytest.raises(StartupError, match="--calibrate: .* (has recurrent layers|is a mixture)"):
        quantize(str(tmp_path / "dense"), tmp_path / "other", Packed("w8a8", 32), calibration="default")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 24])
def test_a_sum_in_a_fixed_order(size: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(5, size, 3)
    torch.testing.assert_close(tree_sum(x, 1), x.sum(1))
    assert torch.equal(tree_sum(x[2], 0), tree_sum(x, 1)[2])
