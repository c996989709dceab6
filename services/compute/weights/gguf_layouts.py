"""Parameters of transformers' modules that a GGUF file has in another form: several tensors as one,
rows or columns in another order, or other values. What only has another name is in `gguf`'s own
table of names. Our own executor takes heads in the file's order, so for it only values differ.

llama.cpp's converter makes these forms, each for the sake of its kernels.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.model.gguf.reader import GgufHead

IN_LAYER = re.compile(r"\D*\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a parameter of a layer lies in a file."""

    tensors: tuple[str, ...]  # names in the layer; they are joined along the rows
    values: Callable[[Tensor, tuple[int, ...]], Tensor] | None = None  # of these and the shape; None: they stay
    rows: Callable[[GgufHead], Tensor] | None = None  # the place in the file of each row; None: the same
    columns: Callable[[GgufHead], Tensor] | None = None
    third: int | None = None  # of the one tensor's rows, which of three equal parts; None: all are of the parameter

    def part_of(self, num_rows: int) -> list[range] | None:
        """Its rows of a tensor that has so many; None: all."""
        size = num_rows // 3
        return None if self.third is None else [range(self.third * size, (self.third + 1) * size)]


def layouts_of(head: GgufHead, *, is_native: bool) -> dict[str, TensorLayout]:
    """Return a file's layouts, by a parameter's name in its layer. is_native: for our own executor."""
    architecture = head.text("general.architecture")
    if is_native:
        return NATIVE_LAYOUTS.get(architecture, {})
    is_dense = architecture == "granitehybrid" and not head.metadata.get("granitehybrid.expert_count")
    return _GRANITE_DENSE if is_dense else LAYOUTS.get(architecture, {})


def find_layout(layouts: dict[str, TensorLayout], name: str) -> tuple[TensorLayout, str] | None:
    """The layout of a parameter of that name, and what its tensors' names in the file begin with;
    None: it lies there as it is."""
    match = IN_LAYER.fullmatch(name)
    layout = layouts.get(match[2]) if match is not None else None
    return None if match is None or layout is None else (layout, f"blk.{match[1]}.")


def _logarithm(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Decay rates as their logarithms; files have -exp(A_log)."""
    return torch.log(-values).reshape(shape)


def _reshape(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return values.reshape(shape)


def _transpose(values: Tensor, shape: tuple[int, ...]) -> Tensor:  # noqa: ARG001
    return values.transpose(-2, -1)


def _delta_sizes(head: GgufHead) -> tuple[int, int, int, int]:
    """The sizes of Gated DeltaNet: heads of keys, their size, heads of values for each, their size."""
    prefix = f"{head.text('general.architecture')}.ssm."
    num_keys, num_values = head.number(prefix + "group_count"), head.number(prefix + "time_step_rank")
    size = head.number(prefix + "inner_size") // num_values
    return num_keys, head.number(prefix + "state_size"), num_values // num_keys, size


def _by_key(head: GgufHead, size: int) -> Tensor:
    """Places of the rows of heads of values. In a file, the first of each key's heads come first."""
    num_keys, _, per_key, _ = _delta_sizes(head)
    return torch.arange(per_key * num_keys * size).reshape(per_key, num_keys, size).transpose(0, 1).flatten()


def _of_value_heads(head: GgufHead) -> Tensor:
    return _by_key(head, 1)


def _of_values(head: GgufHead) -> Tensor:
    return _by_key(head, _delta_sizes(head)[3])


def _behind_queries_and_keys(head: GgufHead) -> Tensor:
    num_keys, size, _, _ = _delta_sizes(head)
    return torch.cat([torch.arange(2 * num_keys * size), 2 * num_keys * size + _of_values(head)])


def _of_each_key(head: GgufHead) -> Tensor:
    """Places of q, k, v and z of the first key's heads, of the second's, and so on. In a file, all q
    come first, then all k, v and z."""
    num_keys, size, per_key, value_size = _delta_sizes(head)
    sizes = [size, size, per_key * value_size, per_key * value_size]
    places = torch.split(torch.arange(num_keys * sum(sizes)), [num_keys * each for each in sizes])
    return torch.cat([each.view(num_keys, -1) for each in places], dim=1).flatten()


def _mamba(name: str) -> dict[str, TensorLayout]:
    """Mamba 2. name: of the module in a layer."""
    return {
        f"{name}.A_log": TensorLayout(("ssm_a",), _logarithm),
        f"{name}.D": TensorLayout(("ssm_d",), _reshape),
        f"{name}.dt_bias": TensorLayout(("ssm_dt.bias",)),
        f"{name}.conv1d.weight": TensorLayout(("ssm_conv1d.weight",), _reshape),
        f"{name}.norm.weight": TensorLayout(("ssm_norm.weight",), _reshape),
    }


_GRANITE_HYBRID = {
    **_mamba("mamba"),
    "block_sparse_moe.router.weight": TensorLayout(("ffn_gate_inp.weight",)),
    "shared_mlp.input_linear.weight": TensorLayout(("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
}
_GRANITE_DENSE = {
    **_mamba("mamba"),
    "shared_mlp.input_linear.weight": TensorLayout(("ffn_gate.weight", "ffn_up.weight")),
    "shared_mlp.output_linear.weight": TensorLayout(("ffn_down.weight",)),
}
_DELTA_VALUES = {
    "linear_attn.A_log": TensorLayout(("ssm_a",), _logarithm),
    "linear_attn.dt_bias": TensorLayout(("ssm_dt.bias",)),
    "linear_attn.conv1d.weight": TensorLayout(("ssm_conv1d.weight",), _reshape),
}
_QWEN35 = {
    "linear_attn.A_log": TensorLayout(("ssm_a",), _logarithm, _of_value_heads),
    "linear_attn.dt_bias": TensorLayout(("ssm_dt.bias",), rows=_of_value_heads),
    "linear_attn.conv1d.weight": TensorLayout(("ssm_conv1d.weight",), _reshape, _behind_queries_and_keys),
    "linear_attn.in_proj_qkv.weight": TensorLayout(("attn_qkv.weight",), rows=_behind_queries_and_keys),
    "linear_attn.in_proj_z.weight": TensorLayout(("attn_gate.weight",), rows=_of_values),
    "linear_attn.in_proj_a.weight": TensorLayout(("ssm_alpha.weight",), rows=_of_value_heads),
    "linear_attn.in_proj_b.weight": TensorLayout(("ssm_beta.weight",), rows=_of_value_heads),
    "linear_attn.out_proj.weight": TensorLayout(("ssm_out.weight",), columns=_of_values),
}
_LFM2 = {
    "conv.conv.weight": TensorLayout(("shortconv.conv.weight",), _reshape),
    "feed_forward.expert_bias": TensorLayout(("exp_probs_b.bias",)),
}
_NOMIC_BERT = {
    **{
        f"self_attn.{name}_proj.weight": TensorLayout(("attn_qkv.weight",), third=third)
        for third, name in enumerate("qkv")
    },
    "self_attn.o_proj.weight": TensorLayout(("attn_output.weight",)),
    **{f"mlp.{name}_proj.weight": TensorLayout((f"ffn_{name}.weight",)) for name in ("gate", "up", "down")},
    **{
        f"{name}.{part}": TensorLayout((f"{tensor}.{part}",))
        for name, tensor in (
            ("post_attention_layernorm", "attn_output_norm"),
            ("post_mlp_layernorm", "layer_output_norm"),
        )
        for part in ("weight", "bias")
    },
}
_NATIVE_LFM2 = {
    "conv.conv.weight": TensorLayout(("shortconv.conv.weight",), _reshape),
    "mlp.e_score_correction_bias": TensorLayout(("exp_probs_b.bias",)),
}
NATIVE_LAYOUTS = {
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), _DELTA_VALUES),
    **dict.fromkeys(("lfm2", "lfm2moe"), _NATIVE_LFM2),
    "ernie4_5-moe": {"mlp.gate.e_score_correction_bias": TensorLayout(("exp_probs_b.bias",), _reshape)},
    "granitehybrid": _mamba("mamba"),
}
# By architecture, and by a parameter's name in its layer
LAYOUTS: dict[str, dict[str, TensorLayout]] = {
    "ernie4_5-moe": {"mlp.gate.moe_statics.e_score_correction_bias": TensorLayout(("exp_probs_b.bias",), _reshape)},
    "falcon-h1": _mamba("mamba"),
    "gemma4": {
        "router.scale": TensorLayout(("ffn_gate_inp.scale",)),
        "router.per_expert_scale": TensorLayout(("ffn_down_exps.scale",)),
    },
    "gpt2": {
        name: TensorLayout((tensor,), _transpose)
        for name, tensor in (
            ("attn.c_attn.weight", "attn_qkv.weight"),
            ("attn.c_proj.weight", "attn_output.weight"),
            ("mlp.c_fc.weight", "ffn_up.weight"),
            ("mlp.c_proj.weight", "ffn_down.weight"),
        )
    },
    "granitehybrid": _GRANITE_HYBRID,
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "llama4": {
        "feed_forward.experts.gate_up_proj": TensorLayout(("ffn_gate_exps.weight", "ffn_up_exps.weight"), _transpose),
        "feed_forward.experts.down_proj": TensorLayout(("ffn_down_exps.weight",), _transpose),
    },
    "nemotron_h": _mamba("mixer"),
    "nemotron_h_moe": {
        **_mamba("mixer"),
        "mixer.experts.up_proj": TensorLayout(("ffn_up_exps.weight",)),
        "mixer.experts.down_proj": TensorLayout(("ffn_down_exps.weight",)),
    },
    "nomic-bert": _NOMIC_BERT,
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    "qwen3next": {
        **_DELTA_VALUES,
        "linear_attn.in_proj_qkvz.weight": TensorLayout(("attn_qkv.weight", "attn_gate.weight"), rows=_of_each_key),
    },
}
