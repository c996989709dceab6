"""Prompts that are offered to the replica that has their prefix: whatever comes between, each is with one replica, and none is lost."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from services.compute.cache.block_manager import BlockManager
from services.compute.exchange.prefixes import AT_ONCE, Prefixes
from services.tokenizer.affinity import MAX_ASKED, Affinity
from shared.model.prefix_hash import prefix_hashes, prefix_root
from shared.model.sampling_params import SamplingParams
from shared.process.settings import StageSettings
from shared.wire.entries import GroupReader, append_to_group
from shared.wire.load import Load
from shared.wire.messages import Offer, SchedulingParams, TokenizedRequest, decode
from shared.wire.offers import offer, steal, take_up
from shared.wire.registry import Registry
from shared.wire.replica import Replica
from shared.wire.streams import MESSAGE, offered, offers_key, prefixes_key, prompts
from tests.conftest import running_redis
from tests.stages.line_of_stages import MODEL, LocalStage, replica

STREAM = prompts(MODEL)
NAMES = ("compute-1", "compute-2", "compute-3")


def prompt(name: str, token_ids: list[int] = [5, 6], salt: str = "") -> TokenizedRequest:  # noqa: B006
    params = SamplingParams(max_tokens=4)
    return TokenizedRequest(name, None, MODEL, params, np.array(token_ids, np.int32), (), scheduling=SchedulingParams(cache_salt=salt))


class Place:
    """Some replicas' readers, each with a connection of its own."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url)
        self.client.flushall()
        self.stages = {name: LocalStage("compute", StageSettings(redis_url=url, replica_id=name)) for name in NAMES}
        self.readers = {name: GroupReader(stage.transport, STREAM, name) for name, stage in self.stages.items()}
        self.readers["compute-1"].ensure_group()

    def offer(self, name: str, compute_id: str, wait_ms: int = 60_000) -> None:
        with self.client.pipeline(transaction=True) as pipe:
            offer(pipe, STREAM, prompt(name), compute_id, wait_ms)
            pipe.execute()

    def told(self, compute_id: str) -> list[str]:
        """The entries that the replica was told of."""
        return [decode(Offer, values[MESSAGE]).entry_id for _, values in self.client.xrange(offered(compute_id).key)]

    def take_up(self, compute_id: str) -> list[str]:
        return [each.message.request_id for each in take_up(self.readers[compute_id], MODEL, self.told(compute_id))[0]]

    def steal(self, compute_id: str, count: int = 8) -> list[str]:
        return [each.message.request_id for each in steal(self.readers[compute_id], MODEL, count)[0]]

    def read(self, compute_id: str, count: int = 8) -> list[str]:
        return [each.message.request_id for each in self.readers[compute_id].read(count=count, block_ms=1)[0]]

    def entry_of(self, request_id: str) -> bytes:
        entries: Any = self.client.xrange(STREAM.key)
        return next(bytes(entry_id) for entry_id, values in entries if decode(TokenizedRequest, values[MESSAGE]).request_id == request_id)

    def close(self) -> None:
        for stage in self.stages.values():
            stage.transport.close()
        self.client.close()


@pytest.fixture
def place(tmp_path: Path, redis_binary: Path | None) -> Iterator[Place]:
    with running_redis(tmp_path, redis_binary) as url:
        found = Place(url)
        yield found
        found.close()


def test_an_offered_prompt_is_with_its_replica_before_that_knows_it(place: Place) -> None:
    place.offer("a.0", "compute-1")
    assert place.read("compute-2") == [], "nobody else reads it"
    assert place.steal("compute-2") == [], "or steals it before its time"
    assert place.take_up("compute-1") == ["a.0"] and place.take_up("compute-1") == []
    assert not place.client.exists(offers_key(MODEL))
    assert place.client.xpending(STREAM.key, STREAM.group)["consumers"] == [{"name": b"compute-1", "pending": 1}]
    assert 0 < place.client.ttl(offered("compute-1").key) <= 600


def test_a_prompt_that_waits_too_long_is_stolen_once(place: Place) -> None:
    for number in range(3):
        place.offer(f"{number}.0", "compute-1", wait_ms=0)
    deliveries, dead = steal(place.readers["compute-2"], MODEL, 2)
    assert [each.message.request_id for each in deliveries] == ["0.0", "1.0"] and not dead
    assert not any(each.was_claimed or each.was_released for each in deliveries), "nobody has begun it"
    assert place.steal("compute-3") == ["2.0"] and place.steal("compute-2") == []
    assert place.take_up("compute-1") == []
    [pending, *_] = place.client.xpending_range(STREAM.key, STREAM.group, "-", "+", 9)
    assert (pending["consumer"], pending["times_delivered"]) == (b"compute-2", 1), "whoever it kills is the first"


def test_behind_others_that_wait_a_prompt_waits_for_whoever_comes(place: Place) -> None:
    append_to_group(place.client, STREAM, prompt("first.0"))
    place.offer("second.0", "compute-1")
    assert place.told("compute-1") == [] and not place.client.exists(offers_key(MODEL))
    assert place.read("compute-2") == ["first.0", "second.0"]
    place.offer("third.0", "compute-1")
    assert place.take_up("compute-1") == ["third.0"]


def test_without_a_group_yet_it_waits_like_any(place: Place) -> None:
    place.client.flushall()
    place.offer("a.0", "compute-1")
    place.readers["compute-2"].ensure_group()
    assert place.read("compute-2") == ["a.0"]


def test_what_was_claimed_or_has_ended_is_neither_taken_up_nor_stolen(place: Place) -> None:
    """Its replica was thought to be dead, and comes back."""
    place.offer("claimed.0", "compute-1", wait_ms=0)
    place.offer("ended.0", "compute-1", wait_ms=0)
    deliveries, _ = place.readers["compute-2"].claim(idle_ms=0, count=2)
    place.readers["compute-2"].finish(place.client, [deliveries[1].entry_id])
    assert place.take_up("compute-1") == []
    place.offer("claimed.1", "compute-1", wait_ms=0)
    place.readers["compute-2"].claim(idle_ms=0, count=9)
    assert place.steal("compute-3") == [] and not place.client.exists(offers_key(MODEL))


@pytest.mark.parametrize("seed", range(12))
def test_in_any_order_each_prompt_is_with_one_replica_and_none_is_lost(place: Place, seed: int) -> None:
    rng, running, seen, number = random.Random(seed), dict[str, str](), set[str](), 0
    for _ in range(120):
        name = rng.choice(NAMES)
        match rng.choice(("offer", "offer", "append", "take", "steal", "read", "end")):
            case "offer":
                place.offer(f"{number}.0", name, wait_ms=rng.choice((0, 0, 60_000)))
                number += 1
            case "append":
                append_to_group(place.client, STREAM, prompt(f"{number}.0"))
                number += 1
            case "end" if running:
                ended = rng.choice(sorted(running))
                place.readers[running.pop(ended)].finish(place.client, [place.entry_of(ended)])
            case ("take" | "steal" | "read") as what:
                found = {"take": place.take_up, "steal": place.steal, "read": place.read}[what](name)
                assert not seen & set(found), "it was taken before"
                seen |= set(found)
                running |= dict.fromkeys(found, name)
        pending = {each["message_id"]: each["consumer"].decode() for each in place.client.xpending_range(STREAM.key, STREAM.group, "-", "+", 999)}
        assert all(pending[place.entry_of(each)] == who for each, who in running.items())
    for name in NAMES:
        seen |= set(place.take_up(name) + place.steal(name, 999) + place.read(name, 999))
    assert seen == {f"{each}.0" for each in range(number)}


def compute(name: str, *, running: int = 0, **more: object) -> Replica:
    load = Load(running=running, waiting=0, max_num_seqs=16, step_cost_per_token_s=0.001)
    return replace(replica("compute", name), load=load, kv_fingerprint="kv", block_size=4, **more)


def tell(place: Place, compute_id: str, token_ids: list[int], salt: str = "") -> None:
    place.client.sadd(prefixes_key(compute_id), *(each[:8] for each in prefix_hashes(prefix_root("kv", salt=salt), token_ids, 4)))


def choose(place: Place, *asked: TokenizedRequest, replicas: list[Replica]) -> list[tuple[str, float] | None]:
    stage = place.stages["compute-1"]
    stage.live = Registry(tuple(replicas))
    return [each and (each.compute_id, round(each.wait_s, 6)) for each in Affinity(stage, MODEL).choose(asked)]


def test_a_prompt_goes_where_most_of_it_is(place: Place) -> None:
    tokens = list(range(100, 140))
    tell(place, "compute-1", tokens[:8])
    tell(place, "compute-2", tokens[:24])
    both = [compute("compute-1"), compute("compute-2")]
    assert choose(place, prompt("a.0", tokens), replicas=both) == [("compute-2", 0.024)]
    assert choose(place, prompt("a.0", tokens[:24]), replicas=both) == [("compute-2", 0.020)], "its last token is computed in any case"
    assert choose(place, prompt("a.0", tokens, salt="mine"), prompt("b.0", [1, *tokens]), replicas=both) == [None, None]
    tell(place, "compute-1", tokens, "mine")
    assert choose(place, prompt("a.0", tokens, salt="mine"), prompt("b.0", [1, 2]), replicas=both) == [("compute-1", 0.036), None]
    assert choose(place, prompt("a.0", tokens), replicas=both[:1]) == [None], "there is nothing to choose"
    assert choose(place, prompt("a.0", tokens), replicas=[both[0], replace(both[1], kv_fingerprint="other")]) == [("compute-1", 0.008)]
    assert choose(place, prompt("a.0", tokens), replicas=[both[0], replace(both[1], block_size=0), compute("compute-3")]) == [("compute-1", 0.008)]


def test_a_replica_with_much_more_to_do_gets_nothing(place: Place) -> None:
    tokens = list(range(100, 140))
    tell(place, "compute-1", tokens)
    for running, others, is_chosen in ((3, 0, True), (4, 0, False), (9, 4, True), (10, 4, False), (15, 15, True), (16, 16, False)):
        found = choose(place, prompt("a.0", tokens), replicas=[compute("compute-1", running=running), compute("compute-2", running=others)])
        assert found == [("compute-1", 0.036) if is_chosen else None]
    many = [prompt(f"{number}.0", tokens) for number in range(12)]
    found = choose(place, *many, replicas=[compute("compute-1"), compute("compute-2")])
    assert found[:4] == [("compute-1", 0.036)] * 4 and found[4:] == [None] * 8, "what was just sent counts"


def test_a_long_prompt_is_asked_for_at_some_places_and_its_end(place: Place) -> None:
    tokens = list(range(1, 2002))
    tell(place, "compute-2", tokens)
    assert choose(place, prompt("a.0", tokens), replicas=[compute("compute-1"), compute("compute-2")]) == [("compute-2", 2.0)]
    place.client.delete(prefixes_key("compute-2"))
    tell(place, "compute-2", tokens[:1000])
    [found] = choose(place, prompt("a.0", tokens), replicas=[compute("compute-1"), compute("compute-2")])
    assert found is not None and 1.0 - 2 * 2.0 / MAX_ASKED <= found[1] <= 1.0


def test_replicas_tell_what_is_in_their_prefix_caches(place: Place) -> None:
    stage, blocks = place.stages["compute-1"], BlockManager(4, 4)
    told, names = Prefixes(stage, blocks), [bytes([number]) * 16 for number in range(8)]

    def tell_them() -> set[bytes]:
        stage.transport.run(told.queue)
        return {bytes(each) for each in place.client.smembers(prefixes_key("compute-1"))}

    blocks.cached_blocks = dict.fromkeys(names[:2], 0)
    stage.live = Registry((compute("compute-1"),))
    assert tell_them() == set() and blocks.changes is None, "nobody chooses among one"
    stage.live = Registry((compute("compute-1"), compute("compute-2")))
    assert tell_them() == {each[:8] for each in names[:2]}
    assert blocks.changes == {} and 0 < place.client.ttl(prefixes_key("compute-1")) <= 10
    blocks.changes = {names[0]: False, names[5]: True}
    assert tell_them() == {names[1][:8], names[5][:8]}
    blocks.cached_blocks = dict.fromkeys((number.to_bytes(16, "little") for number in range(2 * AT_ONCE + 1)), 0)
    told.start_over()
    assert len(tell_them()) == 2 * AT_ONCE + 1, "and all of it, when nobody knows what arrived"
