"""Calibration: rounding by second order, scales that are folded, and checkpoints that know more
than rounding to nearest leaves.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.compute.backends.choose import choose_backend
from services.compute.backends.matrix import Grouped, Int4Columns
from services.compute.backends.torch.linear import TorchLinear
from services.compute.backends.torch.reference import quantize_weight, rms_norm
from services.compute.models.architectures import read_config
from services.compute.models.config import Packed
from services.compute.models.decoder import Decoder
from services.compute.weights.loader import Loader, load_weights
from services.compute.weights.safetensors_source import SafetensorsSource
from services.modeltools.calibration.calibrate import calibrate, find_scales, fold_into_norm, fold_into_up, observe
from services.modeltools.calibration.perplexity import next_token_logs, perplexity
from services.modeltools.calibration.rounding import objectives, round_four_bit
from services.modeltools.calibration.simulation import LayerQuantization, quantize_inputs, quantize_matrix
from services.modeltools.calibration.texts import default_text, read_windows, split
from services.operator.cli import main
from shared.model.files import DEMO_MODEL, open_model
from shared.process.errors import StartupError
from tests.examples import examples
from tests.kernels.backends import CPU, FLOAT32
from tests.kernels.families import Engine, reference_model
from tests.kernels.quantized import awq, layers_only, write_checkpoint
from tests.kernels.test_formats import awq_config

CONVERSATIONS = DEMO_MODEL.parent / "conversations.txt"


def correlated(rows: int, k: int, rank: int, generator: torch.Generator) -> torch.Tensor:
    """Inputs of which a few directions, and a few channels, hold most."""
    shared = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, k, generator=generator)
    x = shared + 0.1 * torch.randn(rows, k, generator=generator)
    x[:, :: max(k // 3, 1)] *= 20
    return x


@examples(40)
@given(
    n=st.integers(1, 40),
    k=st.integers(1, 150),
    rank=st.integers(1, 20),
    rows=st.integers(1, 200),
    group=st.sampled_from([32, 64, 128]),
    kind=st.sampled_from(["w4", "nf4"]),
    seed=st.integers(0, 2**31),
)
def test_no_column_is_rounded_worse_than_to_nearest(
    n: int, k: int, rank: int, rows: int, group: int, kind: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = correlated(rows, k, rank, generator), torch.randn(n, k, generator=generator)
    gram = x.T @ x
    found, nearest = round_four_bit(weight, gram, kind, group), quantize_weight(weight, kind, group)
    assert isinstance(found, Int4Columns if kind == "w4" else Grouped) and found.codes.max() < 16
    errors = [objectives(each.dequantize(torch.float32), weight, gram) for each in (found, nearest)]
    assert (errors[0] <= errors[1]).all()
    direct = ((x @ (found.dequantize(torch.float32) - weight).T) ** 2).sum(0)
    torch.testing.assert_close(errors[0], direct, rtol=0.02, atol=1e-3 * float(errors[1].max()))


@pytest.mark.parametrize("kind", ["w4", "nf4"])
def test_rounding_by_second_order_more_than_halves_the_error_of_correlated_inputs(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = correlated(2000, 256, 40, generator), torch.randn(128, 256, generator=generator)
    gram = x.T @ x
    errors = [
        objectives(each.dequantize(torch.float32), weight, gram).sum()
        for each in (round_four_bit(weight, gram, kind, 64), quantize_weight(weight, kind, 64))
    ]
    assert errors[0] < 0.5 * errors[1]


def test_inputs_that_are_not_finite_are_an_error_and_few_or_none_are_not() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(6))
    with pytest.raises(StartupError, match="not finite"):
        round_four_bit(weight, torch.full((64, 64), torch.nan), "w4", 32)
    for gram in (torch.zeros(64, 64), torch.ones(64, 64), -1e-3 * torch.eye(64) + torch.ones(64, 64)):
        assert round_four_bit(weight, gram, "w4", 32).dequantize(torch.float32).sub(weight).abs().max() < 2


@pytest.mark.parametrize("form", [LayerQuantization("w8a8"), LayerQuantization("w4"), LayerQuantization("nf4", 32)])
def test_scales_help_where_channels_are_large_and_stay_away_where_they_do_not(form: LayerQuantization) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(64, 192, generator=generator)

    def error(x: torch.Tensor, scales: torch.Tensor) -> float:
        found = quantize_inputs(x / scales, form) @ quantize_matrix(weight * scales, form).dequantize(torch.float32).T
        return float((found - x @ weight.T).square().sum())

    x = torch.randn(300, 192, generator=generator)
    x[:, [3, 70]] *= 50
    scales = find_scales(x, weight, form)
    assert error(x, scales) < 0.5 * error(x, torch.ones(192))
    even = torch.ones(300, 192) * torch.randn(300, 1, generator=generator)
    assert error(even, find_scales(even, weight, form)) <= error(even, torch.ones(192))


def test_folded_scales_leave_the_model_as_it_is() -> None:
    """A norm and the layer behind it; a gated layer and the one behind it."""
    generator = torch.Generator().manual_seed(3)
    hidden, inter = 48, 80

    def linear(n: int, k: int, *, is_gated: bool = False) -> TorchLinear:
        return TorchLinear(
            torch.randn(n, k, generator=generator), torch.randn(n, generator=generator), is_gated=is_gated
        )

    gate_up, down = observe(linear(2 * inter, hidden, is_gated=True), 30), observe(linear(hidden, inter), 30)
    x, norm = torch.randn(30, hidden, generator=generator), torch.rand(hidden, generator=generator) + 0.5
    norm[5] = 0.0
    expected = down(gate_up(x, norm=norm, eps=1e-5))
    gram = gate_up.gram.clone()
    down_scales = torch.rand(inter, generator=generator) * 7 + 0.1
    down.scale(down_scales)
    fold_into_up(gate_up, down_scales)
    folded, scales = fold_into_norm(norm, torch.rand(hidden, generator=generator) * 7 + 0.1)
    gate_up.scale(scales)
    assert torch.equal(folded, folded.bfloat16().float())
    torch.testing.assert_close(gate_up.gram, gram / scales / scales[:, None])
    torch.testing.assert_close(gate_up.rows, rms_norm(x, folded, 1e-5))
    torch.testing.assert_close(
        down(gate_up(x, norm=folded, eps=1e-5)), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
    )


# One of each structure, dense: biases, norms and their places, multipliers, tied heads. Others
# differ in angles and windows alone.
STRUCTURES = (
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "granite",
    "internlm3",
    "llama-heads",
    "llama-linear",
    "mistral-window",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "seed-oss",
    "smollm3",
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_family_comes_nearer_to_itself(name: str, tmp_path: Path) -> None:
    """In four bits, on text that calibration did not see: the logits' error is below that of rounding to nearest."""
    reference_model(name, tmp_path)
    config = read_config(json.loads((tmp_path / "config.json").read_text()))
    windows = torch.randint(0, config.vocab_size, (16, 64), generator=torch.Generator().manual_seed(4))
    held_out = torch.randint(0, config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(5))
    backend = choose_backend(torch.bfloat16, CPU)
    source = SafetensorsSource(tmp_path, torch.float32, CPU)
    packing = Packed("w4", 32, attention_output=True)
    calibrated = calibrate(Loader(source, config, FLOAT32, Packed("none", 32)), packing, windows, backend)
    source.close()
    nearest = load_weights(tmp_path, config, backend, quantization="w4", group=32, attention_output=True)
    models = [
        Decoder(config, load_weights(tmp_path, config, FLOAT32), FLOAT32),
        *(Decoder(config, weights, backend) for weights in (calibrated, nearest)),
    ]
    logs = [torch.cat(list(next_token_logs(model, held_out))) for model in models]
    errors = [float((logs[0] - each).square().mean()) for each in logs[1:]]
    assert errors[0] < errors[1]


def windows_of(text: str) -> torch.Tensor:
    return split(text, Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")), 128)


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, torch.Tensor]]:
    """A text in the demo's own words to calibrate on, and windows of another."""
    lines = [
        line[3:] for line in CONVERSATIONS.read_text(encoding="utf-8").splitlines() if line.startswith(("Q: ", "A: "))
    ]
    path = tmp_path_factory.mktemp("talk") / "talk.txt"
    path.write_text("\n".join(lines[::2]), encoding="utf-8")
    yield path, windows_of("\n".join(lines[1::2]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("quantization", "bound"), [("w4", 0.7), ("nf4", 0.8), ("w8a8", 1.1)])
def test_a_calibrated_checkpoint_loads_serves_and_is_nearer(
    quantization: str, bound: float, talk: tuple[Path, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bound: of its distance from bfloat16's distribution, over that of rounding to nearest."""
    text, held_out = talk
    assert main(["quantize", "demo", str(tmp_path), "--quantization", quantization, "--calibrate", str(text)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["size", "before", quantization, "written"]
    config = read_config(json.loads((tmp_path / "config.json").read_text()))
    assert config.packed == Packed(quantization, 32)
    backend = choose_backend(torch.bfloat16, CPU)
    models = [Decoder(config, load_weights(tmp_path, config, backend), backend)]
    dense = read_config(json.loads((DEMO_MODEL / "config.json").read_text()))
    models += [
        Decoder(dense, load_weights(DEMO_MODEL, dense, backend, quantization=each), backend)
        for each in (quantization, "none")
    ]
    calibrated, nearest, exact = (
        torch.cat([logs.clone() for logs in next_token_logs(model, held_out)]) for model in models
    )
    distances = [float((exact.exp() * (exact - each)).sum(-1).mean()) for each in (calibrated, nearest)]
    assert distances[0] < bound * distances[1]
    prompts = [[5, 6, 7], list(range(40, 90))]
    engine = Engine(tmp_path, dtype=torch.bfloat16)
    together = engine.generate(prompts, 12)
    assert [engine.generate([prompt], 12)[0] for prompt in prompts] == together


def test_the_lm_head_keeps_eight_bits_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = read_config(json.loads((DEMO_MODEL / "config.json").read_text()))
    windows = windows_of(CONVERSATIONS.read_text(encoding="utf-8"))[:6]
    found = {}
    for lm_head in (False, True):
        backend = choose_backend(torch.bfloat16, CPU)
        at_load = Decoder(
            config, load_weights(DEMO_MODEL, config, backend, quantization="w4", lm_head=lm_head), backend
        )
        found[lm_head] = perplexity(at_load, windows)
        folder = tmp_path / str(lm_head)
        assert main(["quantize", "demo", str(folder), "--quantization", "w4", *(["--lm-head"] if lm_head else [])]) == 0
        packed = read_config(json.loads((folder / "config.json").read_text()))
        assert packed.packed == Packed("w4", 32, lm_head=lm_head)
        assert perplexity(Decoder(packed, load_weights(folder, packed, backend), backend), windows) == found[lm_head]
    assert found[False] != found[True]
    sizes = [(tmp_path / str(lm_head) / "model.safetensors").stat().st_size for lm_head in (False, True)]
    assert sizes[0] > sizes[1]
    config_json = json.loads((tmp_path / "True" / "config.json").read_text())
    del config_json["quantization_config"]["lm_head"]
    assert read_config(config_json).packed == Packed(
        "w4", 32, lm_head=True
    )  # as it was written before the head had a rule of its own


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"too short", "fewer than 2,560 tokens"),
        (b"", "fewer than 2,560 tokens"),
        (b"\xff\xfe" * 40_000, "not a text in UTF-8"),
        ("folder", "Is a directory"),
    ],
)
def test_a_bad_text_is_one_line(
    content: bytes | str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    if content == "folder":
        text.mkdir()
    elif isinstance(content, bytes):
        text.write_bytes(content)
    assert main(["quantize", "demo", str(tmp_path / "out"), "--quantization", "w4", "--calibrate", str(text)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert str(text) in printed.err and message in printed.err
    assert not (tmp_path / "out").exists()


def test_too_few_tokens_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["quantize", "demo", str(tmp_path / "out"), "--calibrate", "default", "--calibration-tokens", "100"]) == 2
    )
    assert capsys.readouterr().err == "penstock: --calibration-tokens 100: at least 2,560 are needed\n"


def test_what_can_not_be_calibrated_is_said_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference_model("mixtral", tmp_path / "mixtral")
    write_checkpoint(tmp_path / "awq", layers_only(awq(64)), awq_config(64))
    for name, message in (
        ("mixtral", "calibration knows dense MLPs only"),
        ("awq", "is quantized already (AWQ, 4 bits in groups of 64)"),
    ):
        folder = tmp_path / name
        shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
        capsys.readouterr()
        assert main(["quantize", str(folder), str(tmp_path / "out"), "--calibrate", str(CONVERSATIONS)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert message in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tokens", "calibrated", "held_out"),
    [(2560, 5, 8), (4096, 8, 8), (5700, 11, 8), (7168, 14, 6), (8192, 16, 4), (100_000, 16, 4)],
)
def test_as_many_tokens_are_used_as_are_asked_for(tokens: int, calibrated: int, held_out: int, tmp_path: Path) -> None:
    """Eight more windows are held out, where the text has them; this one has 20."""
    files = open_model("demo")
    text = tmp_path / "text"
    text.write_text(CONVERSATIONS.read_text(encoding="utf-8") * 3, encoding="utf-8")
    words = split(text.read_text(encoding="utf-8"), Tokenizer.from_file(str(files.folder / "tokenizer.json")), 512)[:20]
    text.write_text(
        Tokenizer.from_file(str(files.folder / "tokenizer.json")).decode(
            words.flatten().tolist(), skip_special_tokens=False
        ),
        encoding="utf-8",
    )
    windows = read_windows(str(text), files, tokens)
    assert (len(windows.calibration), len(windows.held_out)) == (calibrated, held_out)


def test_a_tokenizer_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "tokenizer.json").write_text("{}")
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--calibrate", str(CONVERSATIONS)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "tokenizer.json: the tokenizer can't be loaded" in line


@pytest.mark.parametrize("old", ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model.gguf"])
def test_old_weights_never_stay_in_charge(old: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / old).touch()
    assert main(["quantize", "demo", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{old} is there already" in line and [path.name for path in tmp_path.iterdir()] == [old]


def test_weights_that_were_written_by_half_are_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full_disk(_tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("services.modeltools.out_folder.save_file", full_disk)
        assert main(["quantize", "demo", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("the model can't be written: No space left on device")
    assert not list(tmp_path.glob("*.safetensors"))
    assert main(["quantize", "demo", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def test_the_default_text_is_long_and_the_same_each_time() -> None:
    text = default_text()
    assert text == default_text()
    assert len(text) > 300_000


def test_windows_begin_as_the_tokenizer_begins_a_text() -> None:
    described = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    plain = split("one two three four " * 50, Tokenizer.from_str(json.dumps(described)), 16)
    beginning = {"id": "<|system|>", "type_id": 0}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": beginning}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<|system|>": {"id": "<|system|>", "ids": [2], "tokens": ["<|system|>"]}},
    }
    described["post_processor"]["pair"] = [
        *described["post_processor"]["single"],
        {"Sequence": {"id": "B", "type_id": 1}},
    ]
    begun = split("one two three four " * 50, Tokenizer.from_str(json.dumps(described)), 16)
    assert (begun[:, 0] == 2).all()
    tokens = plain.flatten().tolist()
    joined = begun[:, 1:].flatten().tolist()
    assert joined == tokens[: len(joined)] or joined[: len(tokens)] == tokens
