"""Prefixes: which blocks are in this replica's prefix cache, as tokenizers are told, so that prompts
come to where their prefix is."""

import time

from services.compute.cache.block_manager import BlockManager
from shared.wire.line import Pipeline
from shared.wire.stage import Stage
from shared.wire.streams import prefixes_key

TTL_S = 10  # past the last write
TELL_ALL_EVERY_S = 60.0  # whatever was lost on the way
NAME_BYTES = 8  # of a hash: enough for a hint
AT_ONCE = 1000  # names in a command


class Prefixes:
    """Told with whatever else is written, and once a second. One replica alone tells nothing."""

    def __init__(self, stage: Stage, blocks: BlockManager) -> None:
        self.stage = stage
        self.blocks = blocks
        self.key = prefixes_key(stage.replica_id)
        self._told_all_at = 0.0

    def queue(self, pipe: Pipeline) -> None:
        """Write what has changed since the last call, or all."""
        if not self.blocks.prefix_caching or len(self.stage.registry.of("compute", self.stage.model)) < 2:
            self.start_over()
            return
        now = time.monotonic()
        if self.blocks.changes is None or now - self._told_all_at > TELL_ALL_EVERY_S:
            self._told_all_at = now
            pipe.delete(self.key)
            changes = dict.fromkeys(self.blocks.cached_blocks, True)
        else:
            changes = self.blocks.changes
        self.blocks.changes = {}
        for write, is_cached in ((pipe.sadd, True), (pipe.srem, False)):
            names = [name[:NAME_BYTES] for name, here in changes.items() if here == is_cached]
            for first in range(0, len(names), AT_ONCE):
                write(self.key, *names[first : first + AT_ONCE])
        pipe.expire(self.key, TTL_S)

    def start_over(self) -> None:
        """Nobody knows what arrived: all of it is told again."""
        self.blocks.changes = None
