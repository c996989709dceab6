"""The worth of prompt modules, and what they cost: the time to the first token of prompts that are put
together from known parts in new orders, beside the prefix cache alone; and how well a model reads
texts that do not see each other.

Method, time: `penstock up`. Prompts are --use of --modules texts of random numbers in random
orders, and a question. Each prompt is asked as a whole, with the prefix cache, and with modules,
whose texts have been used before; then once more under another salt, where nothing is cached: the
answer must be the same. Medians count.

Method, quality: the model alone, in this process. A prompt is --use docstrings of the standard
library, each with a sentence that tells a number, and the beginning of one of these sentences: the
perplexity of the number's tokens, and how often each is the likeliest. The same for the text that
follows the last docstring's beginning. `whole`: one text, as usual; `modules`: at positions behind
each other; `overlapping`: all at the same position; `none`: without them.

    python -m bench.prompt_modules --model FILE_OR_FOLDER [--words 120] [--rounds 10] [--trials 60]
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer

from bench.kv_disk import words
from bench.pipeline import Served
from bench.quality import docstrings
from services.compute.backends.choose import choose_backend
from services.compute.cache.kv_cache import KVCache
from services.compute.execution.model_runner import ModelRunner
from services.compute.models.architectures import read_config
from services.compute.models.decoder import Decoder
from services.compute.scheduling.new_step import advance
from services.compute.sequence import BlockTable, Kv, Request, Sequence, Tokens
from services.compute.sequence.batch import ScheduledBatch
from services.compute.weights.loader import load_weights
from shared.model.files import ModelFiles, open_model
from shared.model.sampling_params import SamplingParams
from shared.model.segments import Segment, layout_of

BLOCK_SIZE = 16
CHUNK = 512  # tokens
NAMES = ("Ada", "Boris", "Clara", "Dario", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas")
WAYS = ("whole", "modules", "overlapping", "none")


class Client:
    def __init__(self, port: int) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=600, trust_env=False)
        self.model = self.post("/completions", {"prompt": "warm", "max_tokens": 1})["model"]

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.http.post(path, json=body).raise_for_status().json()
        return found

    def ask(self, body: dict[str, Any]) -> tuple[float, str, int, int]:
        """Seconds to an answer of one token, a longer answer's text, the prompt's tokens, and those that were found."""
        started_at = time.perf_counter()
        usage = self.post("/completions", body | {"max_tokens": 1, "temperature": 0})["usage"]
        seconds = time.perf_counter() - started_at
        text = self.post("/completions", body | {"max_tokens": 16, "temperature": 0, "ignore_eos": True})["choices"][0][
            "text"
        ]
        return seconds, text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def measure_time(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    served = Served(["--model", args.model], folder, "")
    rng = random.Random(args.seed)
    found: dict[str, list[float]] = {"whole": [], "modules": [], "modules, nothing cached": []}
    shares: dict[str, list[float]] = {name: [] for name in found}
    try:
        client = Client(served.port)
        texts = {f"part{number}": words(args.words, number) + "\n" for number in range(args.modules)}
        made = client.post(
            "/prompt_modules", {"modules": [{"name": name, "text": text} for name, text in texts.items()]}
        )
        for name in texts:
            client.ask({"prompt": "Begin.", "prompt_modules": {"id": made["id"], "use": [name]}})
        for number in range(args.rounds):
            use, question = rng.sample(sorted(texts), args.use), f"Question {number}: which number is the largest?"
            bodies: dict[str, dict[str, Any]] = {
                "whole": {"prompt": "".join(texts[name] for name in use) + question},
                "modules": {"prompt": question, "prompt_modules": {"id": made["id"], "use": use}},
            }
            bodies["modules, nothing cached"] = bodies["modules"] | {"cache_salt": str(number)}
            answers = {}
            for name, body in bodies.items():
                seconds, answers[name], num_tokens, num_cached = client.ask(body)
                found[name].append(seconds)
                shares[name].append(num_cached / num_tokens)
            if answers["modules"] != answers["modules, nothing cached"]:
                raise SystemExit("other bytes")
    finally:
        served.close()
    medians = {name: statistics.median(each) for name, each in found.items()}
    for name, seconds in medians.items():
        print(
            f"{name:24} {1000 * seconds:8.0f} ms   {statistics.mean(shares[name]):.3f} of {num_tokens} tokens found",
            flush=True,
        )
    print(f"modules: {medians['whole'] / medians['modules']:.1f} times faster than the prefix cache alone")
    return {
        "seconds": medians,
        "found": {name: statistics.mean(each) for name, each in shares.items()},
        "prompt_tokens": num_tokens,
    }


class Reader:
    """A model that reads prompts, whole or in segments."""

    def __init__(self, files: ModelFiles, max_tokens: int) -> None:
        backend = choose_backend(torch.bfloat16, torch.device("cpu"))
        config = read_config(files.config)
        model = Decoder(config, load_weights(files.weights, config, backend), backend)
        self.runner = ModelRunner(
            model, KVCache(config, backend, num_blocks=-(-max_tokens // BLOCK_SIZE), block_size=BLOCK_SIZE)
        )

    def logs(self, token_ids: Many[int], segments: tuple[Segment, ...], num_last: int) -> tuple[float, int]:
        """The sum of the last tokens' log probabilities, and how many of them are the likeliest.
        segments: none: one text.
        """
        layout = layout_of(segments, BLOCK_SIZE)
        slots = layout.pad(token_ids)
        sequence = Sequence(
            Request(0, "", SamplingParams(), layout=layout),
            Tokens(slots),
            Kv(block_table=BlockTable(range(-(-len(slots) // BLOCK_SIZE)))),
        )
        total, num_likeliest = 0.0, 0
        while sequence.num_uncomputed_tokens:
            row = advance(sequence, min(sequence.longest_chunk, CHUNK))
            first = max(len(slots) - num_last, row.num_computed_tokens + 1)
            if sequence.kv.num_computed > len(slots) - num_last:
                row = replace(row, first_target=first, target_ids=tuple(slots[first : sequence.kv.num_computed + 1]))
            batch = ScheduledBatch((replace(row, sampled=range(0)),), 0)
            hidden = self.runner.run(batch)
            at = 0
            for logits in self.runner.prompt_logits(batch, hidden):
                targets = torch.tensor(row.target_ids[at : at + len(logits)])
                total += float(logits.log_softmax(-1).gather(-1, targets[:, None]).sum())
                num_likeliest += int((logits.argmax(-1) == targets).sum())
                at += len(logits)
        return total, num_likeliest


def prompts_of(
    way: str, texts: list[list[int]], last: list[int], trunk: list[int]
) -> tuple[list[int], tuple[Segment, ...]]:
    """The tokens of a prompt whose parts are read in one of WAYS, and its segments."""
    if way in ("whole", "none"):
        return [*trunk, *(token_id for text in texts for token_id in text if way == "whole"), *last], ()
    before = (Segment(len(trunk), 0),) if trunk else ()
    sees, position, segments = tuple(range(len(before))), len(trunk), list(before)
    for text in texts:
        segments.append(Segment(len(text), position, sees))
        position += len(text) if way == "modules" else 0
    end = max(each.position + each.num_tokens for each in segments)
    segments.append(Segment(len(last), end, tuple(range(len(segments)))))
    return [*trunk, *(token_id for text in texts for token_id in text), *last], tuple(segments)


def measure_quality(args: argparse.Namespace) -> dict[str, Any]:
    files = open_model(args.model)
    tokenizer: Tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    trunk = tokenizer.encode("").ids
    prose = tokenizer.encode(docstrings(), add_special_tokens=False).ids
    reader, rng = Reader(files, (args.tokens + 64) * (args.use + 2)), random.Random(args.seed)
    sums = {kind: {way: [0.0, 0.0, 0.0] for way in WAYS} for kind in ("answers", "what follows")}
    for number in range(args.trials):
        names, place = (
            rng.sample(NAMES, args.use),
            number * args.use * args.tokens % (len(prose) - (args.use + 1) * args.tokens),
        )
        pieces = [prose[place + at * args.tokens : place + (at + 1) * args.tokens] for at in range(args.use + 1)]
        told, texts = {name: str(rng.randrange(1000, 10_000)) for name in names}, list[list[int]]()
        for name, piece in zip(names, pieces, strict=False):
            cut = rng.randrange(len(piece))
            sentence = tokenizer.encode(
                f"\nThe secret number of {name} is {told[name]}.\n", add_special_tokens=False
            ).ids
            texts.append([*piece[:cut], *sentence, *piece[cut:]])
        asked = rng.choice(names)
        question = tokenizer.encode(f"\nThe secret number of {asked} is", add_special_tokens=False).ids
        whole = tokenizer.encode(f"\nThe secret number of {asked} is {told[asked]}", add_special_tokens=False).ids
        tests = {
            "answers": (texts, whole, len(whole) - len(question)),
            "what follows": (pieces[: args.use], pieces[args.use], args.tokens - 1),
        }
        for kind, (parts, last, num_last) in tests.items():
            for way in WAYS:
                total, num_likeliest = reader.logs(*prompts_of(way, parts, last, trunk), num_last)
                sums[kind][way] = [
                    sums[kind][way][0] + total,
                    sums[kind][way][1] + num_likeliest,
                    sums[kind][way][2] + num_last,
                ]
    found: dict[str, Any] = {}
    for kind, ways in sums.items():
        for way, (logs, right, count) in ways.items():
            found[f"{kind}, {way}"] = {"perplexity": math.exp(-logs / count), "likeliest": right / count}
            print(
                f"{kind:13} {way:12} perplexity {math.exp(-logs / count):8.2f}   likeliest {right / count:.3f}",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What are prompt modules worth, and what do they cost?")
    parser.add_argument("--model", required=True)
    parser.add_argument("--modules", type=int, default=10, help="that there are (default: %(default)s)")
    parser.add_argument("--use", type=int, default=5, help="of them in a prompt (default: %(default)s)")
    parser.add_argument(
        "--words", type=int, default=120, help="of a module, of some 3.3 tokens each (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--trials", type=int, default=60, help="prompts whose answers are looked at (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=200, help="of a docstring there (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = {"model": args.model, "time": measure_time(args, Path(temporary)), "quality": measure_quality(args)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
