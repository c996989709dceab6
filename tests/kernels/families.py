"""Tiny random models of every supported family, as transformers writes them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from services.compute.batch import ScheduledBatch
from services.compute.cache.block_manager import BlockManager
from services.compute.cache.kv_cache import KVCache
from services.compute.model_runner import ModelRunner
from services.compute.models.config import read_config
from services.compute.models.decoder import Decoder
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.loop import run_step
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Sequence
from services.compute.weights.loader import load_weights
from shared.model_files import DEMO_MODEL
from shared.sampling_params import SamplingParams

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama2": LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama-linear": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=32),
    "mistral-window": MistralConfig(**SIZES, sliding_window=24, head_dim=32),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-yarn": Qwen2Config(**SIZES, rope_parameters=YARN_ROPE),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
}


def reference_model(name: str, folder: Path, *, shard: str = "50GB") -> PreTrainedModel:
    """transformers' model, in float32, saved to `folder` on the way. `demo` is the demo model."""
    if name == "demo":
        return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32, attn_implementation="eager")
    for parameter_name, parameter in model.named_parameters():  # spread out: with the usual 0.02 all logits are nearly equal
        if "norm" in parameter_name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
        else:
            torch.nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(folder, max_shard_size=shard)
    return model.eval()


class Engine:
    """Scheduler, runner and greedy decisions in one place: compute's loop without Redis."""

    def __init__(
        self,
        folder: Path,
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
    ) -> None:
        config = read_config(json.loads((folder / "config.json").read_text()))
        device = torch.device("cpu")
        model = Decoder(config, load_weights(folder, config, dtype, device, quantization=quantization, attention_output=attention_output, lm_head=lm_head))
        cache = KVCache(config, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device, group=kv_group)
        self.runner = ModelRunner(model, cache, device)
        blocks = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(blocks, make_admission(strategy, blocks), max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens)
        self.logits: dict[int, list[torch.Tensor]] = {}

    def generate(self, prompts: list[list[int]], num_tokens: int, *, eos: int | None = None, group_id: str | None = None) -> list[list[int]]:
        """Greedy continuations; keeps each sequence's rows of logits in `self.logits`, by its number.

        With a group_id the prompts are one prompt's choices; the first token of the i-th is the i-th best.
        """
        params = SamplingParams(max_tokens=num_tokens)
        sequences = [Sequence(number, str(number), list(prompt), len(prompt), params, group_id=group_id) for number, prompt in enumerate(prompts)]
        self.logits = {sequence.handle: [] for sequence in sequences}
        for sequence in sequences:
            self.scheduler.add(sequence)

        def decide(batch: ScheduledBatch, sampled: list[Sequence]) -> Iterator[int]:
            for sequence, row in zip(sampled, self.runner.forward(batch), strict=True):
                self.logits[sequence.handle].append(row.clone())
                is_first_choice = group_id is None or sequence.num_output_tokens > 0
                yield int(row.argmax() if is_first_choice else row.argsort(descending=True)[sequence.handle])

        def is_over(sequence: Sequence) -> bool:
            return sequence.num_output_tokens == num_tokens or sequence.token_ids[-1] == eos

        while self.scheduler.num_unfinished:
            assert run_step(self.scheduler, decide, is_over=is_over) is not None
        assert self.scheduler.block_manager.num_free_blocks == self.scheduler.block_manager.num_blocks
        return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
