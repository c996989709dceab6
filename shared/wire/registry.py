"""The registry: replicas announce themselves in Redis, renew every second, and are dead once their
lease has run out.

Expiry is Redis's own, so the replicas' clocks need not agree. A sequence's sampler is chosen by
rendezvous hashing over the live ones: every process that looks at the same replicas chooses the
same, and a replica that leaves moves only its own sequences.
"""

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NoReturn

from redis.exceptions import RedisError

from shared.process.errors import Invalid
from shared.process.telemetry import get_logger
from shared.wire.line import DENIED, Pipeline, reason_of, without_command
from shared.wire.messages import Control, decode, encode
from shared.wire.replica import Replica
from shared.wire.script import load_script
from shared.wire.streams import CONTROL, REPLICAS, WATCHED, replica_key, view_key
from shared.wire.transport import Transport, is_temporary
from shared.wire.views import ComputeView

log = get_logger("penstock.registry")

RENEW_EVERY_S = 1.0
RENEW_WATCHED_EVERY_S = 0.5  # while a client looks at the live view
LEASE_S = 4.0
# between two looks: a lease that was good at the first may be out at the second, and its owner
# alive
BLIND_AFTER_S = LEASE_S - RENEW_EVERY_S
# a loop that has not come round for this long, while its heartbeat reached Redis, is not alive
STUCK_AFTER_S = 30.0
BROADCAST = load_script("broadcast")


@dataclass(frozen=True, slots=True)
class Registry:
    """The live replicas, as of one look. Times are monotonic, s.

    Absence counts only over time in which this replica could see. While Redis is away, or this
    process is stopped, leases run out and prove nothing.
    """

    replicas: tuple[Replica, ...] = ()
    is_watched: bool = False  # a client looks at the live view
    looked_at: float = -math.inf
    seen_since: float = -math.inf  # no two looks since then were far apart; -inf: none ever were

    def of(self, stage: str, model: str | None = None) -> list[Replica]:
        return [r for r in self.replicas if r.stage == stage and (model is None or r.model == model)]

    def ids(self, stage: str, model: str | None = None) -> set[str]:
        return {replica.replica_id for replica in self.of(stage, model)}

    def sight_since(self, now: float) -> float:
        """Since when this replica sees without a gap; `now`: it does not see at the moment."""
        return self.seen_since if now - self.looked_at <= BLIND_AFTER_S else now


def follow(before: Registry, found: Registry, now: float) -> Registry:
    """The registry after a look that was begun at `now`. After a gap, whoever was alive before it
    has a lease's time to come back."""
    is_gap = now - before.looked_at > BLIND_AFTER_S and before.looked_at > -math.inf
    seen_since = now if is_gap else before.seen_since
    replicas = found.replicas
    if now - seen_since <= LEASE_S:
        names = {(replica.stage, replica.replica_id) for replica in replicas}
        replicas += tuple(replica for replica in before.replicas if (replica.stage, replica.replica_id) not in names)
    return replace(found, replicas=replicas, looked_at=now, seen_since=seen_since)


def choose_replica(request_id: str, replica_ids: Iterable[str]) -> str | None:
    """Rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998: the live replica
    with the highest hash."""
    return max(
        replica_ids,
        key=lambda replica_id: hashlib.blake2b(f"{replica_id}/{request_id}".encode(), digest_size=8).digest(),
        default=None,
    )


def look(client: Any) -> Registry:
    """The replicas whose lease runs, by one SMEMBERS and one MGET; forgets the names of the
    dead."""
    names = sorted(
        name for name in (each.decode(errors="replace") for each in client.smembers(REPLICAS)) if ":" in name
    )
    *values, watched = client.mget([*(replica_key(*name.split(":", 1)) for name in names), WATCHED])
    dead = [name for name, value in zip(names, values, strict=True) if value is None]
    if dead:
        client.srem(REPLICAS, *dead)
    return Registry(decode_replicas(zip(names, values, strict=True)), watched is not None)


def decode_replicas(announced: Iterable[tuple[str, bytes | None]]) -> tuple[Replica, ...]:
    """The announcements that decode, of names and values; one of a newer version is as good as not
    there."""
    replicas = []
    for name, value in announced:
        try:
            if value is not None:
                replicas.append(decode(Replica, value))
        except Invalid as error:
            say_unread(name, str(error))
    return tuple(replicas)


@lru_cache(maxsize=256)
def say_unread(name: str, error: str) -> None:
    """Once: it comes again with every beat."""
    log.warning(
        "an announcement does not decode: is the replica's version newer than this one?", replica=name, error=error
    )


def unlike_replicas(computes: Iterable[Replica]) -> list[str]:
    """A warning for each model whose compute replicas have several fingerprints: one may go on with
    another's requests, and then answers with other tokens.
    """
    by_model: dict[str, dict[str, list[str]]] = {}
    for compute in computes:
        by_model.setdefault(compute.model or "", {}).setdefault(compute.fingerprint, []).append(compute.replica_id)
    return [
        f"compute replicas of {model} have different fingerprints, so an answer may change where one takes over from "
        "another: "
        + ", ".join(f"{fingerprint or 'none'} ({', '.join(sorted(ids))})" for fingerprint, ids in sorted(found.items()))
        for model, found in sorted(by_model.items())
        if len(found) > 1
    ]


class UnlikeReplicas:
    """Says in the log which compute replicas are unlike, once for each change."""

    def __init__(self) -> None:
        self._told: list[str] = []

    def tell(self, registry: Registry) -> None:
        found = unlike_replicas(registry.of("compute"))
        if found == self._told:
            return
        for each in found or ("compute replicas of each model have one fingerprint again",):
            log.warning(each)
        self._told = found


def announce(pipe: Pipeline, replica: Replica) -> None:
    """Say once that this replica is alive."""
    name = f"{replica.stage}:{replica.replica_id}"
    pipe.set(replica_key(replica.stage, replica.replica_id), encode(replica), px=int(LEASE_S * 1000))
    pipe.sadd(REPLICAS, name)


def show(pipe: Pipeline, view: ComputeView) -> None:
    """Show a view to gateways, for as long as the replica's lease."""
    pipe.set(view_key(view.replica_id), encode(view), px=int(LEASE_S * 1000))


def withdraw(pipe: Pipeline, replica: Replica) -> None:
    """Leave the registry now, and have every replica look again."""
    pipe.delete(replica_key(replica.stage, replica.replica_id))
    pipe.srem(REPLICAS, f"{replica.stage}:{replica.replica_id}")
    broadcast(pipe, Control("refresh"))


def broadcast(pipe: Pipeline, message: Control) -> None:
    """Queue a message to every replica."""
    BROADCAST.call(pipe, [CONTROL.key], encode(message))


class Heartbeat(threading.Thread):
    """Announces this replica once a second (twice while watched), sends what its stage adds, and looks
    which replicas are alive.

    It is a thread of its own, because a long prefill step must not cost a replica its lease. It
    renews nothing while the replica's loop is stuck, or is cut off from a Redis that the heartbeat
    reaches. Its transport waits for no reply that comes after the lease: a replica that leaves would
    wait for it.
    """

    def __init__(
        self,
        transport: Transport,
        describe: Callable[[], Replica],
        on_beat: Callable[[Pipeline], None],
        idle_since: Callable[[], float],
        step_timeout_s: float | None = None,
    ) -> None:
        """idle_since: when the loop last began a round with Redis' replies (monotonic, s).
        step_timeout_s: for a loop that waits for a device, which may hang without an error: after
        so long in one step the process ends."""
        super().__init__(name="heartbeat", daemon=True)
        self.step_timeout_s = step_timeout_s
        self.transport = transport
        self.describe = describe
        self.on_beat = on_beat
        self.idle_since = idle_since
        self.registry = Registry()
        # monotonic, s: the process was stopped until then, its loop as well
        self.awake_since = -math.inf
        self._wake = threading.Event()
        self._lock = threading.Lock()  # a renewal must not land after the withdrawal
        self._has_left = False

    def run(self) -> None:
        while not self.transport.stopping.is_set() or not self._has_left:
            began_at = time.monotonic()
            self._wake.wait(RENEW_WATCHED_EVERY_S if self.registry.is_watched else RENEW_EVERY_S)
            self._wake.clear()
            if time.monotonic() - began_at > LEASE_S:
                self.awake_since = time.monotonic()
            try:
                self.beat()
                self.transport.backoff.succeeded()
            except (RedisError, OSError) as error:
                if not is_temporary(error):
                    self._give_up(error)
                self.transport.backoff.failed(error)
            except Exception as error:  # a mistake of ours: without its heartbeat a replica is dead to all others
                self._give_up(error)

    def _give_up(self, error: Exception) -> NoReturn:
        """End the process: its supervisor starts another."""
        if isinstance(error, DENIED):
            log.error("Redis refuses, ending the process", error=reason_of(error))
        else:
            log.exception("the heartbeat failed, ending the process", error=repr(without_command(error)))
        os._exit(1)

    def beat(self) -> None:
        """Renew once and look once."""
        replica = self.describe()
        # what it could not see does not count
        stuck_s = time.monotonic() - max(self.idle_since(), self.transport.backoff.failed_at)
        # a step may be long, but it does not wait for Redis
        if stuck_s > STUCK_AFTER_S and (self.step_timeout_s is None or replica.problem):
            log.error("the loop is stuck, not renewing", idle_s=stuck_s, problem=replica.problem or "-")
            return
        if self.step_timeout_s is not None and replica.idle_s > self.step_timeout_s:
            log.error(
                "a step does not end, ending the process: its device hangs, or --step-timeout-s is too short",
                step_timeout_s=self.step_timeout_s,
            )
            os._exit(1)  # its leases run out, and another replica goes on with its requests
        pipe = self.transport.client.pipeline(transaction=False)
        self.on_beat(pipe)
        with self._lock:
            if not self._has_left:
                announce(pipe, replica)
            pipe.execute()
        looked_at = time.monotonic()
        self.registry = follow(self.registry, look(self.transport.client), looked_at)

    def refresh(self) -> None:
        """Look again now."""
        self._wake.set()

    def leave(self) -> None:
        """Leave the registry. The replica and its heartbeat may go on, unannounced."""
        with self._lock:
            if self._has_left:
                return
            self._has_left = True
            pipe = self.transport.client.pipeline(transaction=False)
            withdraw(pipe, self.describe())
            try:
                pipe.execute()
            except (RedisError, OSError) as error:
                log.warning("could not leave the registry, the lease will run out", error=error)
