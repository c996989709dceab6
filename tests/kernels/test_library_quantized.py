"""Models on transformers' own modules, with weights in the formats that other tools publish, and quantized
as they are read: what the library computes of the weights that the codes mean, and the same bits in any
company.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from services.compute.backends.choose import choose_backend
from services.compute.backends.matrix import Float8, Matrix
from services.compute.backends.torch.backend import TorchBackend
from services.compute.models.architectures import read_config
from services.compute.models.config import Packed
from services.compute.models.transformers_attention import Unsupported
from services.compute.models.transformers_model import TransformersModel
from services.compute.weights.library_attention import SelfAttention
from services.compute.weights.library_modules import (
    KernelExperts,
    KernelLinear,
    KernelMlp,
    KernelWeight,
    load_library_modules,
)
from services.compute.weights.loader import Loader, open_source
from shared.process.errors import StartupError
from tests.kernels.families import CONFIGS as FAMILIES
from tests.kernels.families import Engine, assert_greedy, reference_model
from tests.kernels.quantized import Writer, awq, compressed, float8, four_bit_floats, gptq, llm_int8, packed, scheme
from tests.kernels.test_formats import BNB4, BNB8, awq_config, fp8_config, gptq_config
from tests.kernels.test_models import QWEN3_VL_MOE, SMALL_TOWER, prompts
from tests.kernels.test_moe import to_mxfp4
from tests.kernels.test_transformers_models import ONE_BY_ONE

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3-5": transformers.Qwen3_5TextConfig(**SIZES, **DELTA),
    "qwen3-next": transformers.Qwen3NextConfig(
        **SIZES, **DELTA, **EXPERTS, num_experts=4, shared_expert_intermediate_size=128
    ),
    "qwen3": transformers.Qwen3Config(**SIZES),
    "qwen3-moe": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, norm_topk_prob=True),
    "glm4-moe": transformers.Glm4MoeConfig(
        **SIZES, **EXPERTS, n_routed_experts=4, first_k_dense_replace=1, use_qk_norm=True
    ),
    "minimax-m2": transformers.MiniMaxM2Config(
        **SIZES | {"intermediate_size": 128}, num_local_experts=4, num_experts_per_tok=2
    ),
    "gemma4": transformers.Gemma4UnifiedTextConfig(
        **SIZES,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention=None,
    ),
    "ministral3": transformers.Ministral3Config(**SIZES),
    "gpt2": transformers.GPT2Config(vocab_size=512, n_embd=128, n_layer=2, n_head=4, n_positions=512),
}
# written into the file as they are
DENSE = ("norm", "embed", "lm_head", ".gate.", "shared_expert_gate", "wte", "wpe")
INT4 = compressed(scheme(4, "group", group=32), layout="pack-quantized", ignore=("lm_head", "re:.*[.]gate$"))
FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "fp8-block": (
        float8("block", scale_name="weight_scale_inv", block=(64, 64)),
        fp8_config(weight_block_size=[64, 64]),
    ),
    "fp8-tensor": (float8("tensor", scale_name="weight_scale_inv"), fp8_config(activation_scheme="static")),
    "gptq": (gptq(4, 64, symmetric=False), gptq_config(4, 64, sym=False)),
    "awq": (awq(64), awq_config(64)),
    "w4a16": (packed(4, 32), INT4),
    "nf4": (four_bit_floats("nf4", 64, nested=True), BNB4),
    "llm-int8": (llm_int8, BNB8),
}
CASES = [
    ("qwen3", "nf4"),
    ("qwen3-moe", "fp8-block"),
    ("qwen3-moe", "gptq"),
    ("qwen3-moe", "llm-int8"),
    ("glm4-moe", "fp8-block"),
    ("glm4-moe", "awq"),
    ("glm4-moe", "w4a16"),
    ("glm4-moe", "nf4"),
    ("minimax-m2", "fp8-block"),
    ("gemma4", "gptq"),
    ("ministral3", "fp8-tensor"),
]


def write(
    family: str, folder: Path, writer: Writer, config: dict[str, Any], rename: Callable[[str], str] = str
) -> PreTrainedModel:
    """Write a random model's layers by the names that the family's checkpoints have, each matrix by the
    writer. rename: makes these names other ones. Returns the library's model with what the file means."""
    dense = folder.parent / f"{folder.name}-dense"
    reference_model(family, dense, config=CONFIGS[family])
    folder.mkdir()
    tensors, meant = {}, {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        meant[name] = tensor
        if tensor.ndim != 2 or any(part in name for part in DENSE):
            tensors[rename(name)] = tensor
            continue
        parts, values = writer(tensor)
        meant[name] = values.float()
        tensors |= {rename(f"{name.removesuffix('weight')}{part}"): each.contiguous() for part, each in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, dense / "model.safetensors", metadata={"format": "pt"})
    of_file = json.loads((dense / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(of_file))
    return AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager").eval()


def run(folder: Path, **options: Any) -> Engine:
    return Engine(folder, model_impl="transformers", **options)


def assert_bits_are_the_same(engine: Engine) -> None:
    """In a batch, alone, and in chunks."""
    some = prompts(3, SIZES["vocab_size"])
    tokens = engine.generate(some, 8)
    batch = {number: torch.stack(engine.logits[number]) for number in range(len(some))}
    for number, prompt in enumerate(some):
        assert engine.generate([prompt], 8) == [tokens[number]]
        assert torch.equal(torch.stack(engine.logits[0]), batch[number])
    chunks = Engine(engine, max_batched_tokens=24, max_num_seqs=2)
    assert chunks.generate(some, 8) == tokens
    assert all(torch.equal(torch.stack(chunks.logits[number]), each) for number, each in batch.items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "form"), CASES)
def test_a_published_checkpoint_computes_what_its_weights_mean(family: str, form: str, tmp_path: Path) -> None:
    """In float32 the library's tokens; in bfloat16, on the own kernels, its logits nearly."""
    reference = write(family, tmp_path / "model", *FORMATS[form])
    some = prompts(3, SIZES["vocab_size"])
    assert_greedy(run(tmp_path / "model"), reference, some, 12)
    engine = run(tmp_path / "model", dtype=torch.bfloat16)
    assert_bits_are_the_same(engine)
    engine.generate(some[:1], 1)
    with torch.inference_mode():
        expected = reference(torch.tensor(some[:1])).logits[0, -1]
    assert (engine.logits[0][0] - expected).pow(2).mean() < 0.15**2 * expected.pow(2).mean()


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3-moe", "fp8-block"),
        ("qwen3-moe", "gptq"),
        *(("qwen3-5", form) for form in FORMATS),
        ("qwen3-next", "fp8-block"),
        ("qwen3-next", "awq"),
    ],
)
def test_the_native_model_and_the_library_read_the_same_file(family: str, form: str, tmp_path: Path) -> None:
    write(family, tmp_path / "model", *FORMATS[form])
    some = prompts(3, SIZES["vocab_size"])
    native, library = Engine(tmp_path / "model"), run(tmp_path / "model")
    assert native.generate(some, 12) == library.generate(some, 12)
    for number in range(len(some)):
        torch.testing.assert_close(
            torch.stack(native.logits[number]), torch.stack(library.logits[number]), atol=1e-4, rtol=1e-4
        )


def test_the_text_of_a_model_that_sees_as_it_is_published_in_fp8(tmp_path: Path) -> None:
    """Ministral 3: scales of weights and of activations for each matrix; the latter are not used."""

    def write_static(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        parts, meant = FORMATS["fp8-tensor"][0](weight)
        return parts | {"activation_scale": torch.tensor(0.1)}, meant

    folder, config = tmp_path / "model", FORMATS["fp8-tensor"][1] | {"modules_to_not_convert": ["lm_head"]}
    reference = write("ministral3", folder, write_static, config, rename=lambda name: f"language_model.{name}")
    text = json.loads((folder / "config.json").read_text())
    whole = {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": transformers.PixtralVisionConfig().to_dict(),
        "quantization_config": text.pop("quantization_config"),
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    assert_greedy(run(folder), reference, prompts(3, SIZES["vocab_size"]), 12)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """gpt-oss, whose experts' matrices the library has turned round."""
    config = transformers.GptOssConfig(**FAMILIES["gpt-oss"].to_dict() | {"intermediate_size": 96, "dtype": None})
    model = reference_model("gpt-oss", tmp_path, config=config)
    to_mxfp4(tmp_path, model)
    assert_greedy(run(tmp_path), model, prompts(3, SIZES["vocab_size"]), 12)
    assert_bits_are_the_same(run(tmp_path, dtype=torch.bfloat16))


STACKED = {
    "qwen3-moe": CONFIGS["qwen3-moe"],
    "gpt-oss": transformers.GptOssConfig(**FAMILIES["gpt-oss"].to_dict() | {"dtype": None}),
    "llama4": ONE_BY_ONE["llama4-chunks"],
}


@pytest.mark.parametrize(
    ("family", "scales", "ending"),
    [
        ("qwen3-moe", "block", "_scale_inv"),
        ("qwen3-moe", "channel", "_scale"),
        ("qwen3-moe", "tensor", "_weight_scale"),
        ("qwen3-moe", "halves", "_scale_inv"),
        ("qwen3-moe", "all", "_scale_inv"),
        ("gpt-oss", "block", "_scale_inv"),
        ("gpt-oss", "channel", "_scale"),
        ("llama4", "block", "_scale_inv"),
        ("llama4", "channel", "_scale"),
    ],
)
def test_experts_in_one_tensor_in_fp8(family: str, scales: str, ending: str, tmp_path: Path) -> None:
    """In gpt-oss and Llama 4, each expert's rows are inputs. The native models read the same."""
    reference, is_turned = reference_model(family, tmp_path, config=STACKED[family]), family != "qwen3-moe"
    write_stacked(tmp_path, reference, scales, ending, in_memory=is_turned, in_file=is_turned)
    for engine in (run(tmp_path), *([Engine(tmp_path)] if family != "llama4" else [])):
        assert_greedy(engine, reference, prompts(3, SIZES["vocab_size"]), 12)
    assert_bits_are_the_same(run(tmp_path, dtype=torch.bfloat16))


def test_experts_of_gpt_oss_keep_their_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a backend keeps FP8; what it widens is counted, each expert's layers."""
    reference = reference_model("gpt-oss", tmp_path, config=STACKED["gpt-oss"])
    write_stacked(tmp_path, reference, "channel", "_scale", in_memory=True, in_file=True)
    config, backend = (
        read_config(json.loads((tmp_path / "config.json").read_text())),
        TorchBackend(torch.bfloat16, torch.device("cpu")),
    )
    assert config.moe is not None
    made: list[Matrix] = []
    monkeypatch.setattr(backend, "make_linear", lambda matrix, *_, **__: made.append(matrix))
    source = open_source(tmp_path, config, backend)
    loader = Loader(source, config, backend, Packed("none", 32))
    loader.gpt_oss_expert("model.layers.0.mlp.experts.", 0, config.moe)
    source.close()
    assert [type(each) for each in made] == [Float8] * 2 and loader.widened.total() == 2


@pytest.mark.parametrize(("scales", "is_turned"), [("block", True), ("channel", True), ("block", False)])
def test_experts_of_qwen3_vl_in_fp8(scales: str, is_turned: bool, tmp_path: Path) -> None:
    """A rule of the library's turns them round, if the file has them so."""
    config = transformers.Qwen3VLMoeConfig(text_config=QWEN3_VL_MOE, vision_config=SMALL_TOWER)
    reference = transformers.Qwen3VLMoeForConditionalGeneration(config).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.12)
    reference.save_pretrained(tmp_path)
    write_stacked(tmp_path, reference, scales, "_scale_inv", in_memory=False, in_file=is_turned)
    for engine in (run(tmp_path), Engine(tmp_path)):
        assert_greedy(engine, reference, prompts(3, SIZES["vocab_size"]), 12)


def test_experts_in_fp8_that_nothing_explains_are_refused(tmp_path: Path) -> None:
    reference = reference_model("qwen3-moe", tmp_path, config=CONFIGS["qwen3-moe"])
    write_stacked(tmp_path, reference, "block", "_of_another_name", in_memory=False, in_file=False)
    for model_impl in ("native", "transformers"):
        with pytest.raises(StartupError, match=r"the checkpoint has no tensor .*experts\.gate_up_proj_scale_inv"):
            Engine(tmp_path, model_impl=model_impl)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    for model_impl in ("native", "transformers"):
        with pytest.raises(StartupError, match=r"gate_up_proj.weight is quantized, and config\.json has no quanti"):
            Engine(tmp_path, model_impl=model_impl)


def write_stacked(
    folder: Path, model: PreTrainedModel, scales: str, ending: str, *, in_memory: bool, in_file: bool
) -> None:
    """Put experts in FP8 into a folder with the model, and what they mean into the model. in_memory, in_file: whether
    an expert's rows are inputs."""
    parts = {}
    for name, tensor in model.state_dict().items():
        parts[name] = tensor.clone()
        if tensor.ndim == 3 and name.endswith("_proj"):
            kind = "one" if scales == "halves" and name.endswith("down_proj") else scales
            written = in_fp8(tensor.mT if in_memory else tensor, kind)
            codes, of_codes, meant = (each.mT if each.ndim == 3 else each for each in written) if in_file else written
            parts[name], parts[name + ending] = codes, of_codes
            tensor.copy_(meant if in_memory == in_file else meant.mT)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({name: each.contiguous() for name, each in parts.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = fp8_config(weight_block_size=[64, 64])
    (folder / "config.json").write_text(json.dumps(config))


def in_fp8(weights: torch.Tensor, scales: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All experts' weights [experts, n, k] in FP8, their scales, and what these mean."""
    if scales == "all":
        scale = weights.abs().max() / 448
        codes = (weights / scale).to(torch.float8_e4m3fn)
        return codes, scale[None], codes.float() * scale
    pieces = [half for each in weights for half in (each.chunk(2) if scales == "halves" else [each])]
    kind = "one" if scales == "halves" else scales
    written = [float8(kind, scale_name="scale", block=(64, 64))(each) for each in pieces]
    codes, of_codes, meant = (
        torch.stack(parts)
        for parts in (
            [parts["weight"] for parts, _ in written],
            [parts["scale"] for parts, _ in written],
            [values for _, values in written],
        )
    )
    if scales == "halves":
        return codes.view(weights.shape), of_codes.view(len(weights), 2, 1), meant.view(weights.shape)
    return codes, of_codes, meant


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "ministral3"])
def test_a_kernel_does_all_of_attention(family: str, tmp_path: Path) -> None:
    """Where the library's modules are Llama's or Qwen 3's; Ministral's scale queries by their positions."""
    reference = reference_model(family, tmp_path, config=CONFIGS[family])
    engine = run(tmp_path, dtype=torch.bfloat16)
    found = [module.forward for module in engine.runner.model.model.modules() if hasattr(module, "q_proj")]
    are_exchanged = [isinstance(each, SelfAttention) and each.has_equal_halves for each in found]
    assert are_exchanged == [family != "ministral3"] * SIZES["num_hidden_layers"]
    assert_bits_are_the_same(engine)
    some = prompts(1, SIZES["vocab_size"])
    engine.generate(some, 4)
    native = Engine(tmp_path, dtype=torch.bfloat16)
    native.generate(some, 1)
    with torch.inference_mode():
        expected = reference(torch.tensor(some)).logits[0, -1]
    for logits in (engine.logits[0][0], native.logits[0][0]):
        assert (logits - expected).pow(2).mean() < 0.03**2 * expected.pow(2).mean()


@pytest.mark.parametrize("quantization", ["w8a8", "w4", "nf4"])
@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe", "gpt2"])
def test_layers_are_quantized_as_they_are_read(family: str, quantization: str, tmp_path: Path) -> None:
    reference_model(family, tmp_path, config=CONFIGS[family])
    engine = run(tmp_path, dtype=torch.bfloat16, quantization=quantization)
    model = engine.runner.model.model
    for module in model.modules():
        assert type(module) is not torch.nn.Linear
        if isinstance(module, KernelExperts):
            forms = {each.down.form.kind.name for each in module.experts}
            assert forms == {{"w8a8": "INT8", "w4": "INT4", "nf4": "FOUR_BIT"}[quantization]}
    assert any(isinstance(module, KernelExperts | KernelMlp | KernelLinear) for module in model.modules())
    assert_bits_are_the_same(engine)


def test_a_routers_weight_is_multiplied_by_the_backend_or_refused(tmp_path: Path) -> None:
    backend, linear = choose_backend(torch.bfloat16, torch.device("cpu")), torch.nn.functional.linear
    weight, x, bias = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((8, 64), (3, 64), (8,)))
    kept = KernelWeight.of(weight, backend)
    assert (kept.shape, kept.dtype, kept.device.type, kept.size(1)) == ((8, 64), torch.bfloat16, "cpu", 64)
    for product in (
        linear(x.float(), kept.float()),
        linear(x.float(), kept.type(torch.float32)),
        linear(input=x.to(kept.dtype).float(), weight=kept.to(torch.float32)),
        linear(x.float(), kept, bias.float()) - bias.float(),
    ):
        torch.testing.assert_close(product, x.float() @ weight.float().T, rtol=1e-4, atol=1e-4)
        assert type(product) is torch.Tensor
    for refused in (
        lambda: x @ kept.T,
        lambda: torch.matmul(x, kept),
        lambda: linear(kept, kept),
        lambda: torch.cat([kept, kept]),
        lambda: x.to(kept),
        lambda: kept.data,
        lambda: kept[0],
        kept.norm,
    ):
        with pytest.raises(Unsupported, match="it reads a router's weight by torch"):
            refused()
    reference_model("minimax-m2", tmp_path, config=CONFIGS["minimax-m2"])
    model = load_library_modules(tmp_path, backend, Packed("none", 32), CONFIGS["minimax-m2"])
    gate = model.model.layers[0].mlp.gate
    assert isinstance(gate.weight, KernelWeight)
    gate.forward = lambda x, *_: x @ gate.weight.T
    with pytest.raises(Unsupported, match="it reads a router's weight by"):
        TransformersModel(model, backend, is_ragged=False)


def test_what_a_file_has_quantized_is_not_quantized_again(tmp_path: Path) -> None:
    write("qwen3", tmp_path / "model", *FORMATS["gptq"])
    with pytest.raises(StartupError, match=r"--quantization w8a8: .* is quantized already \(GPTQ, 4 bits"):
        run(tmp_path / "model", dtype=torch.bfloat16, quantization="w8a8")


def test_codes_without_a_config_that_explains_them_are_refused(tmp_path: Path) -> None:
    write("qwen3-moe", tmp_path / "model", *FORMATS["fp8-block"])
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(StartupError, match=r"is float8_e4m3fn, and config\.json has no quantization_config"):
        run(tmp_path / "model")
