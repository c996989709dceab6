"""`penstock train-heads`: Medusa heads that guess a model's next tokens, distilled from its own
answers.

What is written is the layout that vLLM reads, too: residual blocks with biases, one LM head for all
of them, which is the model's own, cut to the tokens that its answers use most, and their ids.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.compute.backends.backend import LogitsProduct
from services.compute.loop.engine import Engine, build_engine
from services.compute.models.architectures import is_native
from services.compute.models.decoder import Decoder
from services.compute.speculation.medusa_file import MAX_HEADS, MAX_LAYERS
from services.modeltools.heads.answers import Answers, Sampling, generate
from services.modeltools.heads.prompts import encode_prompts, read_prompts
from services.modeltools.heads.training import WINDOW, Recipe, TrainableHeads, accuracy, likeliest_tokens, train
from services.modeltools.out_folder import open_out_folder, write_model
from shared.model.files import ModelFiles, open_model
from shared.process.errors import StartupError
from shared.process.host_memory import free_host_memory, size_text
from shared.process.settings import ComputeSettings, load_settings

COPIES = 3  # of the answers' states, while they are put in order
UNIT_ROWS = 64  # of the LM head's inputs that it is asked about at a time


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How well heads guess."""

    accuracies: list[float]  # by head: the share of its likeliest tokens that were the model's own
    num_tokens: int  # of the answers that this was measured on, and no head has seen


def train_heads(
    model: str,
    out: Path,
    sampling: Sampling,
    recipe: Recipe,
    *,
    prompts: str,
    vocabulary: int,
    num_threads: int = 0,
    force: bool = False,
) -> TrainingResult:
    """Train heads for `model` and write them to `out`, with force in the stead of what is there.
    Raises StartupError.

    prompts: a file's path, or default; vocabulary: how many tokens the heads know; num_threads: 0:
    all cores.
    """
    check_numbers(sampling, recipe)
    texts = read_prompts(prompts)
    files = open_model(model, weights=True)
    settings = load_settings(ComputeSettings, [], model=model, device="cpu", num_threads=num_threads)
    if not is_native(files, settings.model_impl):
        raise StartupError(f"{files.name}: heads are trained for models of the native implementation only")
    check_memory(sampling.num_tokens, files.hidden_size or 0)
    encoded = encode_prompts(texts, files)
    open_out_folder(out, force=force, source=files)
    if not sys.stderr.isatty():  # where there are no bars
        sys.stderr.write(f"training heads for {model}\n")
    engine = build_engine(settings, files)
    answers, held_out = generate(engine, files, encoded, sampling)
    if min(len(each.token_ids) for each in (answers, held_out)) < 2 * (WINDOW + recipe.num_heads):
        raise StartupError(
            f"--tokens {sampling.num_tokens}: the answers are too short to learn from; ask for more tokens, or give "
            "other prompts (--prompts)"
        )
    return fit(engine, files, out, (answers, held_out), recipe, vocabulary)


def check_numbers(sampling: Sampling, recipe: Recipe) -> None:
    """Raises StartupError for what no training can begin with."""
    if recipe.num_heads > MAX_HEADS or recipe.num_layers > MAX_LAYERS:
        raise StartupError(
            f"--heads {recipe.num_heads} --layers {recipe.num_layers}: at most {MAX_HEADS} heads of {MAX_LAYERS} "
            "layers can be loaded"
        )
    if not 0.0 < recipe.learning_rate <= 1.0:
        raise StartupError(f"--learning-rate {recipe.learning_rate:g}: above 0, and at most 1")
    if sampling.temperature is not None and not 0.0 <= sampling.temperature <= 100.0:
        raise StartupError(f"--temperature {sampling.temperature:g}: from 0 to 100")


def check_memory(num_tokens: int, hidden_size: int) -> None:
    """Raises StartupError if the answers' states would not fit."""
    wanted, free = COPIES * num_tokens * hidden_size * 2, free_host_memory()
    if wanted > free:
        raise StartupError(
            f"--tokens {num_tokens}: the hidden states of so many take {size_text(wanted)}, and {size_text(free)} are "
            "free"
        )


def fit(
    engine: Engine, files: ModelFiles, out: Path, answers: tuple[Answers, Answers], recipe: Recipe, vocabulary: int
) -> TrainingResult:
    """Train, measure and write heads. answers: to learn of, and held out."""
    decoder = engine.runner.model
    assert isinstance(decoder, Decoder)
    vocab_size = decoder.config.vocab_size
    token_ids = likeliest_tokens(answers[0], vocab_size, min(vocabulary, vocab_size))
    lm_head = rows_of(decoder.weights.lm_head, decoder.config.hidden_size, token_ids) * decoder.config.logits_multiplier
    heads = train(answers[0], lm_head, recipe)
    write_model(
        out,
        tensors_of(heads, lm_head, token_ids),
        lambda: write_config(out, files, decoder.config.hidden_size, recipe, (vocab_size, len(token_ids))),
    )
    return TrainingResult(accuracy(heads, answers[1], lm_head, token_ids), len(answers[1].token_ids))


@torch.inference_mode()
def rows_of(lm_head: LogitsProduct, hidden_size: int, token_ids: Tensor) -> Tensor:
    """The rows of an LM head in whatever form, [V, hidden] float32: what it makes of unit
    vectors."""
    units = torch.eye(hidden_size, dtype=torch.bfloat16)
    return torch.cat(
        [lm_head.logits(some.contiguous())[:, token_ids] for some in torch.split(units, UNIT_ROWS)]
    ).T.contiguous()


def tensors_of(heads: TrainableHeads, lm_head: Tensor, token_ids: Tensor) -> dict[str, Tensor]:
    """Every tensor of the file, by its name."""
    tensors = {"lm_heads.0.weight": lm_head.bfloat16().contiguous(), "token_map": token_ids}
    for number, (weights, biases) in enumerate(zip(heads.weights, heads.biases, strict=True)):
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            prefix = f"blocks.{number}.layers.{layer}."
            tensors |= {
                prefix + "weight": weight.bfloat16().contiguous(),
                prefix + "bias": bias.bfloat16().contiguous(),
            }
    return tensors


def write_config(out: Path, files: ModelFiles, hidden_size: int, recipe: Recipe, sizes: tuple[int, int]) -> None:
    """Write config.json. sizes: of the vocabulary, and of the part that the heads know."""
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": files.name,
        "hidden_size": hidden_size,
        "vocab_size": sizes[0],
        "truncated_vocab_size": sizes[1],
        "medusa_num_heads": recipe.num_heads,
        "medusa_num_layers": recipe.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": True,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
