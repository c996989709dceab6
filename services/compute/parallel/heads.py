"""Which heads of attention are a rank's."""

from dataclasses import dataclass
from typing import Protocol

from services.compute.parallel.share import Share


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


def heads_of(config: HeadCounts, share: Share, *, may_repeat: bool = True) -> tuple[HeadsOfRank, ...]:
    """The heads of each rank: all on all, where a norm spans them. may_repeat: see divide_heads."""
    if config.is_qk_norm_joint:
        return (HeadsOfRank(range(config.num_heads), range(config.num_kv_heads)),) * share.size
    return divide_heads(config.num_heads, config.num_kv_heads, share, may_repeat=may_repeat)


def divide_heads(num_heads: int, num_kv_heads: int, share: Share, *, may_repeat: bool = True) -> tuple[HeadsOfRank, ...]:
    """The heads of each rank: KV heads with all query heads that read them; or, if may_repeat, as many
    query heads on each rank, and a KV head on all ranks that read it, if then the rank that has most
    to do has less."""
    sharing = num_heads // num_kv_heads
    by_kv = tuple(HeadsOfRank(range(each.start * sharing, each.stop * sharing), each) for each in share.parts(num_kv_heads, unit=1))
    by_queries = tuple(HeadsOfRank(each, _read_by(each, sharing)) for each in share.parts(num_heads, unit=1))
    return by_queries if may_repeat and _most(by_queries) < _most(by_kv) else by_kv


def _read_by(queries: range, sharing: int) -> range:
    return range(queries.start // sharing, -(-queries.stop // sharing)) if queries else range(0)


def _most(of_ranks: tuple[HeadsOfRank, ...]) -> int:
    """The heads of q, k and v on the rank that has most."""
    return max(len(each.queries) + 2 * len(each.kv) for each in of_ranks)
