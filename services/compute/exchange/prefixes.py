"""Prefixes: which blocks are in this replica's prefix cache, as tokenizers are told, so that prompts
come to where their prefix is."""

import time

from services.compute.cache.block_manager import BlockManager
from shared.model.prefix_hash import HINT_BYTES
from shared.wire.line import Pipeline
from shared.wire.stage import Stage
from shared.wire.streams import prefixes_key

TTL_S = 10  # past the last write
TELL_ALL_EVERY_S = 600.0  # whatever Redis may have lost
AT_ONCE = 1000  # names in a command


class Prefixes:
    """Told with whatever else is written, on the one line that keeps their order, and once a second. One
    replica alone tells nothing."""

    def __init__(self, stage: Stage, blocks: BlockManager) -> None:
        self.stage = stage
        self.blocks = blocks
        self.key = prefixes_key(stage.replica_id)
        self._told_at = self._told_all_at = 0.0

    @property
    def has_readers(self) -> bool:
        """Whether there is a choice between replicas."""
        return self.blocks.prefix_caching and len(self.stage.registry.of("compute", self.stage.model)) > 1

    def queue(self, pipe: Pipeline) -> None:
        """Write what has changed since the last call, or all."""
        if not self.has_readers:
            self.start_over()
            return
        now = time.monotonic()
        if now - self._told_at > TTL_S / 2:
            self.start_over()  # the set may have expired meanwhile
        self._told_at = now
        if self.blocks.changes is None or now - self._told_all_at > TELL_ALL_EVERY_S:
            self._told_all_at = now
            pipe.unlink(self.key)
            changes = dict.fromkeys(self.blocks.cached_blocks, True)
        else:
            changes = self.blocks.changes
        self.blocks.changes = {}
        for write, is_cached in ((pipe.sadd, True), (pipe.srem, False)):
            names = [name[:HINT_BYTES] for name, here in changes.items() if here == is_cached]
            for first in range(0, len(names), AT_ONCE):
                write(self.key, *names[first : first + AT_ONCE])
        pipe.expire(self.key, TTL_S)

    def start_over(self) -> None:
        """Nobody knows what arrived: all of it is told again."""
        self.blocks.changes = None
