"""Mixtures of experts: the layer against its definition, a row's bits in any company, and the forms
in which checkpoints hold experts.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, PreTrainedModel

from services.compute.backends.backend import Backend, RouterConfig
from services.compute.backends.matrix import Dense, Grouped
from services.compute.backends.torch.reference import rms_norm
from services.compute.backends.torch.row_math import sigmoid
from services.compute.models.architectures import read_config
from services.compute.models.moe import Expert, MoeMlp, Router, SharedExpert
from services.compute.weights.loader import load_weights
from services.compute.weights.mxfp4 import read_expert, to_matrix
from services.compute.weights.safetensors_source import SafetensorsSource
from services.operator.cli import main
from shared.model.files import TOKENIZER_FILES
from shared.process.errors import StartupError
from tests.kernels.backends import FLOAT32, native_backend
from tests.kernels.families import CONFIGS, SIZES, Engine, assert_greedy, reference_model
from tests.kernels.test_models import prompts

EPS = 1e-6
EXPERTS, ACTIVE, HIDDEN, INTER = 10, 3, 96, 64
Weights = dict[str, torch.Tensor]
SOFTMAX = RouterConfig(4, has_normalized_weights=True)
SIGMOID = replace(SOFTMAX, has_sigmoid_scores=True, scaling=2.5)
ROUTERS = ("gate.weight", "gate.wg.weight", "router.weight")  # of the library's mixtures
GROUPED = replace(SIGMOID, has_correction=True, num_groups=2, num_active_groups=2)


def make_weights(dtype: torch.dtype) -> Weights:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "router": (EXPERTS, HIDDEN),
        "gate_up": (EXPERTS, 2 * INTER, HIDDEN),
        "down": (EXPERTS, HIDDEN, INTER),
        "shared_gate": (1, HIDDEN),
        "shared_gate_up": (2 * INTER, HIDDEN),
        "shared_down": (HIDDEN, INTER),
    }
    return {name: (torch.randn(*shape, generator=generator) * 0.2).to(dtype) for name, shape in shapes.items()}


def make_layer(weights: Weights, backend: Backend, quantization: str = "none") -> MoeMlp:
    make = backend.make_linear

    def make_expert(gate_up: torch.Tensor, down: torch.Tensor) -> Expert:
        return Expert(
            make(Dense(gate_up), quantization=quantization, is_gated=True), make(Dense(down), quantization=quantization)
        )

    experts = tuple(make_expert(*each) for each in zip(weights["gate_up"], weights["down"], strict=True))
    shared = SharedExpert(
        make_expert(weights["shared_gate_up"], weights["shared_down"]), make(Dense(weights["shared_gate"]))
    )
    router = Router(make(Dense(weights["router"])), RouterConfig(ACTIVE, has_normalized_weights=True))
    return MoeMlp(backend.row_math, router, experts, shared)


def define(weights: Weights, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Token by token, in float64."""
    wide = {name: weight.double() for name, weight in weights.items()}

    def run(gate_up: torch.Tensor, down: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        gate, up = (gate_up @ h).chunk(2)
        return down @ (torch.nn.functional.silu(gate) * up)

    rows = []
    for row, h in zip(x.double(), rms_norm(x, norm, EPS).double(), strict=True):
        weight, chosen = (wide["router"] @ h).softmax(0).topk(ACTIVE)
        mixture = sum(
            (weight[i] / weight.sum()) * run(wide["gate_up"][e], wide["down"][e], h)
            for i, e in enumerate(chosen.tolist())
        )
        rows.append(
            row + mixture + torch.sigmoid(wide["shared_gate"] @ h) * run(wide["shared_gate_up"], wide["shared_down"], h)
        )
    return torch.stack(rows)


@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_the_layer_is_what_its_definition_says(num_rows: int) -> None:
    weights = make_weights(torch.float32)
    x = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(1))
    norm = torch.linspace(0.5, 1.5, HIDDEN)
    layer = make_layer(weights, FLOAT32)
    expected = define(weights, x, norm)
    torch.testing.assert_close(layer(x, norm=norm, eps=EPS).double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        layer(x, norm=norm, eps=EPS, has_residual=False).double(), expected - x, atol=1e-5, rtol=1e-5
    )


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("quantization", ["none", "w8a8", "w4", "nf4"])
def test_a_row_has_the_same_bits_in_any_company(quantization: str) -> None:
    """Also where others choose the same experts; and in all modes the experts are native."""
    weights = make_weights(torch.bfloat16)
    x = torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    norm = torch.linspace(0.5, 1.5, HIDDEN).bfloat16()
    layer = make_layer(weights, native_backend(), quantization)
    together = layer(x, norm=norm, eps=EPS)
    assert torch.equal(together, torch.cat([layer(x[row : row + 1], norm=norm, eps=EPS) for row in range(70)]))
    assert torch.equal(together[3:40], layer(x[3:40], norm=norm, eps=EPS))
    crowd = torch.cat([x[7:8].repeat(33, 1), x[:20]])
    assert torch.equal(layer(crowd, norm=norm, eps=EPS), torch.cat([together[7:8].repeat(33, 1), together[:20]]))
    expected = define(weights, x, norm) - x
    found = layer(x, norm=norm, eps=EPS, has_residual=False).double()
    rms = float((found - expected).norm() / expected.norm())
    assert rms < {"none": 0.02, "w8a8": 0.1}.get(
        quantization, 0.5
    )  # of int8 and four bits, some tokens get another expert


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("name", ["glm4-moe", "gpt-oss", "hunyuan-moe", "minimax-m2"])
def test_a_router_keeps_the_float32_of_its_file(name: str, tmp_path: Path) -> None:
    """In bfloat16 its weights would lose 16 of their 24 bits, and experts change places."""
    reference = reference_model(name, tmp_path).model.layers[1].mlp
    backend = native_backend()
    config = read_config(json.loads((tmp_path / "config.json").read_text()))
    mlp = load_weights(tmp_path, config, backend).layers[1].mlp
    assert isinstance(mlp, MoeMlp)
    x = torch.randn(40, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)).bfloat16()
    gate = next(each for part, each in reference.named_parameters() if part in ROUTERS).double()
    bias = next((each for part, each in reference.named_parameters() if part == "router.bias"), torch.zeros(1))
    found, expected = mlp.router.logits(x), x.double() @ gate.T + bias.bfloat16().double()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(found[3:20], mlp.router.logits(x[3:20]))


@pytest.mark.parametrize("router", [SOFTMAX, SIGMOID, GROUPED])
@pytest.mark.parametrize("num_experts", [4, 60, 128])
def test_routing_and_gates_are_each_rows_own(num_experts: int, router: RouterConfig) -> None:
    logits = torch.randn(200, num_experts, generator=torch.Generator().manual_seed(2)) * 4
    correction = torch.linspace(-0.3, 0.3, num_experts) if router.has_correction else None
    chosen, weights = FLOAT32.row_math.choose_experts(logits, router, correction)
    scores = sigmoid(logits)
    torch.testing.assert_close(scores, torch.sigmoid(logits))
    torch.testing.assert_close(weights.sum(-1), torch.full((200,), router.scaling))
    for first, last in [(0, 1), (17, 18), (50, 57), (199, 200), (3, 100)]:
        alone = FLOAT32.row_math.choose_experts(logits[first:last], router, correction)
        assert torch.equal(alone[0], chosen[first:last]) and torch.equal(alone[1], weights[first:last])
        assert torch.equal(sigmoid(logits[first:last]), scores[first:last])


def fuse(folder: Path) -> None:
    """The checkpoint with all experts of a layer in one tensor, under the names of the library's modules."""
    tensors = load_file(folder / "model.safetensors")
    fused: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    kept = {}
    kinds = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
    for name, tensor in tensors.items():
        before, _, after = name.partition(".experts.")
        if after:
            number, kind, _ = after.split(".")
            fused.setdefault(before.replace("block_sparse_moe", "mlp"), {}).setdefault(int(number), {})[kinds[kind]] = (
                tensor
            )
        else:
            kept[name.replace("block_sparse_moe", "mlp")] = tensor
    for before, experts in fused.items():
        each = [experts[number] for number in range(len(experts))]
        kept[before + ".experts.gate_up_proj"] = torch.stack(
            [torch.cat([expert["gate"], expert["up"]]) for expert in each]
        )
        kept[before + ".experts.down_proj"] = torch.stack([expert["down"] for expert in each])
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_experts_in_one_tensor_and_one_by_one_are_the_same(name: str, tmp_path: Path) -> None:
    reference_model(name, tmp_path)
    some = prompts(4, SIZES["vocab_size"])
    assert any(".experts.3." in tensor for tensor in load_file(tmp_path / "model.safetensors"))
    expected = Engine(tmp_path).generate(some, 20)
    fuse(tmp_path)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    assert Engine(tmp_path).generate(some, 20) == expected


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.pairwise("name")
@pytest.mark.parametrize(
    ("name", "quantization"),
    [("qwen2-moe", "w8a8"), ("qwen2-moe", "w4"), ("glm4-moe", "w4"), ("gpt-oss", "w8a8"), ("gemma4-moe", "w4")],
)
def test_a_packed_mixture_is_the_same_model(
    name: str, quantization: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    reference_model(name, source)
    for pattern in TOKENIZER_FILES:
        for file in (Path(__file__).parents[2] / "services/demo/model").glob(pattern):
            if not (source / file.name).exists():
                (source / file.name).write_bytes(file.read_bytes())
    assert main(["quantize", str(source), str(packed), "--quantization", quantization]) == 0, capsys.readouterr().err
    some = prompts(4, SIZES["vocab_size"])
    original, restored = (
        Engine(source, dtype=torch.bfloat16, quantization=quantization),
        Engine(packed, dtype=torch.bfloat16),
    )
    assert restored.generate(some, 12) == original.generate(some, 12)
    for number in range(4):
        assert torch.equal(torch.stack(original.logits[number]), torch.stack(restored.logits[number]))


def to_mxfp4(folder: Path, model: PreTrainedModel) -> None:
    """Random blocks in MXFP4 in the place of gpt-oss' experts, and in the model what they mean."""
    generator = torch.Generator().manual_seed(1)
    kept = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.endswith(("gate_up_proj", "down_proj"))
    }
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for number, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name).data  # [experts, k, n]
            count, k, n = weight.shape
            blocks = torch.randint(0, 256, (count, n, k // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 124, (count, n, k // 32), generator=generator, dtype=torch.uint8)
            codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
            means = torch.where(codes > 7, -1.0, 1.0) * values[codes & 7] * torch.exp2(scales[..., None].float() - 127)
            weight.copy_(means.flatten(2).transpose(1, 2))
            kept |= {
                f"model.layers.{number}.mlp.experts.{name}_{part}": each
                for part, each in (("blocks", blocks), ("scales", scales))
            }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}})
    )


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """In float32 the answers are transformers'; in bfloat16 the experts stay as they are."""
    config = GptOssConfig(**CONFIGS["gpt-oss"].to_dict() | {"intermediate_size": 96, "dtype": None})
    model = reference_model("gpt-oss", tmp_path, config=config)
    to_mxfp4(tmp_path, model)
    assert_greedy(Engine(tmp_path), model, prompts(3, SIZES["vocab_size"]), 30)
    kept = read_config(json.loads((tmp_path / "config.json").read_text()))
    source = SafetensorsSource(tmp_path, torch.bfloat16, torch.device("cpu"), kept.quantization_config)
    experts = model.model.layers[1].mlp.experts
    for number in range(6):
        matrix, bias = read_expert(source, "model.layers.1.mlp.experts.down_proj", number, (64, 96), torch.arange(64))
        assert isinstance(matrix, Grouped)
        assert torch.equal(matrix.dequantize(torch.float32), experts.down_proj[number].T)
        assert torch.equal(bias, experts.down_proj_bias[number].bfloat16())
    with pytest.raises(
        StartupError,
        match=r"gate_up_proj_blocks has the shape \(6, 192, 2, 16\), config.json says \(192, 3, 16\) for each expert",
    ):
        read_expert(source, "model.layers.1.mlp.experts.gate_up_proj", 0, (192, 96), torch.arange(192))
    some = prompts(3, SIZES["vocab_size"])
    loaded = Engine(tmp_path, dtype=torch.bfloat16)
    assert [Engine(loaded).generate([each], 12)[0] for each in some] == Engine(loaded).generate(some, 12)
    with pytest.raises(StartupError, match="is quantized already"):
        Engine(tmp_path, dtype=torch.bfloat16, quantization="w8a8")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    )
    with pytest.raises(
        StartupError, match="gate_up_proj is in MXFP4, and config.json's quantization_config says otherwise"
    ):
        Engine(tmp_path, dtype=torch.bfloat16)


def test_a_scale_that_float16_lacks_widens_an_expert() -> None:
    codes, exponents = torch.full((2, 1, 16), 0x21, dtype=torch.uint8), torch.tensor([[90], [127]], dtype=torch.uint8)
    wide = to_matrix(codes, exponents, torch.bfloat16)
    assert (
        isinstance(wide, Dense)
        and wide.weight[0, :2].tolist() == [2.0**-38, 2.0**-37]
        and wide.weight[1, :2].tolist() == [0.5, 1.0]
    )
    assert isinstance(to_matrix(codes, exponents.clamp(min=120), torch.bfloat16), Grouped)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    reference_model("qwen3-moe", tmp_path)
    config = read_config(json.loads((tmp_path / "config.json").read_text()))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"no tensor model\.layers\.2\.mlp\.experts\.5\.up_proj\.weight"):
        load_weights(tmp_path, config, FLOAT32)


def test_configurations() -> None:
    def read(name: str, architecture: str, **changes: object) -> object:
        return read_config(CONFIGS[name].to_dict() | {"architectures": [architecture]} | changes).moe

    moe = read("qwen2-moe", "Qwen2MoeForCausalLM")
    assert moe.sparse_layers == {0, 2} and moe.shared_intermediate_size == 72 and not moe.router.has_normalized_weights
    assert read("qwen3-moe", "Qwen3MoeForCausalLM", decoder_sparse_step=2).sparse_layers == {1}
    assert (
        read("qwen3-moe", "Qwen3MoeForCausalLM").router.has_normalized_weights
        and read("qwen3-moe", "Qwen3MoeForCausalLM").num_experts == 8
    )
    mixtral = read("mixtral", "MixtralForCausalLM")
    assert (
        mixtral.sparse_layers == {0, 1, 2}
        and mixtral.router.has_normalized_weights
        and mixtral.intermediate_size == 112
    )
    gpt_oss = read_config(CONFIGS["gpt-oss"].to_dict() | {"architectures": ["GptOssForCausalLM"]})
    assert (
        gpt_oss.moe is not None
        and gpt_oss.moe.has_bias
        and gpt_oss.has_sinks
        and gpt_oss.sliding_windows == (24, None, 24)
    )
    with pytest.raises(StartupError, match="swiglu_alpha and swiglu_limit must be"):
        read("gpt-oss", "GptOssForCausalLM", swiglu_limit=5.0)
    hunyuan = read("hunyuan-moe", "HunYuanMoEV1ForCausalLM", moe_topk=[3] * 32)
    assert hunyuan.router.num_active == 3 and hunyuan.shared_intermediate_size == hunyuan.intermediate_size == 112
    assert read_config(CONFIGS["qwen3"].to_dict() | {"architectures": ["Qwen3ForCausalLM"]}).moe is None
