"""Would trees of drafts stand further than chains? The tokens that a step gives, by the number of
drafted tokens, for a chain and for the best tree.

Method: the model answers greedily. The same model in fewer bits (or another of the same tokenizer)
then reads the answers, and each token's rank among its logits is noted. A drafting model has these
logits behind the same tokens in any step, so steps can be replayed: a chain of n drafts stands as
far as ranks are 0; a tree stands along the branch of the ranks. The tree of n tokens has the n
likeliest branches, if each rank is as likely anywhere as it was on average. That favours the tree,
since a server would have to choose it beforehand. The cost of drafting is not counted.

    python -m bench.speculation_trees --model smollm2-135m [--draft-quantization w4 | --draft-model
    smaller] [--tokens 256]
"""

import argparse
import heapq
import json
from itertools import count

import torch
from msgspec.structs import replace
from tokenizers import Tokenizer

from bench.quality import choose_model
from bench.speculation import encode, kinds
from services.compute.loop.engine import Engine, build_engine
from services.compute.scheduling.offline import run_step
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.model.files import ModelFiles
from shared.process.settings import ComputeSettings

Branch = tuple[int, ...]  # of a token in a tree: its rank, and those of the drafts before it
CHUNK = 32  # tokens of an answer that are read in a step
MAX_RANK = 8


def engine_of(files: ModelFiles, quantization: str) -> Engine:
    return build_engine(
        ComputeSettings(
            model=str(files.folder),
            kv_cache_memory="512MiB",
            quantization=quantization,
            prefix_caching=False,
            speculate="off",
        ),
        files,
    )


def answer(engine: Engine, prompt: list[int], num_tokens: int, handle: int) -> list[int]:
    """The model's own greedy answer."""
    params = replace(kinds()[0].params, max_tokens=num_tokens)
    sequence = Sequence(Request(handle, "r", params, ()), Tokens(list(prompt)))
    engine.scheduler.add(sequence)

    def decide(batch: ScheduledBatch, _: list[Sequence]) -> list[int]:
        return [int(token) for token in engine.runner.logits(batch, engine.runner.run(batch)).argmax(-1)]

    while engine.scheduler.num_unfinished:
        run_step(engine.scheduler, decide)
    return sequence.tokens.ids[len(prompt) :]


def ranks_of(engine: Engine, prompt: list[int], answered: list[int]) -> list[int]:
    """The rank of each token of the answer in the logits behind the tokens before it; 0 is the likeliest."""
    tokens, block_size = prompt + answered, engine.runner.kv_cache.block_size
    blocks = tuple(range(1, 2 + len(tokens) // block_size))
    found: list[int] = []
    for first in range(0, len(tokens) - 1, CHUNK):
        last = min(first + CHUNK, len(tokens) - 1)
        row = BatchRow(
            0,
            tuple(tokens[first:last]),
            first,
            blocks,
            range(max(0, len(prompt) - 1 - first), last - first),
            len(prompt),
        )
        batch = ScheduledBatch((row,), 0)
        hidden = engine.runner.run(batch)
        if row.sampled:
            logits = engine.runner.logits(batch, hidden)
            drawn = torch.tensor(tokens[first + row.sampled.start + 1 : last + 1])
            found += [int(rank) for rank in (logits > logits.gather(1, drawn[:, None])).sum(1)]
    return found


def best_tree(shares: list[float], size: int) -> set[Branch]:
    """The branches of the likeliest tokens. shares: how often each rank was right."""
    order, tree = count(), set[Branch]()
    waiting: list[tuple[float, int, Branch]] = [(-share, next(order), (rank,)) for rank, share in enumerate(shares)]
    heapq.heapify(waiting)
    while len(tree) < size:
        chance, _, path = heapq.heappop(waiting)
        tree.add(path)
        for rank, share in enumerate(shares):
            heapq.heappush(waiting, (chance * share, next(order), (*path, rank)))
    return tree


def tokens_per_step(answers: list[list[int]], tree: set[Branch]) -> float:
    """Replay the answers: each step gives the drafts that stand, and one token more."""
    num_tokens = num_steps = 0
    for ranks in answers:
        at = 0
        while at < len(ranks):
            stood = 0
            while at + stood < len(ranks) and tuple(ranks[at : at + stood + 1]) in tree:
                stood += 1
            at += stood + 1
            num_steps += 1
        num_tokens += len(ranks)
    return num_tokens / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        help="a checkpoint folder, a GGUF file or a model's name (default: smollm2-135m if it is there, else the demo)",
    )
    parser.add_argument("--draft-model", help="another model of the same tokenizer (default: the same one)")
    parser.add_argument("--draft-quantization", default="w4", help="of the model that drafts (default: %(default)s)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[2, 4, 8, 16], help="drafted tokens of a step (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=256, help="of an answer (default: %(default)s)")
    options = parser.parse_args()
    files = choose_model(options.model)
    tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    asked = {
        kind.name: encode(tokenizer, kind)
        for kind in kinds()
        if kind.constraint is None and kind.params.temperature == 0
    }
    target = engine_of(files, "none")
    answered = {
        name: answer(target, prompt, options.tokens, number) for number, (name, prompt) in enumerate(asked.items())
    }
    draft = engine_of(choose_model(options.draft_model or options.model), options.draft_quantization)
    results = []
    for name, prompt in asked.items():
        ranks = ranks_of(draft, prompt, answered[name])
        shares = [sum(rank == each for rank in ranks) / len(ranks) for each in range(MAX_RANK)]
        for size in options.sizes:
            chain = tokens_per_step([ranks], {(0,) * length for length in range(1, size + 1)})
            tree = tokens_per_step([ranks], best_tree(shares, size))
            results.append(
                {
                    "kind": name,
                    "size": size,
                    "chain": round(chain, 2),
                    "tree": round(tree, 2),
                    "shares": [round(each, 3) for each in shares[:4]],
                }
            )
            print("  ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
    print(json.dumps({"model": files.name, "results": results}))


if __name__ == "__main__":
    main()
