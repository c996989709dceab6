"""Drafters of compute replicas: another for each life of each, drawn by the run's seed. No text may show it."""

import random
from pathlib import Path

from shared.model.files import open_model
from tests.chaos.options import COMPUTE_DEFAULTS, Options
from tests.heads import write_heads

OWN = ("speculate", "heads", "draft_model", "self_draft")  # settings that a run may be given: nothing is drawn then
IN_FOUR_BITS = ("w4", "nf4")  # which have nothing smaller to draft with


def draw_speculators(options: Options, overrides: dict[str, str], folder: Path, rng: random.Random) -> dict[str, str]:
    """Settings of compute. overrides: what a fault has given the replica; folder: the run's, where
    heads are written.
    """
    if any(name in options.compute for name in OWN):
        return {}
    choices = [{"speculate": name} for name in ("off", "auto")]
    if options.model == "demo":
        if options.compute.get("quantization") not in IN_FOUR_BITS:
            choices += [{"speculate": name} for name in ("self", "auto,self")]
        choices.append({"speculate": "auto,medusa", "heads": str(folder / "heads")})
        if (options.compute | overrides)["kv_cache_memory"] == COMPUTE_DEFAULTS[
            "kv_cache_memory"
        ]:  # a model of its own takes half of it
            choices.append({"speculate": "draft", "draft_model": "demo"})
    chosen = rng.choice(choices)
    if "heads" in chosen and not (folder / "heads").exists():
        write_heads(folder / "heads", open_model("demo").config["hidden_size"])
    return chosen
