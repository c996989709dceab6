"""Anything in a config.json is read, or refused in one line that says what is wrong."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.models.architectures import read_config
from shared.model.files import DEMO_MODEL, open_model
from shared.process.errors import StartupError
from tests.examples import examples
from tests.forge import refused
from tests.kernels.families import CONFIGS
from tests.kernels.mutations import change_one


def config_of(name: str) -> dict[str, Any]:
    """As config.json would have it."""
    config = CONFIGS[name]
    kind = type(config).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    found: dict[str, Any] = json.loads(json.dumps(config.to_dict() | {"architectures": [kind]}))
    return found


FAMILIES = {name: config_of(name) for name in CONFIGS}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama2", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647, not an integer from 1 to 4096"),
        ("llama2", {"num_hidden_layers": True}, "num_hidden_layers is True"),
        ("llama2", {"head_dim": 2**40}, "head_dim is 1099511627776"),
        ("llama2", {"head_dim": 33}, "more than a head of 33 dimensions"),
        ("llama2", {"num_attention_heads": 0, "head_dim": 16}, "num_attention_heads is 0"),
        ("llama2", {"num_key_value_heads": "2"}, "num_key_value_heads is '2'"),
        ("llama2", {"num_key_value_heads": -1}, "num_key_value_heads is -1"),
        ("llama2", {"hidden_size": None, "head_dim": 16}, "hidden_size is None"),
        ("llama2", {"architectures": {"a": 1}}, "architectures is not a list of names"),
        ("llama2", {"architectures": [["x"]]}, "architectures is not a list of names"),
        ("llama2", {"rms_norm_eps": "x"}, "rms_norm_eps is 'x', not a number"),
        ("llama2", {"rms_norm_eps": None}, "rms_norm_eps is None, not a number"),
        ("llama2", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a number"),
        ("llama2", {"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, not positive"),
        ("llama2", {"rope_parameters": {"rope_theta": -1.0}}, "rope_theta of rope must be a positive number, got -1.0"),
        (
            "mixtral",
            {"num_experts_per_tok": 100, "num_local_experts": 2},
            "num_experts_per_tok is 100, not an integer from 1 to 2",
        ),
        ("qwen2-moe", {"shared_expert_intermediate_size": "x"}, "shared_expert_intermediate_size is 'x'"),
        ("glm4-moe", {"n_group": 3, "topk_group": 2}, r"8 experts in 3 groups \(n_group\)"),
        ("glm4-moe", {"n_group": 4, "topk_group": 5}, "topk_group is 5, not an integer from 1 to 4"),
        ("glm4-moe", {"routed_scaling_factor": "x"}, "routed_scaling_factor is 'x', not a number"),
        ("smollm3", {"no_rope_layers": [7, 7, 7]}, "no_rope_layers"),
        ("mistral-window", {"sliding_window": "x"}, "sliding_window is 'x'"),
        ("gemma2", {"sliding_window": -5}, "sliding_window is -5"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 1e12}}, "partial_rotary_factor is 1000000000000.0"),
        (
            "phi3-longrope",
            {"rope_parameters": {"rope_type": "longrope", "long_factor": [None], "short_factor": [None]}},
            "wrong type",
        ),
        ("granite", {"embedding_multiplier": "x"}, "embedding_multiplier is 'x'"),
        ("gemma4", {"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1, and no layer before those"),
        ("gemma4-per-layer", {"num_kv_shared_layers": "x"}, "num_kv_shared_layers is 'x', of 6 layers"),
        ("gemma4-per-layer", {"vocab_size_per_layer_input": 256}, "vocab_size_per_layer_input 256 is less than"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 64}}}, "per_layer_config must have the same sizes"),
        ("gemma4", {"per_layer_config": {"2": {"sliding_window": 8}}}, "sliding_window in per_layer_config"),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": "x"}}}, "head_dim is 'x'"),
        ("hunyuan-moe", {"moe_topk": [3, 3, 2]}, r"moe_topk \[3, 3, 2\] is not supported; one number"),
        ("qwen3-5", {"layer_types": ["full_attention"] * 2 + ["mamba"]}, "layers of the type mamba are not supported"),
        ("qwen3-5", {"layer_types": ["linear_attention"] * 3}, "none of the 3 layers is full_attention"),
        ("qwen3-5", {"layer_types": ["full_attention"] * 2}, "describes 2 layers one by one, num_hidden_layers is 3"),
        ("qwen3-5", {"linear_num_value_heads": 3}, "3 heads of values in recurrent layers are no multiple of 2"),
        ("qwen3-next", {"linear_key_head_dim": 0}, "key_dim of a recurrent layer is 0"),
        ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported for LlamaForCausalLM"),
    ],
)
def test_a_wrong_value_is_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        read_config(FAMILIES[name] | change)


REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "n_shared_experts",
    "moe_num_experts",
    "moe_k",
    "moe_topk",
)


@pytest.mark.parametrize("switch", [{}, {"use_sliding_window": True, "max_window_layers": 2}], ids=["plain", "windows"])
@pytest.mark.parametrize("name", sorted({type(config).__name__: name for name, config in CONFIGS.items()}.values()))
def test_what_is_left_out_is_as_the_models_own_class_has_it(name: str, switch: dict[str, Any]) -> None:
    """Where config.json says no more than the sizes."""
    least = {key: FAMILIES[name][key] for key in REQUIRED if key in FAMILIES[name]} | {"num_hidden_layers": 7} | switch
    if name.startswith("granite4"):  # a model all of whose layers keep states is not read
        least |= {"layer_types": ["mamba"] * 6 + ["attention"]}
    architecture = {"architectures": FAMILIES[name]["architectures"]}
    found, expected = (
        read_config(least | architecture),
        read_config(type(CONFIGS[name])(**least).to_dict() | architecture),
    )
    for field in fields(found):
        if field.name != "ropes":
            assert getattr(found, field.name) == getattr(expected, field.name), field.name
    for rope, expected_rope in zip(found.ropes, expected.ropes, strict=True):
        assert torch.equal(rope.inv_freq, expected_rope.inv_freq) and rope.scale == expected_rope.scale


def test_alpha_of_a_dynamic_rope_is_hunyuans_alone() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0}
    for name in ("llama3", "hunyuan-dense"):
        plain, stretched = (
            read_config(FAMILIES[name] | {"rope_parameters": each}).ropes[0].inv_freq
            for each in (rope, rope | {"alpha": 50.0})
        )
        assert torch.equal(plain, stretched) == (name == "llama3")


def test_a_type_of_text_that_is_no_name_is_refused() -> None:
    config = FAMILIES["llama3"] | {"architectures": ["LlavaForConditionalGeneration"], "model_type": ["llama"]}
    with pytest.raises(StartupError, match="a text_config of the model_type .* is not supported here"):
        read_config(config)


NUMBERS = st.integers(-2, 70) | st.sampled_from([2**31 - 1, 2**40, 2**62, 10**400]) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each, max_size=2),
)


@given(st.data())
@examples(600)
def test_any_value_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    config = json.loads(json.dumps(FAMILIES[data.draw(st.sampled_from(sorted(FAMILIES)))]))
    change_one(config, data, VALUES)
    try:
        read_config(config)
    except StartupError as error:
        assert len(str(error)) > 20 and "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "recursion"),
        ('{"architectures": {"a": 1}, "vocab_size": 8}', "architectures is not a list of names"),
        ('{"architectures": [["x"]], "vocab_size": 8}', "architectures is not a list of names"),
    ],
)
def test_compute_ends_with_one_line_and_exit_code_2(text: str, message: str, tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(text)
    said = refused("services.compute", tmp_path, model=str(tmp_path), redis_url="redis://127.0.0.1:1/0")
    assert "Traceback" not in said
    [line] = [line for line in said.splitlines() if line.startswith("penstock: ")]
    assert message in line


def test_a_text_part_of_no_type_has_no_defaults(tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"model_type": ["x"], "vocab_size": 8}}')
    assert open_model(str(tmp_path)).vocab_size == 8
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match="vocab_size is not a positive number"):
        _ = open_model(str(tmp_path)).vocab_size
