"""Prompts that are offered to the replica that has their prefix: whatever comes between, each is
with one replica, and none is lost.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from msgspec.structs import replace

from services.compute.cache.block_manager import BlockManager
from services.compute.exchange.prefixes import AT_ONCE, Prefixes
from services.tokenizer.affinity import MAX_ASKED, Affinity
from shared.model.prefix_hash import prefix_hashes, prefix_root
from shared.model.sampling_params import SamplingParams
from shared.process.stage_settings import StageSettings
from shared.wire.entries import RELEASED_MS, GroupReader, append_to_group
from shared.wire.load import Load
from shared.wire.messages import EmbeddingParams, Offer, SchedulingParams, TokenizedRequest, decode
from shared.wire.offers import offer, steal, take_up
from shared.wire.registry import Registry
from shared.wire.replica import Replica
from shared.wire.streams import MESSAGE, offered, offers_key, prefixes_key, prompts, replica_key
from tests.conftest import running_redis
from tests.stages.line_of_stages import MODEL, LocalStage, replica

STREAM = prompts(MODEL)
NAMES = ("compute-1", "compute-2", "compute-3")


def prompt(name: str, token_ids: list[int] = [5, 6], salt: str = "") -> TokenizedRequest:  # noqa: B006
    params = SamplingParams(max_tokens=4)
    return TokenizedRequest(
        name, None, MODEL, params, np.array(token_ids, np.int32), (), scheduling=SchedulingParams(cache_salt=salt)
    )


class Place:
    """Some replicas' readers, each with a connection of its own."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url)
        self.client.flushall()
        self.stages = {name: LocalStage("compute", StageSettings(redis_url=url, replica_id=name)) for name in NAMES}
        self.readers = {name: GroupReader(stage.transport, STREAM, name) for name, stage in self.stages.items()}
        self.readers["compute-1"].ensure_group()
        for name in NAMES:
            self.client.set(replica_key("compute", name), b"here")

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
        return [each.message.request_id for each in steal(self.readers[compute_id], MODEL, count).deliveries]

    def read(self, compute_id: str, count: int = 8) -> list[str]:
        return [each.message.request_id for each in self.readers[compute_id].read(count=count, block_ms=1)[0]]

    def entry_of(self, request_id: str) -> bytes:
        entries: Any = self.client.xrange(STREAM.key)
        return next(
            bytes(entry_id)
            for entry_id, values in entries
            if decode(TokenizedRequest, values[MESSAGE]).request_id == request_id
        )

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
    loot = steal(place.readers["compute-2"], MODEL, 2)
    assert (
        [each.message.request_id for each in loot.deliveries] == ["0.0", "1.0"]
        and not loot.dead
        and loot.num_stolen == 2
    )
    assert not any(each.was_claimed or each.was_released for each in loot.deliveries), "nobody has begun it"
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


def test_what_a_batch_has_no_choice_for_comes_after_what_it_has(place: Place) -> None:
    with place.client.pipeline(transaction=True) as pipe:
        for number in range(3):
            offer(pipe, STREAM, prompt(f"{number}.0"), "compute-1", 60_000)
        append_to_group(pipe, STREAM, prompt("any.0"))
        pipe.execute()
    assert place.take_up("compute-1") == ["0.0", "1.0", "2.0"] and place.read("compute-2") == ["any.0"]


def test_a_replica_that_has_left_is_given_nothing(place: Place) -> None:
    place.client.delete(replica_key("compute", "compute-1"))
    place.offer("a.0", "compute-1")
    assert place.read("compute-2") == ["a.0"] and not place.client.exists(offers_key(MODEL))


def test_a_replica_that_leaves_just_then_takes_nothing_with_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has seen that nothing is pending with it, and one more is given to it before its name goes."""
    leaving = place.readers["compute-1"]
    leave = leaving.leave

    def leave_late(pipe: Any) -> None:
        if not place.told("compute-1"):
            place.offer("a.0", "compute-1", wait_ms=0)
        leave(pipe)

    monkeypatch.setattr(leaving, "leave", leave_late)
    leaving.release_all()
    assert place.steal("compute-2") == ["a.0"]
    monkeypatch.undo()
    leaving.release_all()
    assert [each["name"] for each in place.client.xinfo_consumers(STREAM.key, STREAM.group)] == [b"compute-2"]


def test_what_runs_is_not_stolen_though_its_offer_was_never_taken_up(place: Place) -> None:
    """A replica left, came back under its name, and claimed what it had released."""
    place.offer("a.0", "compute-1", wait_ms=0)
    reader = place.readers["compute-1"]
    place.stages["compute-1"].transport.run(lambda pipe: reader.release(pipe, [place.entry_of("a.0")]))
    time.sleep(0.2)  # longer than the tolerance of offers.lua
    assert [each.message.request_id for each in reader.claim(idle_ms=1000, count=1)[0]] == ["a.0"]
    assert place.steal("compute-2") == [] and place.take_up("compute-1") == []


def test_a_full_redis_refuses_all_or_nothing(place: Place) -> None:
    """The entry that stands for the request is acknowledged only with the prompt."""
    place.client.xadd("requests", {"m": b"1"}, id="1-0")
    place.client.config_set("maxmemory", 1)
    try:
        with place.client.pipeline(transaction=True) as pipe:
            offer(pipe, STREAM, prompt("a.0"), "compute-1", 60_000)
            pipe.xdel("requests", "1-0")
            with pytest.raises(redis.RedisError):
                pipe.execute()
    finally:
        place.client.config_set("maxmemory", 0)
    assert place.client.xlen("requests") == 1 and not place.client.xlen(STREAM.key)


def test_a_replica_that_comes_late_to_its_own_offer_steals_from_nobody(place: Place) -> None:
    place.offer("a.0", "compute-1", wait_ms=0)
    loot = steal(place.readers["compute-1"], MODEL, 2)
    assert len(loot.deliveries) == 1 and loot.num_stolen == 0


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_in_any_order_each_prompt_is_with_one_replica_and_none_is_lost(place: Place, seed: int) -> None:
    rng, running, seen, number = random.Random(seed), dict[str, str](), set[str](), 0
    for _ in range(120):
        name = rng.choice(NAMES)
        match rng.choice(("offer", "offer", "append", "take", "steal", "read", "end", "leave")):
            case "offer":
                place.offer(f"{number}.0", name, wait_ms=rng.choice((0, 0, 60_000)))
                number += 1
            case "append":
                append_to_group(place.client, STREAM, prompt(f"{number}.0"))
                number += 1
            case "end" if running:
                ended = rng.choice(sorted(running))
                place.readers[running.pop(ended)].finish(place.client, [place.entry_of(ended)])
            case "leave":
                place.readers[name].release_all()
                running = {each: who for each, who in running.items() if who != name}  # whoever claims them
            case ("take" | "steal" | "read") as what:
                found = {"take": place.take_up, "steal": place.steal, "read": place.read}[what](name)
                assert not seen & set(found), "it was taken before"
                seen |= set(found)
                running |= dict.fromkeys(found, name)
        pending = {
            each["message_id"]: each["consumer"].decode()
            for each in place.client.xpending_range(STREAM.key, STREAM.group, "-", "+", 999)
        }
        assert all(pending[place.entry_of(each)] == who for each, who in running.items())
    for name in NAMES:
        seen |= set(place.take_up(name) + place.steal(name, 999) + place.read(name, 999))
    seen |= {each.message.request_id for each in place.readers["compute-1"].claim(idle_ms=RELEASED_MS, count=999)[0]}
    assert seen == {f"{each}.0" for each in range(number)}


def compute(name: str) -> Replica:
    return replace(
        replica("compute", name),
        load=Load(max_num_seqs=16, step_cost_per_token_s=0.001),
        kv_fingerprint="kv",
        block_size=4,
    )


def tell(place: Place, compute_id: str, token_ids: list[int], salt: str = "") -> None:
    place.client.sadd(
        prefixes_key(compute_id), *(each[:8] for each in prefix_hashes(prefix_root("kv", salt=salt), token_ids, 4))
    )


def choose(place: Place, *asked: TokenizedRequest, replicas: list[Replica]) -> list[tuple[str, float] | None]:
    stage = place.stages["compute-1"]
    stage.live = Registry(tuple(replicas))
    return [each and (each.compute_id, round(each.wait_s, 6)) for each in Affinity(stage, STREAM, MODEL).choose(asked)]


def test_a_prompt_goes_where_most_of_it_is(place: Place) -> None:
    tokens = list(range(100, 140))
    tell(place, "compute-1", tokens[:8])
    tell(place, "compute-2", tokens[:24])
    both = [compute("compute-1"), compute("compute-2")]
    assert choose(place, prompt("a.0", tokens), replicas=both) == [("compute-2", 0.024)]
    assert choose(place, prompt("a.0", tokens[:24]), replicas=both) == [("compute-2", 0.020)], (
        "its last token is computed in any case"
    )
    assert choose(place, prompt("a.0", tokens, salt="mine"), prompt("b.0", [1, *tokens]), replicas=both) == [None, None]
    tell(place, "compute-1", tokens, "mine")
    assert choose(place, prompt("a.0", tokens, salt="mine"), prompt("b.0", [1, 2]), replicas=both) == [
        ("compute-1", 0.036),
        None,
    ]
    assert choose(place, prompt("a.0", tokens), replicas=both[:1]) == [None], "there is nothing to choose"
    scored = replace(prompt("a.0", tokens), params=SamplingParams(max_tokens=4, prompt_logprobs=1))
    pooled = replace(prompt("a.0", tokens), embedding=EmbeddingParams("mean"))
    assert choose(place, scored, pooled, replicas=both) == [None, None], "all of them is computed"
    assert choose(place, prompt("a.0", tokens), replicas=[both[0], replace(both[1], kv_fingerprint="other")]) == [
        ("compute-1", 0.008)
    ]
    assert choose(
        place, prompt("a.0", tokens), replicas=[both[0], replace(both[1], block_size=0), compute("compute-3")]
    ) == [("compute-1", 0.008)]


def test_a_replica_with_much_more_to_do_gets_nothing(place: Place) -> None:
    tokens = list(range(100, 140))
    tell(place, "compute-1", tokens)
    for running, others, is_chosen in (
        (3, 0, True),
        (4, 0, False),
        (9, 4, True),
        (10, 4, False),
        (15, 15, True),
        (16, 16, False),
    ):
        for name, count in (("compute-1", running), ("compute-2", others)):
            while (
                len(held := place.client.xpending_range(STREAM.key, STREAM.group, "-", "+", 99, consumername=name))
                < count
            ):
                append_to_group(place.client, STREAM, prompt("other.0"))
                place.read(name, 1)
            place.readers[name].finish(place.client, [each["message_id"] for each in held[count:]])
        found = choose(place, prompt("a.0", tokens), replicas=[compute("compute-1"), compute("compute-2")])
        assert found == [("compute-1", 0.036) if is_chosen else None]
    place.client.delete(STREAM.key)
    place.readers["compute-1"].ensure_group()
    many = [prompt(f"{number}.0", tokens) for number in range(12)]
    found = choose(place, *many, replicas=[compute("compute-1"), compute("compute-2")])
    assert found[:4] == [("compute-1", 0.036)] * 4 and found[4:] == [None] * 8, "what was just sent counts"


def test_a_long_prompt_is_asked_for_at_some_places_and_its_end(place: Place) -> None:
    tokens = list(range(1, 2002))
    tell(place, "compute-2", tokens)
    assert choose(place, prompt("a.0", tokens), replicas=[compute("compute-1"), compute("compute-2")]) == [
        ("compute-2", 2.0)
    ]
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
    place.client.delete(prefixes_key("compute-1"))
    told._written_at -= 6
    assert len(tell_them()) == 2 * AT_ONCE + 1, "and all of it, when the set may have expired"
