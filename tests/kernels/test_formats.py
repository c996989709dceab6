"""Quantized checkpoints of every format against transformers with the weights that they mean:
tokens, logits, and how the weights are kept.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Ernie4_5Config, Ernie4_5ForCausalLM

from tests.kernels.families import Engine, assert_greedy
from tests.kernels.quantized import (
    CONFIG,
    Writer,
    awq,
    compressed,
    float8,
    four_bit_floats,
    gptq,
    integers,
    layers_only,
    llm_int8,
    packed,
    scheme,
    write_checkpoint,
)
from tests.kernels.test_models import prompts

AS_THEY_ARE, ACT_ORDER, ROUNDED = (
    "kept as they are",
    "dense, for their groups are not of neighbouring inputs (act-order)",
    "dense, for float16 would round their scales",
)
NO_TABLE, IN_FP8 = "dense, for their tables are not of integers", "in FP8"
NUM_TOKENS = 16
NUM_MATRICES = 7 * CONFIG.num_hidden_layers


@dataclass(frozen=True)
class Case:
    writer_of: Callable[[str], Writer | None]
    config: dict[str, Any] | None
    description: str
    kept: dict[str, int]


def every(writer: Writer, config: dict[str, Any], description: str, how: str = AS_THEY_ARE) -> Case:
    """All layers but the LM head by one writer."""
    return Case(layers_only(writer), config, description, {how: NUM_MATRICES})


def every_compressed(
    writer: Writer, layout: str, description: str, how: str = AS_THEY_ARE, *, bits: int = 8, **options: Any
) -> Case:
    strategy = options.pop("strategy", "group")
    return every(
        writer, compressed(scheme(bits, strategy, **options), layout=layout), f"compressed-tensors, {description}", how
    )


def awq_config(group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True, **more}


def gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
        **more,
    }


def auto_round_config(packing: str, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 64,
        "sym": True,
        "data_type": "int",
        "packing_format": packing,
        **more,
    }


def without(names: tuple[str, ...], writer: Writer) -> Callable[[str], Writer | None]:
    return lambda name: None if name.endswith(names) else writer


def by_name(choices: dict[str, Writer | None], other: Writer) -> Callable[[str], Writer | None]:
    """The first choice that is a part of the layer's name."""
    return lambda name: next((writer for part, writer in choices.items() if part in name), other)


def fp8_config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **more}


BNB4: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
}
BNB8: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": False,
    "load_in_8bit": True,
    "llm_int8_skip_modules": None,
}
MIXED = compressed(
    scheme(8, "channel", targets=("re:.*mlp.*",)),
    scheme(4, "group", group=32, targets=("Linear",)),
    scheme(8, "channel", kind="float", targets=("model.layers.0.mlp.up_proj",)),
    layout="mixed-precision",
    ignore=("lm_head", "re:.*layers[.]1[.]self_attn[.][qk]_proj"),
)
DYNAMIC = {"+:.*down_proj": {"bits": 8, "group_size": 32}, "-:.*layers\\.0\\.self_attn.*": {}}
EXTRA = {"model.layers.0.self_attn.o_proj": {"bits": 16}, ".*down_proj": {"bits": 8}}

CASES: dict[str, Case] = {
    "awq-32": every(awq(32), awq_config(32), "AWQ, 4 bits in groups of 32"),
    "awq-64": every(awq(64), awq_config(64), "AWQ, 4 bits in groups of 64"),
    "awq-128": every(awq(128), awq_config(128), "AWQ, 4 bits in groups of 128"),
    "awq-16": every(awq(16), awq_config(16), "AWQ, 4 bits in groups of 16"),
    "awq-row": every(awq(-1), awq_config(-1), "AWQ, 4 bits by column"),
    "awq-head": Case(
        without((), awq(64)), awq_config(64), "AWQ, 4 bits in groups of 64", {AS_THEY_ARE: NUM_MATRICES + 1}
    ),
    "awq-skip": Case(
        without(("lm_head", "down_proj"), awq(64)),
        awq_config(64, modules_to_not_convert=["down_proj"]),
        "AWQ, 4 bits in groups of 64",
        {AS_THEY_ARE: NUM_MATRICES - CONFIG.num_hidden_layers},
    ),
    "awq-bfloat16-scales": every(awq(64, torch.bfloat16), awq_config(64), "AWQ, 4 bits in groups of 64"),
    "awq-float32-scales": every(awq(64, torch.float32), awq_config(64), "AWQ, 4 bits in groups of 64", ROUNDED),
    "awq-tiny-scales": every(awq(64, torch.bfloat16, 2.0**-18), awq_config(64), "AWQ, 4 bits in groups of 64", ROUNDED),
    "gptq-sym": every(gptq(4, 64, symmetric=True), gptq_config(4, 64), "GPTQ, 4 bits in groups of 64"),
    "gptq-asym": every(gptq(4, 128, symmetric=False), gptq_config(4, 128, sym=False), "GPTQ, 4 bits in groups of 128"),
    "gptq-v2-sym": every(
        gptq(4, 32, symmetric=True, version=2),
        gptq_config(4, 32, checkpoint_format="gptq_v2"),
        "GPTQ, 4 bits in groups of 32",
    ),
    "gptq-v2-asym": every(
        gptq(4, 64, symmetric=False, version=2),
        gptq_config(4, 64, sym=False, format="gptq_v2", checkpoint_format=None),
        "GPTQ, 4 bits in groups of 64",
    ),
    "gptq-no-g_idx": every(
        gptq(4, 64, symmetric=True, has_g_idx=False), gptq_config(4, 64), "GPTQ, 4 bits in groups of 64"
    ),
    "gptq-row": every(gptq(4, -1, symmetric=True), gptq_config(4, -1), "GPTQ, 4 bits by column"),
    "gptq-act-order": every(
        gptq(4, 64, symmetric=False, act_order=True),
        gptq_config(4, 64, sym=False, desc_act=True),
        "GPTQ, 4 bits in groups of 64",
        ACT_ORDER,
    ),
    "gptq-act-order-8": every(
        gptq(8, 32, symmetric=True, act_order=True),
        gptq_config(8, 32, desc_act=True),
        "GPTQ, 8 bits in groups of 32",
        ACT_ORDER,
    ),
    "gptq-2": every(gptq(2, 32, symmetric=False), gptq_config(2, 32, sym=False), "GPTQ, 2 bits in groups of 32"),
    "gptq-8": every(gptq(8, 128, symmetric=True), gptq_config(8, 128), "GPTQ, 8 bits in groups of 128"),
    "gptq-8-asym": every(gptq(8, 64, symmetric=False), gptq_config(8, 64, sym=False), "GPTQ, 8 bits in groups of 64"),
    "gptq-8-row": every(gptq(8, -1, symmetric=True), gptq_config(8, -1), "GPTQ, 8 bits by column"),
    "gptq-dynamic": Case(
        by_name(
            {"lm_head": None, "layers.0.self_attn": None, "down_proj": gptq(8, 32, symmetric=True)},
            gptq(4, 64, symmetric=True),
        ),
        gptq_config(4, 64, dynamic=DYNAMIC),
        "GPTQ, 4 bits in groups of 64",
        {AS_THEY_ARE: NUM_MATRICES - 4},
    ),
    "auto-round": every(
        gptq(4, 64, symmetric=False, version=2),
        auto_round_config("auto_round", sym=False),
        "GPTQ, 4 bits in groups of 64",
    ),
    "auto-round-gptq": every(
        gptq(4, 64, symmetric=True), auto_round_config("auto_round:auto_gptq"), "GPTQ, 4 bits in groups of 64"
    ),
    "auto-round-awq": every(awq(64), auto_round_config("auto_round:auto_awq"), "AWQ, 4 bits in groups of 64"),
    "auto-round-extra": Case(
        by_name(
            {"lm_head": None, "layers.0.self_attn.o_proj": None, "down_proj": gptq(8, 64, symmetric=True)},
            gptq(4, 64, symmetric=True),
        ),
        auto_round_config("auto_round:auto_gptq", extra_config=EXTRA),
        "GPTQ, 4 bits in groups of 64",
        {AS_THEY_ARE: NUM_MATRICES - 1},
    ),
    "int8-channel": every_compressed(integers(8, "channel"), "int-quantized", "8 bits by column", strategy="channel"),
    "int8-tensor": every_compressed(integers(8, "tensor"), "int-quantized", "8 bits by column", strategy="tensor"),
    "int8-asym": every_compressed(
        integers(8, "channel", symmetric=False),
        "int-quantized",
        "8 bits by column with zero points",
        strategy="channel",
        symmetric=False,
    ),
    "int4-unpacked": every_compressed(
        integers(4, "group", group=64), "int-quantized", "4 bits in groups of 64", bits=4, group=64
    ),
    "w4a16-group": every_compressed(packed(4, 128), "pack-quantized", "4 bits in groups of 128", bits=4, group=128),
    "w4a16-asym": every_compressed(
        packed(4, 32, symmetric=False),
        "pack-quantized",
        "4 bits in groups of 32 with zero points",
        bits=4,
        group=32,
        symmetric=False,
    ),
    "w4a16-channel": every_compressed(packed(4, -1), "pack-quantized", "4 bits by column", bits=4, strategy="channel"),
    "w4a16-act-order": every_compressed(
        packed(4, 64, act_order=True), "pack-quantized", "4 bits in groups of 64", ACT_ORDER, bits=4, group=64
    ),
    "w2a16": every_compressed(packed(2, 32), "pack-quantized", "2 bits in groups of 32", bits=2, group=32),
    "w8a16": every_compressed(packed(8, 64), "pack-quantized", "8 bits in groups of 64", group=64),
    "w8a16-asym": every_compressed(
        packed(8, 32, symmetric=False),
        "pack-quantized",
        "8 bits in groups of 32 with zero points",
        group=32,
        symmetric=False,
    ),
    "w8a16-float32-scales": every_compressed(
        packed(8, 64, dtype=torch.float32), "pack-quantized", "8 bits in groups of 64", ROUNDED, group=64
    ),
    "float-tensor": every_compressed(
        float8("one"), "float-quantized", "FP8 by tensor", IN_FP8, kind="float", strategy="tensor"
    ),
    "float-channel": every_compressed(
        float8("channel", dtype=torch.bfloat16),
        "float-quantized",
        "FP8 by channel",
        IN_FP8,
        kind="float",
        strategy="channel",
    ),
    "float-block": every_compressed(
        float8("block"), "float-quantized", "FP8 by block", IN_FP8, kind="float", strategy="block"
    ),
    "mixed": Case(
        by_name(
            {
                "lm_head": None,
                "1.self_attn.q_proj": None,
                "1.self_attn.k_proj": None,
                "0.mlp.up_proj": float8("channel"),
                "mlp": integers(8, "channel"),
            },
            packed(4, 32),
        ),
        MIXED,
        "compressed-tensors, 8 bits by column and 4 bits in groups of 32 and FP8 by channel",
        {AS_THEY_ARE: NUM_MATRICES - 3, IN_FP8: 1},
    ),
    "fp8-block": every(
        float8("block", scale_name="weight_scale_inv"), fp8_config(weight_block_size=[128, 128]), "FP8", IN_FP8
    ),
    "fp8-uneven-block": every(
        float8("block", scale_name="weight_scale_inv", block=(48, 80)),
        fp8_config(weight_block_size=[48, 80]),
        "FP8",
        IN_FP8,
    ),
    "fp8-tensor": every(float8("tensor"), fp8_config(), "FP8", IN_FP8),
    "fp8-tensor-inv": every(float8("one", scale_name="weight_scale_inv"), fp8_config(), "FP8", IN_FP8),
    "fp8-channel": every(
        float8("channel"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "FP8", IN_FP8
    ),
    "nf4": every(four_bit_floats("nf4", 64, nested=False), BNB4, "bitsandbytes, 4 bits", NO_TABLE),
    "nf4-double": every(four_bit_floats("nf4", 64, nested=True), BNB4, "bitsandbytes, 4 bits", NO_TABLE),
    "nf4-in-bfloat16": every(
        four_bit_floats("nf4", 128, nested=True, storage=torch.bfloat16), BNB4, "bitsandbytes, 4 bits", NO_TABLE
    ),
    "nf4-across-rows": every(four_bit_floats("nf4", 512, nested=False), BNB4, "bitsandbytes, 4 bits", NO_TABLE),
    "fp4": every(
        four_bit_floats("fp4", 64, nested=False),
        BNB4 | {"bnb_4bit_quant_type": "fp4"},
        "bitsandbytes, 4 bits",
        NO_TABLE,
    ),
    "llm-int8": every(llm_int8, BNB8, "bitsandbytes, 8 bits"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_computes_what_its_weights_mean(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In float32 the tokens are transformers', in bfloat16 on native code the logits after each
    prompt are close to its (root mean square).
    """
    case = CASES[name]
    reference = write_checkpoint(tmp_path, case.writer_of, case.config)
    with caplog.at_level(logging.INFO, "penstock"):
        engine = Engine(tmp_path)
    kept = "; ".join(f"{count} {how}" for how, count in case.kept.items())
    assert f"the checkpoint is quantized format={case.description!r} matrices={kept!r}" in caplog.text.replace(
        "format=FP8", "format='FP8'"
    )
    some = prompts(3, CONFIG.vocab_size)
    generated = engine.generate(some, NUM_TOKENS)
    native = Engine(tmp_path, dtype=torch.bfloat16)
    native.generate(some, 1)
    for number, (prompt, tokens) in enumerate(zip(some, generated, strict=True)):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()
        torch.testing.assert_close(torch.stack(engine.logits[number]), logits, atol=1e-4, rtol=1e-4)
        error = (native.logits[number][0] - logits[0]).pow(2).mean().sqrt() / logits[0].pow(2).mean().sqrt()
        assert error < 0.08


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["awq-32", "gptq-8-asym", "llm-int8", "fp8-channel", "fp8-block", "fp8-uneven-block"])
def test_q_and_k_whose_neighbours_rotate_are_rearranged_in_their_form(name: str, tmp_path: Path) -> None:
    """In float32 tokens and logits are transformers'; in bfloat16 as good as those of other families."""
    meant = write_checkpoint(tmp_path, CASES[name].writer_of, CASES[name].config)
    reference = Ernie4_5ForCausalLM(Ernie4_5Config.from_dict(CONFIG.to_dict())).eval()
    reference.load_state_dict(meant.state_dict())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Ernie4_5ForCausalLM"]}))
    some = prompts(3, CONFIG.vocab_size)
    assert_greedy(Engine(tmp_path), reference, some, NUM_TOKENS)
    native = Engine(tmp_path, dtype=torch.bfloat16)
    native.generate(some, 1)
    for number, prompt in enumerate(some):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt])).logits[0, -1]
        assert (native.logits[number][0] - logits).norm() < 0.08 * logits.norm()
