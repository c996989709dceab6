"""Prefixes: the names of the blocks in this replica's prefix cache, in a set that tokenizers read, so that
they send prompts to where their prefix is."""

import time
from collections.abc import Callable

from services.compute.cache.block_manager import BlockManager
from shared.model.prefix_hash import HINT_BYTES
from shared.wire.line import Pipeline
from shared.wire.stage import Stage
from shared.wire.streams import prefixes_key

TTL_S = 10  # past the last write
WRITE_ALL_EVERY_S = 600.0  # in case Redis has lost some
AT_ONCE = 1000  # names in a command


class Prefixes:
    """Written with each write of the outbox, whose line keeps their order, and once a second. A replica that
    is alone writes none."""

    def __init__(self, stage: Stage, blocks: BlockManager, clock: Callable[[], float] = time.monotonic) -> None:
        self.stage = stage
        self.clock = clock
        self.blocks = blocks
        self.key = prefixes_key(stage.replica_id)
        self._written_at = self._all_written_at = 0.0

    @property
    def has_readers(self) -> bool:
        """Whether there is a choice between replicas."""
        return self.blocks.prefix_caching and len(self.stage.registry.of("compute", self.stage.model)) > 1

    def queue(self, pipe: Pipeline) -> None:
        """Write what has changed since the last call, or all."""
        if not self.has_readers:
            self.start_over()
            return
        now = self.clock()
        if now - self._written_at > TTL_S / 2:
            self.start_over()  # the set may have expired meanwhile
        self._written_at = now
        if self.blocks.changes is None or now - self._all_written_at > WRITE_ALL_EVERY_S:
            self._all_written_at = now
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
        """The last write may not have arrived: the next one has all names."""
        self.blocks.changes = None
