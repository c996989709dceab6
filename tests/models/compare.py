"""One architecture: a checkpoint by transformers, loaded as compute loads it, and its tokens beside
those of `generate`.
"""

import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  what all models import, once for all processes
from safetensors.torch import load_file, save_file
from torch import Tensor

import services.compute.models.transformers_model
import services.compute.weights.library_modules  # noqa: F401
from services.compute.loop.engine import Engine, build_engine
from services.compute.scheduling.offline import run_step
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import ScheduledBatch
from shared.model.files import DEMO_MODEL, open_model
from shared.model.sampling_params import SamplingParams
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from tests.models.blueprints import Blueprint
from tests.models.convert import convert

RNG = random.Random(7)
PROMPTS = [[RNG.randrange(3, 512) for _ in range(length)] for length in (5, 40, 130)]
NUM_TOKENS = 20
# of a logit, whose standard deviation is about 1
LARGEST_DIFFERENCE = 1e-2
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# what transformers writes in other names than it reads, and than is published
WRONGLY_NAMED = {"kimi_k25_vl": (r"^language_model\.model\.blocks", "language_model.model.layers")}
OWN_VALUES = (
    "a_log",
    "dt_bias",
    ".d",
    "conv1d.bias",
)  # parameters of state spaces, which stay as the library makes them


@dataclass
class Result:
    """The end of an architecture's case."""

    name: str
    outcome: str = ""  # native, ragged, one by one, `refused: ...`, or what went wrong
    tokens: str = ""  # equal, or in which run they were not
    difference: float = 0.0  # the largest of a logit
    seconds: float = 0.0

    def problem(self, expected: str) -> str:
        """Why the row fails; empty: it does not."""
        wanted, _, words = expected.partition(": ")
        outcome, _, reason = self.outcome.partition(": ")
        if outcome != wanted or words not in reason:
            return f"expected {expected}"
        if wanted == "refused":
            return ""
        if self.tokens != "equal":
            return f"tokens {self.tokens}"
        return "" if self.difference <= LARGEST_DIFFERENCE else f"a logit differs by {self.difference:.1e}"


def compare(name: str, blueprint: Blueprint, folder: Path, converter: Path | None) -> Result:
    """converter: llama.cpp's folder: of the file that it makes of the checkpoint; None: the
    checkpoint's own."""
    result = Result(name)
    config = blueprint.config()
    if missing := blueprint.missing_kinds(config):
        result.outcome = f"a kind of layer is missing: {missing[0][:300]}"
        return result
    model_class = blueprint.model_class(config)
    write_checkpoint(name, model_class, config, folder)
    files = open_model(str(folder if converter is None else convert(name, folder, converter)), weights=True)
    try:
        engine = build_engine(settings(), files)
    except StartupError as error:
        result.outcome = f"refused: {error}"
        return result
    result.outcome = engine.runner.model.implementation.removeprefix("transformers (").removesuffix(")")
    reference = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    expected = [greedy(reference, prompt) for prompt in PROMPTS]
    logits: dict[int, list[Tensor]] = {}
    runs = {"batch": run(engine, logits)}
    result.difference = largest_difference(reference, expected, logits)
    small = build_engine(settings(max_batched_tokens=24, max_num_seqs=4, prefix_caching=True), files)
    runs |= {"chunks": run(small, {}), "prefix cache": run(small, {})}
    result.tokens = ", ".join(f"differ in {way}" for way, found in runs.items() if found != expected) or "equal"
    return result


def write_checkpoint(name: str, model_class: Any, config: Any, folder: Path) -> None:
    torch.manual_seed(sum(map(ord, name)))
    model = model_class._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(folder)
    if name in WRONGLY_NAMED:
        weights = folder / "model.safetensors"
        named = {re.sub(*WRONGLY_NAMED[name], key): value for key, value in load_file(weights).items()}
        save_file(named, weights, {"format": "pt"})
    for file in TOKENIZER:
        shutil.copy(DEMO_MODEL / file, folder / file)


def randomize(model: Any) -> None:
    """Give it random weights, spread out: with the usual 0.02 all logits are nearly equal."""
    for full_name, parameter in model.named_parameters():
        lower = full_name.lower()
        if "norm" in lower:
            is_offset = bool((parameter == 0).all())  # of norms that multiply by 1 + weight
            torch.nn.init.normal_(parameter, mean=0.0 if is_offset else 1.0, std=0.1)
        elif parameter.is_floating_point() and not (parameter.dim() == 1 and any(part in lower for part in OWN_VALUES)):
            torch.nn.init.normal_(parameter, std=0.12)
    for full_name, buffer in model.named_buffers():
        if "correction_bias" in full_name or "expert_bias" in full_name:
            torch.nn.init.normal_(buffer, std=0.3)


def settings(**options: Any) -> ComputeSettings:
    return ComputeSettings(kv_cache_memory="24MiB", dtype="float32", num_threads=1, max_model_len=512, **options)


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def run(engine: Engine, logits: dict[int, list[Tensor]]) -> list[list[int]]:
    """The tokens of all prompts; logits: takes the rows that they were chosen from."""
    params = SamplingParams(max_tokens=NUM_TOKENS)
    sequences = [
        Sequence(Request(number, str(number), params), Tokens(list(prompt))) for number, prompt in enumerate(PROMPTS)
    ]
    for sequence in sequences:
        logits[sequence.handle] = []
        engine.scheduler.add(sequence)

    def decide(batch: ScheduledBatch, sampled: list[Sequence]) -> Iterator[int]:
        hidden = engine.runner.run(batch)
        for sequence, row in zip(sampled, engine.runner.logits(batch, hidden), strict=True):
            logits[sequence.handle].append(row.clone())
            yield int(row.argmax())

    while engine.scheduler.num_unfinished:
        assert run_step(engine.scheduler, decide, is_over=lambda each: each.tokens.num_output == NUM_TOKENS) is not None
    return [sequence.tokens.ids[sequence.tokens.num_prompt :] for sequence in sequences]


@torch.inference_mode()
def largest_difference(model: Any, expected: list[list[int]], logits: dict[int, list[Tensor]]) -> float:
    """From those of one pass without a cache, as far as the tokens are the same."""
    largest = 0.0
    for number, (prompt, tokens) in enumerate(zip(PROMPTS, expected, strict=True)):
        rows = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        found = torch.stack(logits[number])
        same = (
            next((place for place, row in enumerate(found) if int(row.argmax()) != tokens[place]), NUM_TOKENS - 1) + 1
        )
        largest = max(largest, float((found[:same] - rows[:same]).abs().max()))
    return largest
