"""Which heads of attention are a rank's."""

from dataclasses import dataclass
from typing import Protocol

from services.compute.ranks.parallel.share import Share


class HeadCounts(Protocol):
    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def is_qk_norm_joint(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class HeadsOfRank:
    """Some query heads of a layer, and the KV heads that they read."""

    queries: range
    kv: range


def heads_of(config: HeadCounts, size: int, *, may_repeat: bool = True) -> tuple[HeadsOfRank, ...]:
    """The heads of each rank: all on all, where a norm spans them. may_repeat: see divide_heads."""
    if config.is_qk_norm_joint:
        return (HeadsOfRank(range(config.num_heads), range(config.num_kv_heads)),) * size
    return divide_heads(config.num_heads, config.num_kv_heads, size, may_repeat=may_repeat)


def divide_heads(num_heads: int, num_kv_heads: int, size: int, *, may_repeat: bool = True) -> tuple[HeadsOfRank, ...]:
    """The heads of each rank. A KV head is on one rank, with all query heads that read it. If may_repeat,
    it may be on several, which divide its query heads: where the rank with the most columns of q, k and
    v then has fewer, and no rank has more KV heads than the one with the most had."""
    sharing = num_heads // num_kv_heads
    by_kv = [range(each.start * sharing, each.stop * sharing) for each in Share(0, size).parts(num_kv_heads, unit=1)]
    divisions = [by_kv]
    if may_repeat:
        divisions.append(list(Share(0, size).parts(num_heads, unit=1)))
        if size > num_kv_heads:
            divisions.append(_by_ranks(sharing, Share(0, num_kv_heads).parts(size, unit=1)))
    found = [
        tuple(HeadsOfRank(query, range(query.start // sharing, -(-query.stop // sharing))) for query in queries)
        for queries in divisions
    ]
    return min((each for each in found if _most_kv(each) <= _most_kv(found[0])), key=_most_columns)


def _by_ranks(sharing: int, ranks: tuple[range, ...]) -> list[range]:
    """The query heads of each rank. Each rank of a KV head gets a share of its query heads. ranks: of each KV head."""
    parts = [
        (kv_head * sharing, part)
        for kv_head, own in enumerate(ranks)
        for part in Share(0, len(own)).parts(sharing, unit=1)
    ]
    return [range(first + part.start, first + part.stop) for first, part in parts]


def _most_kv(of_ranks: tuple[HeadsOfRank, ...]) -> int:
    return max(len(each.kv) for each in of_ranks)


def _most_columns(of_ranks: tuple[HeadsOfRank, ...]) -> int:
    """The heads of q, k and v on the rank that has most."""
    return max(len(each.queries) + 2 * len(each.kv) for each in of_ranks)
