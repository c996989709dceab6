"""Affinity: which compute replica has a prompt's prefix, and how long it is worth waiting for it.

The tokenizer has the tokens, hence the names of the blocks that the prompt will fill; compute
replicas say which of those are in their prefix caches. It is a hint only: a prompt that goes
elsewhere gets the same bytes, later.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.model.prefix_hash import HINT_BYTES, prefix_hashes, prefix_root
from shared.model.segments import SEGMENT_MULTIPLE, Layout, segment_hashes
from shared.model.vision.images import place_images
from shared.wire.entries import GroupReader
from shared.wire.line import Pipeline
from shared.wire.messages import TokenizedRequest
from shared.wire.replica import Replica
from shared.wire.stage import Stage
from shared.wire.streams import GroupStream, prefixes_key

MAX_ASKED = 32  # blocks of a prompt: evenly spaced, the last among them
WORTH_S = 0.002  # a prefix that saves less is not worth a choice
MOST_WAIT_S = 2.0
# a chosen replica has fewer sequences than SLACK + FACTOR * those of the one with the fewest
SLACK, FACTOR = 4, 1.5


@dataclass(frozen=True, slots=True)
class ChosenReplica:
    """The replica that is to compute a prompt."""

    compute_id: str
    wait_s: float  # the time that the prefix saves: after it any other replica is as good


@dataclass(frozen=True, slots=True)
class BlockQuery:
    """Whether a replica has some of a prompt's blocks."""

    prompt: int
    replica: Replica
    names: list[bytes]
    ends: list[tuple[int, int]]  # the segment of each of these blocks, and its tokens up to the block's end


class Affinity:
    """Chooses for one model's prompts."""

    def __init__(self, stage: Stage, stream: GroupStream, model: str) -> None:
        """stream: of the prompts."""
        self.stage = stage
        self.stream = stream
        # reads nothing: with it, the transport makes the group again if Redis has lost it
        GroupReader(stage.transport, stream, stage.replica_id)
        self.model = model

    def choose(self, prompts: Sequence[TokenizedRequest]) -> list[ChosenReplica | None]:
        """The replica of each prompt. None: any replica may take it. One round trip, if there are several
        replicas."""
        replicas = [
            each for each in self.stage.registry.of("compute", self.model) if each.block_size and each.load.max_num_seqs
        ]
        if len(replicas) < 2 or not prompts:
            return [None] * len(prompts)
        named: dict[tuple[str, int, str, bytes], list[bytes]] = {}
        queries = [
            query
            for number, prompt in enumerate(prompts)
            if can_share(prompt)
            for query in queries_of(number, prompt, replicas, named)
        ]
        if not queries:
            return [None] * len(prompts)

        def ask(pipe: Pipeline) -> None:
            pipe.xpending(self.stream.key, self.stream.group)
            for query in queries:
                pipe.execute_command("SMISMEMBER", prefixes_key(query.replica.replica_id), *query.names)

        pending: Any
        pending, *replies = self.stage.transport.run(ask)
        # sequences by replica, with those that are being given away here
        num_held = Counter({each["name"].decode(): int(each["pending"]) for each in pending["consumers"]})
        cached: dict[int, list[tuple[Replica, int]]] = {}
        for query, reply in zip(queries, replies, strict=True):
            longest: dict[int, int] = {}
            for (segment, count), is_there in zip(query.ends, reply, strict=True):
                longest[segment] = max(longest.get(segment, 0), count if is_there else 0)
            cached.setdefault(query.prompt, []).append((query.replica, sum(longest.values())))
        return [best_of(cached.get(number, []), num_held) for number in range(len(prompts))]


def best_of(cached: list[tuple[Replica, int]], num_held: Counter[str]) -> ChosenReplica | None:
    """The replica that saves most, of those with a free place and not much more to do than others.
    cached: all, with the tokens of the prompt that each has; num_held: the sequences of each, to
    which this one is added."""
    limit = SLACK + FACTOR * min((num_held[replica.replica_id] for replica, _ in cached), default=0)
    saved = {
        replica.replica_id: num_tokens * (replica.load.step_cost_per_token_s or 0.0)
        for replica, num_tokens in cached
        if num_held[replica.replica_id] < min(limit, replica.load.max_num_seqs or 0)
    }
    best = max(saved, key=lambda replica_id: (saved[replica_id], -num_held[replica_id]), default=None)
    if best is None or saved[best] < WORTH_S:
        return None
    num_held[best] += 1
    return ChosenReplica(best, min(saved[best], MOST_WAIT_S))


def can_share(prompt: TokenizedRequest) -> bool:
    """Whether the prompt may use cached blocks."""
    return prompt.params.prompt_logprobs is None and (prompt.embedding is None or prompt.embedding.pooling == "last")


def queries_of(
    number: int,
    prompt: TokenizedRequest,
    replicas: list[Replica],
    named: dict[tuple[str, int, str, bytes], list[bytes]],
) -> list[BlockQuery]:
    """Queries about a prompt, but for its last token, which is computed in any case. named: hashes of
    blocks; replicas with equal fingerprints and choices of one prompt share them."""
    queries = []
    for replica in replicas:
        if prompt.segments and SEGMENT_MULTIPLE % replica.block_size:
            continue
        layout = Layout(prompt.segments, replica.block_size) if prompt.segments else None
        hashes = hashes_of(prompt, replica, layout, named)
        if not hashes:
            continue
        step = -(-len(hashes) // MAX_ASKED)
        asked = range(len(hashes) - 1, -1, -step)
        ends = [(0, (each + 1) * replica.block_size) if layout is None else segment_end(layout, each) for each in asked]
        queries.append(BlockQuery(number, replica, [hashes[each][:HINT_BYTES] for each in asked], ends))
    return queries


def hashes_of(
    prompt: TokenizedRequest,
    replica: Replica,
    layout: Layout | None,
    named: dict[tuple[str, int, str, bytes], list[bytes]],
) -> list[bytes]:
    """The hashes of the prompt's whole blocks, as the replica names them."""
    placed = place_images(prompt.prompt_token_ids, prompt.images, prompt.image_token_id)
    token_ids, salt, size = placed.token_ids[:-1], prompt.scheduling.cache_salt, replica.block_size
    key = (replica.kv_fingerprint, size, salt, token_ids.tobytes() + repr(prompt.segments).encode())
    if key not in named:
        root = prefix_root(replica.kv_fingerprint, salt=salt)
        named[key] = (
            prefix_hashes(root, token_ids.tolist(), size)
            if layout is None
            else segment_hashes(root, token_ids.tolist(), layout)
        )
    return named[key]


def segment_end(layout: Layout, block: int) -> tuple[int, int]:
    """The segment of a block, and how many of the segment's tokens are up to the block's end."""
    number = layout.at(block * layout.block_size)
    return number, min(layout.segments[number].num_tokens, (block + 1) * layout.block_size - layout.starts[number])
