"""A checkpoint as a GGUF file, by llama.cpp's own converter, in float32."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# The cases whose files are read. Each must run as its checkpoint does. Not here: those with sizes that
# the converter does not write, since all published models have the same.
CONVERTED = (
    "qwen3", "qwen3_moe", "qwen2", "gpt_oss", "llama3", "phi3", "smollm3", "olmo2", "olmo3",
    "seed_oss", "exaone4", "gemma2", "gemma4_dense31b", "gemma4_moe26b", "gemma4_e2b", "ministral3", "granite4_h",
    "glm4", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "minimax_m2", "olmoe", "ernie4_5", "ernie4_5_moe",
    "hunyuan_dense", "hunyuan_moe", "cohere", "cohere2", "gpt2", "stablelm", "qwen3_5",
    "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe", "nemotron_h_nano", "falcon_h1",
)  # fmt: skip
# What the converter looks for in config.json, and transformers doesn't write
PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "falcon_h1": {"head_dim": 16},
    "gpt2": {"n_ctx": 512},
    "granite4_h": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "hunyuan_moe": {"moe_intermediate_size": [112] * 2, "moe_topk": [2] * 2, "num_shared_expert": [1] * 2},
    "minimax_m2": {"rotary_dim": 16},
}
# The tokenizer has more tokens than a tiny model has embeddings: the file gets a made-up one.
SCRIPT = """
import runpy, sys
from conversion.base import TextModel

def set_vocab(model):
    writer, size = model.gguf_writer, model.hparams["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"w{number}" for number in range(size - 3))])
    writer.add_token_merges(["a b"])

prepare = TextModel.prepare_metadata
def prepare_metadata(model, vocab_only):
    model.set_vocab = lambda: set_vocab(getattr(model, "impl", model))
    prepare(model, vocab_only)

TextModel.prepare_metadata = prepare_metadata
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def convert(name: str, checkpoint: Path, converter: Path) -> Path:
    """Raises ChildProcessError with the converter's last words."""
    path, config = checkpoint / "model.gguf", checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | PUBLISHED.get(name, {})))
    script = f"import sys\nsys.argv[0] = {str(converter / 'convert_hf_to_gguf.py')!r}\n{SCRIPT}"
    command = [sys.executable, "-c", script, str(checkpoint), "--outtype", "f32", "--outfile", str(path)]
    done = subprocess.run(
        [*command, *(["--no-mtp"] if name in ("qwen3_5", "qwen3_5_moe", "qwen3_next") else [])],
        env={"PYTHONPATH": f"{converter}:{converter / 'gguf-py'}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ChildProcessError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return path
