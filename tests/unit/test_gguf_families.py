"""Which architectures of GGUF files are read, and how the others, and models with what none here
has, are refused: in one line that says why.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.model.gguf.config import make_config, make_generation_config
from shared.model.gguf.families import FAMILIES, LACKS, NEUTRAL, find_family
from shared.model.gguf.reader import GgufHead, TensorInfo
from shared.process.errors import StartupError

FILE = Path("some.gguf")


def head_of(architecture: str, **metadata: Any) -> GgufHead:
    """The least that a file of some layers says; keys without the architecture's name."""
    sizes = {
        "embedding_length": 64,
        "block_count": 8,
        "feed_forward_length": 128,
        "context_length": 512,
        "attention.head_count": 4,
    }
    values = {
        f"{architecture}.{key}": value
        for key, value in (sizes | {"attention.layer_norm_rms_epsilon": 1e-5} | metadata).items()
    }
    general = {"general.architecture": architecture, "tokenizer.ggml.tokens": ["a", "b"]}
    shapes = {
        "token_embd.weight": (2, 64),
        "blk.0.ffn_down_exps.weight": (6, 64, 40),
        "blk.0.ffn_gate_inp.weight": (6, 64),
    }
    return GgufHead(
        FILE, general | values, {name: TensorInfo(FILE, name, shape, 0, 0) for name, shape in shapes.items()}
    )


@pytest.mark.parametrize("architecture", [*LACKS, "unheard-of"])
def test_an_architecture_that_is_not_read_is_refused_by_name(architecture: str) -> None:
    with pytest.raises(StartupError) as caught:
        make_config(head_of(architecture))
    message = str(caught.value)
    assert (
        f"the GGUF architecture {architecture!r} is not supported" in message
        and "olmo2" in message
        and len(message.splitlines()) == 1
    )
    assert LACKS.get(architecture, "") in message and architecture not in FAMILIES


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("llama", "attention.clamp_kqv", 8.0),
        ("qwen3moe", "expert_gating_func", 2),
        ("qwen2moe", "expert_weights_scale", 2.5),
        ("llama", "logit_scale", 0.25),
        ("llama", "attention.temperature_scale", 0.1),
        ("qwen2", "expert_count", 8),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("qwen3", "attention.causal", False),
    ],
)
def test_what_would_change_every_answer_is_refused(architecture: str, key: str, value: Any) -> None:
    with pytest.raises(StartupError, match=rf"some.gguf: {architecture}.{key} is {value}; no model with it is read"):
        find_family(head_of(architecture, **{key: value}))
    for neutral in NEUTRAL[key]:
        find_family(head_of(architecture, **{key: neutral}))


@pytest.mark.parametrize("architecture", ["glm4moe", "lfm2moe", "llama4", "minimax-m2", "nemotron_h_moe"])
def test_experts_that_a_file_chooses_otherwise_than_the_class_are_refused(architecture: str) -> None:
    for same in (0, 2):
        find_family(head_of(architecture, expert_gating_func=same))
    find_family(head_of(architecture))
    for other in (1, 3, 4):
        with pytest.raises(StartupError, match=rf"{architecture}.expert_gating_func is {other}; .* those with 2 or 0"):
            find_family(head_of(architecture, expert_gating_func=other))


@pytest.mark.parametrize(("seeing", "text"), [("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"), ("qwen3vlmoe", "qwen3moe")])
def test_the_text_part_of_a_model_that_sees_is_a_text_model(seeing: str, text: str) -> None:
    more = {"expert_count": 6, "expert_used_count": 2} if text == "qwen3moe" else {}
    sections = {"rope.dimension_sections": [8, 12, 12, 0]}
    found, expected = make_config(head_of(seeing, **more, **sections)), make_config(head_of(text, **more))
    if seeing == "qwen2vl":  # whose images we see
        expected["rope_parameters"]["mrope_section"] = [8, 12, 12]
    assert found == expected


def test_an_old_mixture_says_less_of_itself() -> None:
    """The width of the experts is that of their tensors; layers without a router have a plain MLP."""
    config = make_config(head_of("qwen3moe", expert_count=6, expert_used_count=2))
    assert (config["moe_intermediate_size"], config["num_experts"], config["num_experts_per_tok"]) == (40, 6, 2)
    assert config["mlp_only_layers"] == list(range(1, 8))
    head = head_of("llama", expert_count=6, expert_used_count=2)
    del head.tensors["blk.0.ffn_down_exps.weight"]
    with pytest.raises(StartupError, match="no tensors of experts"):
        make_config(head)


def test_an_end_of_a_message_ends_no_answer_of_gpt_oss() -> None:
    names, control = ["a", "<|end|>", "<|return|>", "<|call|>"], 3
    head = head_of("gpt-oss")
    head.metadata.update(
        {
            "tokenizer.ggml.tokens": names,
            "tokenizer.ggml.token_type": [1, control, control, control],
            "tokenizer.ggml.eot_token_id": 1,
        }
    )
    head.tensors["token_embd.weight"] = replace(head.tensors["token_embd.weight"], shape=(4, 64))
    assert make_generation_config(head)["eos_token_id"] == [2, 3]
    head.metadata["tokenizer.ggml.tokens"] = ["a", "<|end|>", "b", "c"]  # Phi's
    assert make_generation_config(head)["eos_token_id"] == [1]


def test_windows_are_by_a_list_or_by_a_period() -> None:
    pattern = [True, True, False, True, True, True, True, False]
    for key in ({"attention.sliding_window_pattern": pattern}, {"attention.sliding_window_pattern": 3}, {}):
        found = make_config(head_of("olmo2", **{"attention.sliding_window": 24, **key}))
        expected = (
            pattern
            if key.get("attention.sliding_window_pattern") == pattern
            else [(number + 1) % (3 if key else 4) != 0 for number in range(8)]
        )
        assert [kind == "sliding_attention" for kind in found["layer_types"]] == expected and found[
            "architectures"
        ] == ["Olmo3ForCausalLM"]
    with pytest.raises(StartupError, match="has 1 items for 8 layers"):
        make_config(head_of("exaone4", **{"attention.sliding_window": 24, "attention.sliding_window_pattern": [True]}))


def test_ministral_scales_queries_by_position_and_mistral_small_does_not() -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 64}
    found = make_config(head_of("mistral3", **yarn, **{"attention.temperature_scale": 0.1}))
    assert found["architectures"] == ["Ministral3ForCausalLM"]
    expected = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64, "factor": 16.0}
    assert expected.items() <= found["rope_parameters"].items()
    assert make_config(head_of("mistral3"))["architectures"] == ["LlamaForCausalLM"]


def test_layers_that_foresee_tokens_are_no_layers_of_the_model() -> None:
    more = {"expert_count": 6, "expert_used_count": 2, "nextn_predict_layers": 1}
    assert make_config(head_of("glm4moe", **more))["num_hidden_layers"] == 7
    with pytest.raises(StartupError, match="all glm4moe.block_count layers are glm4moe.nextn_predict_layers"):
        make_config(head_of("glm4moe", **more | {"nextn_predict_layers": 8}))


def test_the_kind_of_a_layer_follows_from_its_heads() -> None:
    sizes = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2] * 4}
    assert make_config(head_of("lfm2", **sizes))["layer_types"] == ["conv", "full_attention"] * 4
    with pytest.raises(StartupError, match="lfm2.attention.head_count_kv has 2 items for 8 layers"):
        make_config(head_of("lfm2", **sizes | {"attention.head_count_kv": [0, 2]}))
    with pytest.raises(StartupError, match=r"the metadata has no lfm2.shortconv.l_cache"):
        make_config(head_of("lfm2", **{"attention.head_count_kv": [0, 2] * 4}))
    state = {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.inner_size": 128}
    widths = {"attention.head_count_kv": [0, 0, 0, 2] * 2, "feed_forward_length": [0, 128, 0, 0] * 2}
    found = make_config(head_of("nemotron_h", **state, **widths, **{"ssm.time_step_rank": 8}))
    assert found["layers_block_type"] == ["linear_attention", "mlp", "linear_attention", "full_attention"] * 2
    with pytest.raises(StartupError, match="of 6 heads in 2 groups, which do not divide it"):
        make_config(head_of("nemotron_h", **state, **widths, **{"ssm.time_step_rank": 6}))


def test_smollm3s_layers_that_do_not_rotate_follow_from_their_number() -> None:
    assert make_config(head_of("smollm3"))["no_rope_layers"] == [1, 1, 1, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("architecture", "key", "value", "says"),
    [
        ("llama", "rope.dimension_count", 2**31 - 1, "RoPE turns 2147483647 of 16 dimensions"),
        ("qwen2", "rope.freq_base", 0.0, "by powers of 0"),
        ("llama", "attention.layer_norm_rms_epsilon", -1.0, "epsilon is -1"),
        ("glm4", "rope.dimension_sections", [8, 12, 12, 0], "no model with it is read"),
        ("deepseek2", "expert_gating_func", 3, "expert_gating_func is 3"),
        ("deepseek2", "expert_weights_norm", True, "chosen by softmax, is not supported"),
    ],
)
def test_numbers_that_no_model_has_are_one_line(architecture: str, key: str, value: Any, says: str) -> None:
    more = (
        {
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_shared_count": 1,
            "rope.dimension_count": 8,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.kv_lora_rank": 8,
        }
        if architecture == "deepseek2"
        else {}
    )
    make_config(head_of(architecture, **more))
    with pytest.raises(StartupError, match=says):
        make_config(head_of(architecture, **more | {key: value}))
