"""Every model against transformers on the same weights: token for token, and logits to 1e-4."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from services.compute.backends.cpu.library import VARIABLE
from services.compute.backends.torch.backend import TorchBackend
from services.compute.loop.engine import build_engine
from services.compute.models.architectures import read_config
from services.compute.models.rope import read_rope
from services.compute.weights.loader import load_weights
from shared.model.files import DEMO_MODEL, open_model, text_config
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from tests.kernels.backends import FLOAT32
from tests.kernels.families import CONFIGS, LOCAL_AND_GLOBAL, LONG_ROPE, SIZES, Engine, assert_greedy, reference_model

NUM_TOKENS = 20
GEMMA3_4B = {  # its text_config as it was published
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def prompts(count: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Lengths around the borders of blocks of 16 first."""
    rng = random.Random(seed)
    lengths = [1, 15, 16, 17, 31, 32, 33, 48, 5, 90, 64, 2, 47, 49, 100, 11][:count]
    return [[rng.randrange(2, vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", [*(name for name in CONFIGS if name != "phi3-longrope"), "demo"])
def test_greedy_output_and_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """Some prompts are longer than the windows of those that have one."""
    reference = reference_model(name, tmp_path)
    assert_greedy(
        Engine(DEMO_MODEL if name == "demo" else tmp_path), reference, prompts(5, SIZES["vocab_size"]), NUM_TOKENS
    )


@pytest.mark.parametrize(("max_model_len", "lengths"), [(None, (65, 90, 130)), (64, (1, 17, 24))])
def test_longrope_has_the_factors_of_the_longest_sequence(
    max_model_len: int | None, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """transformers changes factors where a sequence passes the original length, 64, so each of
    these stays on one side.
    """
    reference = reference_model("phi3-longrope", tmp_path)
    rng = random.Random(4)
    some = [[rng.randrange(2, SIZES["vocab_size"]) for _ in range(length)] for length in lengths]
    assert_greedy(Engine(tmp_path, max_model_len=max_model_len), reference, some, NUM_TOKENS)


def test_the_text_part_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """Gemma 3 from 4b on: text_config leaves out what has its default, and the tensors have longer
    names, older or newer.
    """
    reference = reference_model("gemma3", tmp_path / "text")
    tensors, config = load_file(tmp_path / "text" / "model.safetensors"), CONFIGS["gemma3"].to_dict()
    text = {
        name: value
        for name, value in config.items()
        if name not in ("vocab_size", "architectures", "tie_word_embeddings")
    }
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
    }
    text["vocab_size"] = SIZES["vocab_size"]
    for prefix in ("language_model.model.", "model.language_model."):
        folder = tmp_path / prefix
        folder.mkdir()
        named = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()} | {
            "vision_tower.patch.weight": torch.zeros(8)
        }
        save_file(named, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(whole))
        assert_greedy(Engine(folder), reference, prompts(4, SIZES["vocab_size"])[2:], NUM_TOKENS)
    defaults = read_config(text_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": GEMMA3_4B}))
    assert (defaults.vocab_size, defaults.num_heads, defaults.num_kv_heads, defaults.head_dim) == (262_208, 8, 4, 256)
    assert [layer for layer, window in enumerate(defaults.sliding_windows) if window is None] == [5, 11, 17, 23, 29]
    assert [rope.inv_freq[1].item() for rope in defaults.ropes] == pytest.approx(
        [1e6 ** (-1 / 128) / 8, 1e4 ** (-1 / 128)]
    )


def test_a_checkpoint_of_the_model_below_the_head(tmp_path: Path) -> None:
    """Qwen 3 Embedding as published: tensors without `model.`."""
    config = transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)
    reference = reference_model("qwen3", tmp_path, config=config)
    file = tmp_path / "model.safetensors"
    bare = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    assert "embed_tokens.weight" in bare and "lm_head.weight" not in bare
    save_file(bare, file, metadata={"format": "pt"})
    assert_greedy(Engine(tmp_path), reference, prompts(3, SIZES["vocab_size"]), NUM_TOKENS)


MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
QWEN3_VL = SIZES | {"head_dim": 32, "rope_parameters": MROPE}
QWEN3_VL_MOE = QWEN3_VL | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
SMALL_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}


@pytest.mark.parametrize("layout", ["dense", "experts", "turned experts"])
def test_the_text_part_of_qwen3_vl(layout: str, tmp_path: Path) -> None:
    """Published mixtures have their experts' matrices as [inputs, outputs], files that transformers
    writes as it computes with them.
    """
    if layout == "dense":
        whole: torch.nn.Module = transformers.Qwen3VLForConditionalGeneration(
            transformers.Qwen3VLConfig(text_config=QWEN3_VL, vision_config=SMALL_TOWER)
        )
    else:
        whole = transformers.Qwen3VLMoeForConditionalGeneration(
            transformers.Qwen3VLMoeConfig(text_config=QWEN3_VL_MOE, vision_config=SMALL_TOWER)
        )
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.12)
    whole.eval().save_pretrained(tmp_path)
    if layout != "dense":
        file = tmp_path / "model.safetensors"
        turned = {
            name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in load_file(file).items()
        }
        is_turned = turned["model.language_model.layers.0.mlp.experts.down_proj"].shape[1:] == (40, 64)
        if is_turned == (layout == "turned experts"):
            save_file(turned, file, metadata={"format": "pt"})
    engine = Engine(tmp_path)
    assert engine.runner.model.implementation == "native"
    assert_greedy(engine, whole, prompts(3, SIZES["vocab_size"]), NUM_TOKENS)


def test_the_axes_of_qwen3_vl_take_turns() -> None:
    rope = read_rope(QWEN3_VL, 32, 512)
    assert rope.axes is not None
    positions = torch.tensor([[[3, 90]], [[14, 7]], [[200, 5]]])
    library = Qwen3VLTextRotaryEmbedding(transformers.Qwen3VLConfig(text_config=QWEN3_VL).text_config)
    cos, _ = library(torch.zeros(1), positions)
    torch.testing.assert_close((positions[rope.axes, 0].T * rope.inv_freq).cos(), cos[0, :, :16])


def test_the_demo_answers_through_transformers_too() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is a KV cache?"}], tokenize=False, add_generation_prompt=True
    )
    [tokens] = Engine(DEMO_MODEL).generate([tokenizer.encode(text)], 60, eos=1)
    assert tokenizer.decode(tokens[:-1]) == (
        "The KV cache keeps the keys and values of all earlier tokens, so that each step computes only the new token."
    )
    assert tokens[-1] == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["llama3", "mistral-window", "qwen3", "qwen2-moe", "gpt-oss", "gemma2", "gemma3", "demo"]
)
def test_a_batch_chunks_and_preemption_change_no_token(name: str, tmp_path: Path) -> None:
    reference_model(name, tmp_path)
    loaded = Engine(DEMO_MODEL if name == "demo" else tmp_path)
    some, num_tokens = prompts(12, SIZES["vocab_size"]), 12
    together = Engine(loaded).generate(some, num_tokens)
    assert [Engine(loaded).generate([prompt], num_tokens)[0] for prompt in some[::3]] == together[::3]
    chunked = Engine(loaded, max_num_seqs=16, max_batched_tokens=20)
    assert chunked.generate(some, num_tokens) == together
    cramped = Engine(loaded, block_size=5, num_blocks=50, strategy="paged")
    assert cramped.generate(some, num_tokens) == together
    assert cramped.scheduler.num_preemptions > 0
    assert Engine(loaded, block_size=5, num_blocks=600).generate(some, num_tokens) == together


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen2"])
def test_a_shared_prefix_changes_no_token(name: str, tmp_path: Path) -> None:
    """Prompts with a beginning in common, while it is being computed, after it, and with evictions in between."""
    reference_model(name, tmp_path)
    loaded = Engine(tmp_path)
    [system] = prompts(1, SIZES["vocab_size"], seed=9)
    system = (system + prompts(16, SIZES["vocab_size"], seed=9)[9])[:71]
    some = [system + prompt for prompt in prompts(8, SIZES["vocab_size"])]
    alone = [Engine(loaded).generate([prompt], NUM_TOKENS)[0] for prompt in some]
    for limits in (
        {},
        {"num_blocks": 24, "strategy": "paged"},
        {"block_size": 4, "num_blocks": 90, "max_batched_tokens": 70},
    ):
        engine = Engine(loaded, **limits)
        assert engine.generate(some, NUM_TOKENS) == alone
        assert engine.generate(some[::-1], NUM_TOKENS) == alone[::-1]
        assert engine.scheduler.prefixes.num_hits > 5 * len(system)
    assert engine.scheduler.block_manager.num_evictions > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_choices_of_one_prompt_are_as_if_each_were_alone(name: str, tmp_path: Path) -> None:
    reference_model(name, tmp_path)
    loaded = Engine(tmp_path)
    for prompt in prompts(10, SIZES["vocab_size"])[::3]:
        alone = Engine(loaded).generate([prompt] * 4, 16, group_id="choices")
        engine = Engine(loaded, max_batched_tokens=33)
        for choice, tokens in enumerate(alone):
            [after] = Engine(loaded).generate([prompt + tokens[:1]], 15)
            assert after == tokens[1:], f"choice {choice}"
        engine.generate([[5] * 40], 3)
        assert engine.generate([prompt] * 4, 16, group_id="choices") == alone
        cramped = Engine(loaded, num_blocks=4 * -(-(len(prompt) + 16) // 16) - 3, strategy="paged")
        assert cramped.generate([prompt] * 4, 16, group_id="choices") == alone


def test_config_json_as_it_was_before_rope_parameters() -> None:
    """rope_scaling and rope_theta beside everything else, as most published checkpoints have them."""
    new = CONFIGS["phi3-longrope"].to_dict() | {"architectures": ["Phi3ForCausalLM"]}
    factors = {name: new["rope_parameters"][name] for name in ("short_factor", "long_factor")}
    old = new | {
        "rope_parameters": None,
        "rope_theta": 10000.0,
        "rope_scaling": factors | {"type": "su"},
        "partial_rotary_factor": 0.5,
    }
    for length in (64, 512):
        [expected], [found] = read_config(new, length).ropes, read_config(old, length).ropes
        assert torch.equal(found.inv_freq, expected.inv_freq)
        assert found.scale == expected.scale > 1.0
    new = CONFIGS["olmo3"].to_dict() | {"architectures": ["Olmo3ForCausalLM"]}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    old = new | {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": yarn}
    expected, [found, local] = read_config(new).ropes[0], read_config(old).ropes
    assert torch.equal(found.inv_freq, expected.inv_freq)
    assert found.scale == expected.scale > 1.0 == local.scale
    assert local.inv_freq[1].item() == pytest.approx(10000.0 ** (-1 / 16))


def test_torch_computes_the_quantized_modes_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 with keys and values in int8, and, without native code, quantized layers: the
    beginning of the demo's answer survives.
    """
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is a KV cache?"}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer.encode(text)
    expected = Engine(DEMO_MODEL).generate([prompt], 12)
    assert Engine(DEMO_MODEL, kv_group=32).generate([prompt], 12) == expected
    monkeypatch.setenv(VARIABLE, "torch")
    for quantization in ("none", "w8a8", "w4", "nf4"):
        engine = Engine(DEMO_MODEL, dtype=torch.bfloat16, quantization=quantization)
        assert isinstance(engine.runner.model.backend, TorchBackend)
        assert engine.generate([prompt], 12) == expected, quantization


def test_sharded_checkpoints_load_the_same(tmp_path: Path) -> None:
    reference_model("qwen2", tmp_path / "one")
    reference_model("qwen2", tmp_path / "many", shard="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    some = prompts(3, SIZES["vocab_size"])
    assert Engine(tmp_path / "one").generate(some, 10) == Engine(tmp_path / "many").generate(some, 10)


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    reference_model("qwen2", tmp_path)
    config = CONFIGS["qwen2"].to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    with pytest.raises(StartupError, match="GPT2LMHeadModel is not supported"):
        read_config(config | {"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(StartupError, match="rope scaling 'spiral' is not supported"):
        read_config(config | {"rope_parameters": {"rope_type": "spiral"}})
    with pytest.raises(StartupError, match="hidden_act 'relu2' is not supported; these are: silu"):
        read_config(config | {"hidden_act": "relu2"})
    gemma = CONFIGS["gemma3"].to_dict() | {"architectures": ["Gemma3ForCausalLM"]}
    with pytest.raises(StartupError, match="its attention is not causal"):
        read_config(gemma | {"use_bidirectional_attention": True})
    with pytest.raises(StartupError, match="layers of the type chunked_attention are not supported"):
        read_config(gemma | {"layer_types": ["chunked_attention"] * 3})
    with pytest.raises(StartupError, match="describes 2 layers one by one, num_hidden_layers is 3"):
        read_config(gemma | {"layer_types": LOCAL_AND_GLOBAL[:2]})
    with pytest.raises(StartupError, match="num_attention_heads 4 is not a multiple of num_key_value_heads 3"):
        read_config(config | {"num_key_value_heads": 3})
    for wrong_value in (
        {"num_hidden_layers": "three"},
        {"query_pre_attn_scalar": 0},
        {"rope_parameters": 5},
        {"hidden_size": None},
    ):
        with pytest.raises(StartupError, match="a value of the wrong type or out of range"):
            read_config(gemma | wrong_value)
    phi = CONFIGS["phi3-longrope"].to_dict() | {"architectures": ["Phi3ForCausalLM"]}
    with pytest.raises(StartupError, match="longrope has 2 factors, the model's heads have 16 frequencies"):
        read_config(phi | {"rope_parameters": phi["rope_parameters"] | {"long_factor": [1.0, 2.0]}})
    with pytest.raises(StartupError, match="no hidden_size"):
        read_config({key: value for key, value in config.items() if key != "hidden_size"})
    wrong = read_config(config | {"hidden_size": 80, "head_dim": 16})
    with pytest.raises(StartupError, match="has the shape"):
        load_weights(tmp_path, wrong, FLOAT32)
    deeper = read_config(config | {"num_hidden_layers": 5})
    with pytest.raises(StartupError, match="no tensor model.layers.3"):
        load_weights(tmp_path, deeper, FLOAT32)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartupError, match=r"holds no \*.safetensors"):
        load_weights(tmp_path / "empty", wrong, FLOAT32)


def test_an_engine_of_a_multimodal_folder(tmp_path: Path) -> None:
    """Other stages find in text_config what they ask a model's files for; --max-model-len chooses
    longrope's factors.
    """
    config = CONFIGS["phi3-longrope"].to_dict()
    reference_model("phi3-longrope", tmp_path)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    whole = {
        "architectures": ["Phi3ForCausalLM"],
        "eos_token_id": [1, 7],
        "dtype": "float32",
        "text_config": config | {"architectures": None},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "generation_config.json").unlink()
    files = open_model(str(tmp_path))
    assert (files.max_model_len, files.eos_token_ids, files.config["vocab_size"]) == (512, (1, 7), SIZES["vocab_size"])
    factors = {}
    for length in (64, 65, None):
        engine = build_engine(
            ComputeSettings(max_model_len=length, kv_cache_memory="16MiB", num_threads=torch.get_num_threads()), files
        )
        assert engine.max_model_len == (length or 512)
        factors[length] = 1 / (engine.runner.model.config.ropes[0].inv_freq * 10000.0 ** (torch.arange(16) / 16))
    for length, name in ((64, "short_factor"), (65, "long_factor"), (None, "long_factor")):
        torch.testing.assert_close(factors[length], torch.tensor(LONG_ROPE[name]))


def test_a_model_that_claims_any_length_gets_what_memory_holds(tmp_path: Path) -> None:
    """The workspace is sized for sequences that could exist."""
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "long")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**32 - 1}))
    engine = build_engine(
        ComputeSettings(kv_cache_memory="16MiB", num_threads=torch.get_num_threads()), open_model(str(folder))
    )
    assert engine.max_model_len == engine.scheduler.block_manager.num_blocks * 16
