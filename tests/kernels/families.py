"""Tiny random models of every supported family, as transformers writes them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    InternLM3Config,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from services.compute.backends.choose import choose_backend
from services.compute.backends.torch.recurrent import LOG_LENGTH
from services.compute.cache.block_manager import BlockManager
from services.compute.cache.kv_cache import KVCache
from services.compute.cache.state_slots import StateSlots
from services.compute.candidates.prompt_logprobs import prompt_logprobs as prompt_logprobs_of
from services.compute.candidates.prompt_logprobs import score_prompts
from services.compute.execution.model_runner import Model, ModelRunner
from services.compute.models.architectures import read_config
from services.compute.models.config import Packed
from services.compute.models.decoder import Decoder
from services.compute.models.transformers_model import load_transformers_model
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.offline import run_step
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import ScheduledBatch
from services.compute.weights.library_modules import load_library_modules
from services.compute.weights.loader import load_weights
from shared.model.files import DEMO_MODEL, ModelFiles, text_config
from shared.model.sampling_params import SamplingParams
from shared.model.segments import Segment, layout_of
from shared.model.vision.images import PlacedPrompt
from shared.wire.logprobs import PromptLogprobs
from tests.kernels.backends import CPU

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0,  # noqa: E501
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0 + 0.05 * i for i in range(16)],
    "long_factor": [1.5 + 0.5 * i for i in range(16)],
}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 500.0}
LOCAL_AND_GLOBAL = ["sliding_attention", "sliding_attention", "full_attention"]
MIXTURE: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
GEMMA: dict[str, Any] = SIZES | {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 20}

GATED_DELTA_NET: dict[str, Any] = {
    "head_dim": 128,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
GATED_MIXTURE = MIXTURE | {"num_experts": 8, "shared_expert_intermediate_size": 72}
# with layers that keep states in place of keys and values
HYBRIDS: dict[str, PretrainedConfig] = {
    "qwen3-5": Qwen3_5TextConfig(**SIZES, **GATED_DELTA_NET),
    "qwen3-5-moe": Qwen3_5MoeTextConfig(
        **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
        **GATED_DELTA_NET,
        **GATED_MIXTURE,
    ),
    # of sizes that the native kernels do not know
    "qwen3-next": Qwen3NextConfig(
        **SIZES, **GATED_DELTA_NET | {"head_dim": 32, "linear_value_head_dim": 24}, **GATED_MIXTURE, mlp_only_layers=[1]
    ),
    "granite4-h": GraniteMoeHybridConfig(
        **SIZES,
        layer_types=["mamba", "attention", "mamba"],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=16,
        num_local_experts=4,
        shared_intermediate_size=48,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
        logits_scaling=2.5,
        time_step_limit=(0.4, 1.2),
    ),
    "granite4-dense": GraniteMoeHybridConfig(
        **SIZES | WIDE_HEADS,
        layer_types=["mamba", "attention", "mamba"],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=48,
        residual_multiplier=0.4,
        position_embedding_type="rope",
    ),
    "lfm2": Lfm2Config(**SIZES | WIDE_HEADS, layer_types=["conv", "full_attention", "conv"], block_multiple_of=32),
    "lfm2-moe": Lfm2MoeConfig(
        **SIZES, **MIXTURE, layer_types=["conv", "full_attention", "conv"], num_experts=8, num_dense_layers=1
    ),
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama2": LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama-linear": LlamaConfig(**SIZES, rope_parameters=LINEAR_ROPE, attention_bias=True, mlp_bias=True),
    "llama-heads": LlamaConfig(**SIZES, head_dim=32),
    "llama-yarn": LlamaConfig(
        **SIZES, rope_parameters=YARN_ROPE | {"mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}
    ),
    "internlm3": InternLM3Config(
        **SIZES,
        qkv_bias=True,
        bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 6.0},
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=32),
    "mistral-window": MistralConfig(**SIZES, sliding_window=24, head_dim=32),
    "ministral": MinistralConfig(**SIZES, sliding_window=24, head_dim=32, layer_types=LOCAL_AND_GLOBAL),
    "ministral3": Ministral3Config(
        **SIZES,
        head_dim=32,
        rope_parameters=YARN_ROPE | {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.3},
    ),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-yarn": Qwen2Config(**SIZES, rope_parameters=YARN_ROPE),
    "qwen2-window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "exaone4": Exaone4Config(**SIZES, head_dim=32, sliding_window=24, layer_types=LOCAL_AND_GLOBAL),
    "exaone4-full": Exaone4Config(**SIZES, sliding_window=None, layer_types=["full_attention"] * 3),
    "mixtral": MixtralConfig(**SIZES, head_dim=32, num_local_experts=6, num_experts_per_tok=2, sliding_window=None),
    "qwen2-moe": Qwen2MoeConfig(
        **SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1},
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=72,
        mlp_only_layers=[1],
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True
    ),
    "glm4-moe": Glm4MoeConfig(
        **SIZES,
        head_dim=32,
        **MIXTURE,
        use_qk_norm=True,
        n_routed_experts=8,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
    ),
    "dots1": Dots1Config(
        **SIZES, head_dim=32, **MIXTURE, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1
    ),
    "ernie4-5": Ernie4_5Config(**SIZES, head_dim=32, use_bias=True),
    "ernie4-5-moe": Ernie4_5_MoeConfig(
        **SIZES, head_dim=32, moe_intermediate_size=40, moe_k=3, moe_num_experts=8, moe_num_shared_experts=1
    ),
    "exaone-moe": ExaoneMoeConfig(
        **SIZES, head_dim=32, **MIXTURE, num_experts=8, sliding_window=24, layer_types=LOCAL_AND_GLOBAL
    ),
    "hunyuan-dense": HunYuanDenseV1Config(
        **SIZES,
        head_dim=32,
        attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
    ),
    "hunyuan-moe": HunYuanMoEV1Config(**SIZES, head_dim=32, num_experts=8, moe_topk=3),
    "minimax-m2": MiniMaxM2Config(
        **SIZES,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "olmoe": OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=3),
    "gpt-oss": GptOssConfig(
        **SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1},
        head_dim=32,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=24,
        rope_parameters=YARN_ROPE | {"truncate": False},
    ),
    "gemma": GemmaConfig(**SIZES | {"num_key_value_heads": 1}, head_dim=32),
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=8.0),
    "gemma3": Gemma3TextConfig(
        **GEMMA,
        layer_types=LOCAL_AND_GLOBAL,
        rope_parameters={"full_attention": LINEAR_ROPE, "sliding_attention": LOCAL_ROPE},
    ),
    "gemma4": Gemma4TextConfig(
        **SIZES,
        head_dim=32,
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=24,
        layer_types=LOCAL_AND_GLOBAL,
        final_logit_softcapping=8.0,
    ),
    "gemma4-moe": Gemma4TextConfig(
        **SIZES,
        head_dim=32,
        global_head_dim=64,
        hidden_size_per_layer_input=0,
        sliding_window=24,
        layer_types=LOCAL_AND_GLOBAL,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=40,
    ),
    "gemma4-per-layer": Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 6},
        head_dim=32,
        global_head_dim=64,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=512,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        sliding_window=24,
        layer_types=LOCAL_AND_GLOBAL * 2,
    ),
    "gemma4-unified": Gemma4UnifiedTextConfig(
        **SIZES, head_dim=32, global_head_dim=96, sliding_window=24, layer_types=LOCAL_AND_GLOBAL
    ),
    "granite": GraniteConfig(
        **SIZES,
        head_dim=32,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
        logits_scaling=2.5,
        attention_bias=True,
    ),
    "olmo2": Olmo2Config(**SIZES, head_dim=32),
    "olmo3": Olmo3Config(
        **SIZES,
        head_dim=32,
        sliding_window=24,
        layer_types=LOCAL_AND_GLOBAL,
        rope_parameters={"full_attention": YARN_ROPE, "sliding_attention": LOCAL_ROPE},
    ),
    "phi3": Phi3Config(**SIZES, sliding_window=24),
    "phi3-longrope": Phi3Config(
        **SIZES | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
        original_max_position_embeddings=64,
        rope_parameters=LONG_ROPE,
    ),
    **HYBRIDS,
    "seed-oss": SeedOssConfig(**SIZES, head_dim=32),
    "smollm3": SmolLM3Config(**SIZES, head_dim=32, no_rope_layers=[1, 0, 1]),
    "smollm3-window": SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=24),
}


def reference_model(
    name: str, folder: Path, *, shard: str = "50GB", config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """transformers' model of this name in CONFIGS, or of another config; in float32, saved to
    `folder` on the way. `demo` is the demo model.
    """
    if name == "demo":
        return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config or CONFIGS[name], dtype=torch.float32, attn_implementation="eager")
    for (
        parameter_name,
        parameter,
    ) in model.named_parameters():  # spread out: with the usual 0.02 all logits are nearly equal
        if "norm" in parameter_name:
            is_shifted = name in ("gemma", "gemma2", "gemma3")
            torch.nn.init.normal_(parameter, mean=0.0 if is_shifted else 1.0, std=0.1)
        else:
            torch.nn.init.normal_(parameter, std=0.12)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, std=0.2)
        if buffer_name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=shard)
    return model.eval()


class Engine:
    """Scheduler, runner and greedy decisions in one place: compute's loop without Redis. Of another
    engine it takes the loaded model, and nothing else.
    """

    runner: ModelRunner

    def __init__(
        self,
        model: "Path | ModelFiles | Engine",
        *,
        block_size: int = 16,
        num_blocks: int = 256,
        max_num_seqs: int = 64,
        max_batched_tokens: int = 512,
        strategy: str = "predicted",
        dtype: torch.dtype = torch.float32,
        quantization: str = "none",
        attention_output: bool = False,
        lm_head: bool = False,
        kv_group: int = 0,
        max_model_len: int | None = None,
        model_impl: str = "native",
    ) -> None:
        backend = choose_backend(dtype, CPU)
        executor: Model
        if isinstance(model, Engine):
            executor = model.runner.model
        elif model_impl == "native":
            location, found = (
                (model.weights, model.config)
                if isinstance(model, ModelFiles)
                else (model, json.loads((model / "config.json").read_text()))
            )
            config = read_config(text_config(found), max_model_len)
            quantized: dict[str, Any] = {
                "quantization": quantization,
                "attention_output": attention_output,
                "lm_head": lm_head,
            }
            executor = Decoder(config, load_weights(location, config, backend, **quantized), backend)
        else:
            folder = model.folder if isinstance(model, ModelFiles) else model
            weights = model.weights if isinstance(model, ModelFiles) else model
            load = partial(load_library_modules, weights, backend, Packed(quantization, 32, attention_output, lm_head))
            executor = load_transformers_model(folder, backend, max_model_len or SIZES["max_position_embeddings"], load)
        cache = KVCache(executor.config, executor.backend, num_blocks=num_blocks, block_size=block_size, group=kv_group)
        self.runner: ModelRunner = ModelRunner(executor, cache, num_slots=max_num_seqs)
        self.row_search = backend.row_search
        log_length = LOG_LENGTH if isinstance(executor, Decoder) else 0
        slots = StateSlots(max_num_seqs, log_length) if executor.state_bytes else None
        blocks = BlockManager(num_blocks, block_size, slots=slots)
        self.scheduler = Scheduler(
            blocks,
            make_admission(strategy, blocks),
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
        )
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.prompts: dict[int, PromptLogprobs | None] = {}
        self.num_scored = 0  # rows of prompts that were reduced

    def generate(
        self,
        prompts: list[list[int]],
        num_tokens: int,
        *,
        eos: int | None = None,
        group_id: str | None = None,
        prompt_logprobs: int | None = None,
        segments: list[tuple[Segment, ...]] | None = None,
        images: list[PlacedPrompt] | None = None,
        sees_whole_images: bool = False,
    ) -> list[list[int]]:
        """Greedy continuations; keeps each sequence's rows of logits in `self.logits`, by its
        number, and its prompt's logprobs in `self.prompts`.

        With a group_id the prompts are one prompt's choices; the first token of the i-th is the
        i-th best. segments, images: of each prompt.
        """
        params = SamplingParams(max_tokens=num_tokens, prompt_logprobs=prompt_logprobs)
        layouts = [layout_of(each, self.scheduler.block_manager.block_size) for each in segments or [()] * len(prompts)]
        placed = [layout.pad(prompt) for prompt, layout in zip(prompts, layouts, strict=True)]
        requests = [
            Request(number, str(number), params, group_id=group_id, layout=layout)
            for number, layout in enumerate(layouts)
        ]
        if images:
            requests = [
                replace(
                    request,
                    images=seen.runs,
                    positions=seen.positions,
                    position_shift=seen.position_shift,
                    sees_whole_images=sees_whole_images,
                )
                for request, seen in zip(requests, images, strict=True)
            ]
        sequences = [Sequence(request, Tokens(prompt)) for request, prompt in zip(requests, placed, strict=True)]
        self.logits = {sequence.handle: [] for sequence in sequences}
        for sequence in sequences:
            self.scheduler.add(sequence)

        def decide(batch: ScheduledBatch, sampled: list[Sequence]) -> Iterator[int]:
            hidden = self.runner.run(batch)
            assert (
                score_prompts(self.runner.prompt_logits(batch, hidden), batch, self.scheduler.get, self.row_search)
                == {}
            )
            self.num_scored += sum(len(row.target_ids) for row in batch.rows)
            for sequence, row in zip(sampled, self.runner.logits(batch, hidden), strict=True):
                if sequence.tokens.num_output == 0:
                    self.prompts[sequence.handle] = prompt_logprobs_of(sequence)
                self.logits[sequence.handle].append(row.clone())
                is_first_choice = group_id is None or sequence.tokens.num_output > 0
                yield int(row.argmax() if is_first_choice else row.argsort(descending=True)[sequence.handle])

        def is_over(sequence: Sequence) -> bool:
            return sequence.tokens.num_output == num_tokens or sequence.tokens.ids[-1] == eos

        while self.scheduler.num_unfinished:
            assert run_step(self.scheduler, decide, is_over=is_over) is not None
        assert self.scheduler.block_manager.num_free_blocks == self.scheduler.block_manager.num_blocks
        return [sequence.tokens.ids[sequence.tokens.num_prompt :] for sequence in sequences]


@torch.inference_mode()
def assert_greedy(engine: Engine, reference: PreTrainedModel, prompts: list[list[int]], num_tokens: int) -> None:
    """The engine's tokens, of a batch, are those of the reference's greedy generation, and its logits are near.

    One pass of the reference over a whole sequence says both: where every token has the largest of
    the logits before it, one by one gives the same tokens.
    """
    for number, (prompt, tokens) in enumerate(zip(prompts, engine.generate(prompts, num_tokens), strict=True)):
        logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()
        torch.testing.assert_close(torch.stack(engine.logits[number]), logits, atol=1e-4, rtol=1e-4)
