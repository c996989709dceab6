"""Cells: a Redis Cluster spreads keys over its servers, and the scripts that write a step need all
of theirs on one.

So all keys of a pipeline begin with the same hash tag, `{CELL}:`, and have one slot: a cell. A
large deployment has several cells, and the cluster spreads these. Processes connect to the primary
that has the slot, and ask the cluster's nodes for it again whenever a connection is made.

The tag is put on in one place, when a command is packed: no caller has to know of it. Keys that Redis
returns still have it: `without_cell` takes it off.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import ClusterDownError, MovedError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, SentinelManagedConnection

from shared.wire.line import DENIED, reason_of
from shared.wire.redis_urls import DiscoveryUrl

TAG = re.compile(rb"^\{[^}]*\}:")
MOVED = (MovedError, ClusterDownError)  # or its server is cut off from the others
UNREACHABLE = (redis.ConnectionError, redis.TimeoutError, redis.ResponseError, OSError)

# Commands by where they have their keys.
NO_KEYS = """
    AUTH BGREWRITEAOF CLIENT CLUSTER COMMAND CONFIG DBSIZE DEBUG DISCARD EXEC FLUSHALL HELLO INFO LATENCY MULTI
    PING SAVE SCRIPT SELECT SLOWLOG TIME
    UNWATCH WAIT WAITAOF
"""
FIRST_KEY = """
    DECRBY DUMP EXPIRE EXPIRETIME GET GETDEL HDEL HEXISTS HGET HGETALL HINCRBY HINCRBYFLOAT HKEYS HLEN HMGET HSET
    HSETNX HVALS INCR INCRBY LINDEX LLEN
    LPOP LPUSH LRANGE LREM LTRIM OBJECT PERSIST PEXPIRE PTTL RESTORE RPOP RPUSH SADD SCARD SET SETEX SISMEMBER
    SMEMBERS SREM STRLEN TTL TYPE XACK XADD
    XAUTOCLAIM XCLAIM XDEL XGROUP XINFO XLEN XPENDING XRANGE XREVRANGE XTRIM ZADD ZCARD ZCOUNT ZINCRBY ZRANGE
    ZRANGEBYSCORE ZREM ZREMRANGEBYRANK
    ZREMRANGEBYSCORE ZREVRANGE ZREVRANK ZSCORE
"""
ALL_KEYS = ("DEL", "EXISTS", "MGET", "TOUCH", "UNLINK", "WATCH")
ALL_BUT_LAST = ("BLPOP", "BRPOP")
# commands with their keys elsewhere have a branch in keys_of
PLACES = dict.fromkeys(NO_KEYS.split(), range(0)) | dict.fromkeys(FIRST_KEY.split(), range(1, 2))


def keys_of(arguments: Sequence[Any]) -> range:
    """The places of a command's keys among its arguments. redis-py writes a subcommand as a word of the
    first argument. Raises ValueError for an unknown command."""
    name = arguments[0].partition(" ")[0].upper()
    if (place := PLACES.get(name)) is not None:
        return place
    if name in ("EVAL", "EVALSHA"):
        return range(3, 3 + int(arguments[2]))
    if name in ("XREAD", "XREADGROUP"):
        begin = next(index for index, each in enumerate(arguments) if each in (b"STREAMS", "STREAMS")) + 1
        return range(begin, begin + (len(arguments) - begin) // 2)
    if name in ALL_KEYS:
        return range(1, len(arguments))
    if name in ALL_BUT_LAST:
        return range(1, len(arguments) - 1)
    if name == "SCAN" and b"MATCH" in arguments:
        return range(arguments.index(b"MATCH") + 1, arguments.index(b"MATCH") + 2)
    raise ValueError(f"no cell for {name}: shared/wire/cells.py does not know where its keys are")


def in_cell(prefix: str, arguments: Sequence[Any]) -> list[Any]:
    """The command with the prefix before each of its keys."""
    prefixed, encoded = list(arguments), prefix.encode()
    for index in keys_of(arguments):
        key = prefixed[index]
        prefixed[index] = encoded + key if isinstance(key, bytes) else prefix + key
    return prefixed


def without_cell(key: bytes) -> bytes:
    """A key that Redis returned, without the tag of its cell. No key begins with a brace by itself."""
    return TAG.sub(b"", key)


class Nodes:
    """The nodes of a cluster, used like Sentinels: they name the primary of a cell's slot."""

    def __init__(self, named: DiscoveryUrl) -> None:
        self.named = named
        self.slot: int = key_slot(named.prefix.encode())
        self.addresses = list(named.addresses)  # in the order in which they are asked
        self.reason = "they know of none"  # or why the last node gave no answer

    def discover_master(self, _: str) -> tuple[str, int]:
        """The primary's address. Raises MasterNotFoundError, a ConnectionError."""
        for address in tuple(self.addresses):
            try:
                with redis.Redis(*address, retry=Retry(NoBackoff(), 0), **self.named.own_options) as node:
                    slots = node.execute_command("CLUSTER SLOTS")
            except DENIED:
                raise
            except UNREACHABLE as error:
                self.reason = reason_of(error)
                continue
            if (primary := self.learn(address, slots)) is not None:
                return primary
        raise self.not_found

    @property
    def not_found(self) -> MasterNotFoundError:
        return MasterNotFoundError(
            f"no node of the Redis Cluster names a primary for the cell {self.named.cell!r}: {self.reason}"
        )

    def learn(self, address: tuple[str, int], slots: list[list[Any]]) -> tuple[str, int] | None:
        """The primary, as the node at the address says. slots: ranges, each with its primary and then
        its replicas. The node, and those that it knows, are asked next time."""
        servers = {
            (first, last): [(host_of(node, address[0]), node[1]) for node in nodes] for first, last, *nodes in slots
        }
        known = [each for found in servers.values() for each in found]
        kept = [each for each in self.addresses if each in known or each in self.named.addresses]
        self.addresses = list(dict.fromkeys([address, *kept, *known]))
        return next((found[0] for (first, last), found in servers.items() if first <= self.slot <= last), None)

    def was_wrong(self) -> None:
        """The slot is not where the first node said: ask that node last from now on."""
        self.addresses.append(self.addresses.pop(0))


def host_of(node: list[Any], asked: str) -> str:
    """A server's host in CLUSTER SLOTS; the asked node's host if there is none."""
    host = (node[0] or b"").decode()
    return asked if host in ("", "?") else host


class ClusterConnection(SentinelManagedConnection):
    """A connection to the primary of a cell."""

    def connect_to(self, address: tuple[str, int]) -> None:
        try:
            super().connect_to(address)  # type: ignore[no-untyped-call]
        except UNREACHABLE:
            self.connection_pool.sentinel_manager.was_wrong()
            raise

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().read_response(*arguments, **options)
        except MOVED:
            self.connection_pool.sentinel_manager.was_wrong()
            self.disconnect()  # type: ignore[no-untyped-call]
            raise redis.ConnectionError("the cell has moved to another server") from None


@dataclass(frozen=True, slots=True)
class CellPacker:
    """redis-py's packer of commands, for a cell."""

    prefix: str
    packer: Any

    def pack(self, *arguments: Any) -> Any:
        return self.packer.pack(*in_cell(self.prefix, arguments))


class CellConnection(ClusterConnection):
    """A ClusterConnection that puts the cell's tag before the keys of every command."""

    def _construct_command_packer(self, packer: Any) -> CellPacker:
        plain = super()._construct_command_packer(packer)  # type: ignore[no-untyped-call]
        return CellPacker(self.connection_pool.sentinel_manager.named.prefix, plain)
