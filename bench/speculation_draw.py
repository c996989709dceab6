"""How often do a draft and its model draw the same token? By the draw that decides tokens here,
Gumbel-max with shared noise, and by others.

Method: a model and its draft, the same rounded to fewer bits, each given the same prose
(`bench.quality`'s). Of both, every position's candidates are made and drawn from as in production,
at --draws seeds. Beside it: the inverse CDF, one uniform number for both, each in the order of its
own logits (Penstock's rule before gumbel-1) and in the order of token ids; and the draft's
likeliest token against the model's draw, as of a draft that is not drawn at all. Ceiling: 1 minus
the distance in total variation, which no rule can beat.

    penstock quantize smollm2-135m drafts/w4 --quantization w4 --calibrate default
    python -m bench.speculation_draw --model smollm2-135m --draft drafts/w4
"""

import argparse
import json

import numpy as np
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer

from bench.quality import MODES, WINDOW, choose_model, docstrings, read
from services.compute.backends.choose import choose_backend
from services.compute.candidates.reduction import reduce
from services.compute.sequence import Request, Sequence, Tokens
from services.modeltools.calibration.texts import split
from shared.model.arrays import Array
from shared.model.files import open_model
from shared.model.sampling_params import SamplingParams

CASES = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=40),
)
RULES = ("Gumbel, shared noise", "inverse CDF, sorted", "inverse CDF, by id", "the draft's likeliest", "ceiling")
ROWS = 64  # drawn from at once
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description="How often a draft and its model draw the same token.")
    parser.add_argument(
        "--model",
        help="a checkpoint folder, a GGUF file or a model's name (default: smollm2-135m if it is there, else the demo)",
    )
    parser.add_argument(
        "--draft",
        default="w4, groups of 32",
        help="a mode of bench.quality, or a checkpoint of penstock quantize (default: %(default)s)",
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of prose (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=4, help="seeds for each position (default: %(default)s)")
    args = parser.parse_args()
    files = choose_model(args.model)
    windows = split(
        docstrings()[: args.tokens * 10], Tokenizer.from_file(str(files.folder / "tokenizer.json")), WINDOW
    )[: args.tokens // WINDOW]
    mode = next((mode for mode in MODES if mode.name == args.draft), None)
    drafting = (files, mode) if mode is not None else (open_model(args.draft), MODES[0])
    with torch.inference_mode():
        target, draft = (torch.cat(list(read(*each, windows))) for each in ((files, MODES[0]), drafting))
        results = {title(params): compare(target, draft, params, args.draws) for params in CASES}
    print(
        json.dumps(
            {"model": files.name, "draft": args.draft, "positions": len(target), "draws": args.draws, "shares": results}
        )
    )


def title(params: SamplingParams) -> str:
    more = [
        f"{name} {getattr(params, name)}"
        for name, off in (("top_p", 1.0), ("top_k", 0))
        if getattr(params, name) != off
    ]
    return ", ".join([f"temperature {params.temperature}", *more])


def compare(target: torch.Tensor, draft: torch.Tensor, params: SamplingParams, num_draws: int) -> dict[str, float]:
    """The share of draws in which the two are the same token, by rule. target, draft: [positions, vocab] float32."""
    same: dict[str, list[float]] = {
        name: []
        for name in (
            "Gumbel, shared noise",
            "inverse CDF, sorted",
            "inverse CDF, by id",
            "the draft's likeliest",
            "ceiling",
        )
    }
    rng = np.random.default_rng(0)
    for start in range(0, len(target), ROWS):
        rows = [each[start : start + ROWS] for each in (target, draft)]
        p, q = (probabilities(each.double().numpy(), params) for each in rows)
        for number in range(num_draws):
            drawn, drafted = (draw(each, params, start * num_draws + number) for each in rows)
            same["Gumbel, shared noise"].extend(drawn == drafted)
            same["the draft's likeliest"].extend(drawn == q.argmax(axis=1))
            u = rng.random(len(p))
            same["inverse CDF, sorted"].extend(inverse(p, u, is_sorted=True) == inverse(q, u, is_sorted=True))
            same["inverse CDF, by id"].extend(inverse(p, u, is_sorted=False) == inverse(q, u, is_sorted=False))
        same["ceiling"].extend(np.minimum(p, q).sum(axis=1))
    shares = {name: round(float(np.mean(values)), 3) for name, values in same.items()}
    print(f"{title(params):30}" + "".join(f"  {name} {share:.3f}" for name, share in shares.items()), flush=True)
    return shares


def draw(logits: torch.Tensor, params: SamplingParams, seed: int) -> Array:
    """Each row's token, by the product's own draw."""
    sequences = [
        Sequence(Request(row, "bench", replace(params, seed=(seed << 32) + row)), Tokens([0], 1))
        for row in range(len(logits))
    ]
    return reduce(logits.clone(), sequences, choose_backend(torch.bfloat16, CPU).row_search).chosen


def probabilities(logits: Array, params: SamplingParams) -> Array:
    """The distribution that the parameters make of each row, by definition: [rows, vocab] float64."""
    order = np.argsort(-logits, axis=1, kind="stable")
    p = np.exp((np.take_along_axis(logits, order, axis=1) - logits.max(axis=1, keepdims=True)) / params.temperature)
    if params.top_k:
        p[:, params.top_k :] = 0.0
    p /= p.sum(axis=1, keepdims=True)
    if params.top_p < 1.0:
        p[np.cumsum(p, axis=1) - p >= params.top_p] = 0.0
        p /= p.sum(axis=1, keepdims=True)
    found: Array = np.empty_like(p)
    np.put_along_axis(found, order, p, axis=1)
    return found


def inverse(p: Array, u: Array, *, is_sorted: bool) -> Array:
    """The first token, by falling probability or by id, up to which the probabilities exceed u."""
    order = np.argsort(-p, axis=1, kind="stable") if is_sorted else np.broadcast_to(np.arange(p.shape[1]), p.shape)
    mass = np.cumsum(np.take_along_axis(p, order, axis=1), axis=1)
    places = (mass <= u[:, None] * mass[:, -1:]).sum(axis=1)
    tokens: Array = np.take_along_axis(order, places[:, None], axis=1)[:, 0]
    return tokens


if __name__ == "__main__":
    main()
