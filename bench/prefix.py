"""The waste of blocks: tokens of prompts that are computed again because a block that two texts share
only in part is not found whole; and places in blocks that hold nothing.

Method: no model. Conversations are played with the block manager alone: a system prompt of a few,
and turns of random lengths, each with all before it; every prompt is looked up, and then counts as
computed. Found are whole blocks (`whole`), or the block in which texts part up to there, too (`to
the token`).

    python -m bench.prefix [--conversations 200] [--turns 6]
"""

import argparse
import json
import random

from services.compute.cache.block_manager import BlockManager
from services.compute.sequence import Request, Sequence, Tokens
from shared.model.sampling_params import SamplingParams

SIZES = (1, 8, 16, 32, 64, 128)
TOKENS = 1 << 20  # of the cache: nothing is evicted
SYSTEMS, SYSTEM_TOKENS = 8, (200, 800)
TURN_TOKENS, ANSWER_TOKENS = (10, 120), (20, 200)


def play(size: int, args: argparse.Namespace) -> tuple[float, float, float]:
    """The shares of prompts' tokens that are computed, with whole blocks and to the token; and the
    share of the held places that is empty, at the ends.
    """
    rng = random.Random(args.seed)
    blocks = BlockManager(TOKENS // size, size)
    systems = [[rng.randrange(50_000) for _ in range(rng.randint(*SYSTEM_TOKENS))] for _ in range(SYSTEMS)]
    asked = whole = to_token = held = filled = 0
    for number in range(args.conversations):
        text = list(rng.choice(systems))
        for turn in range(args.turns):
            text += [rng.randrange(50_000) for _ in range(rng.randint(*TURN_TOKENS))]
            sequence = Sequence(
                Request(number * args.turns + turn, "r", SamplingParams(max_tokens=1)), Tokens(list(text))
            )
            matched = blocks.match(sequence)
            part = blocks.match_end(sequence, matched)
            asked += len(text)
            whole += len(text) - len(matched) * size
            to_token += len(text) - len(matched) * size - (part[1] if part else 0)
            text += [rng.randrange(50_000) for _ in range(rng.randint(*ANSWER_TOKENS))]
            blocks.share(sequence, matched, len(matched) * size)
            sequence.tokens.ids = list(text)
            assert blocks.grow(sequence, len(text))
            held += len(sequence.kv.block_table) * size
            filled += len(text)
            sequence.kv.num_computed = len(text)
            blocks.commit(sequence)
            blocks.free(sequence)
    return whole / asked, to_token / asked, 1 - filled / held


def main() -> None:
    parser = argparse.ArgumentParser(description="What do blocks of a size waste?")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = {}
    print("block   computed: whole blocks   to the token   empty places")
    for size in SIZES:
        found[size] = whole, to_token, empty = play(size, args)
        print(f"{size:5}   {whole:22.2%}   {to_token:12.2%}   {empty:12.2%}")
    print(json.dumps({"turns": args.turns, "conversations": args.conversations, "found": found}))


if __name__ == "__main__":
    main()
