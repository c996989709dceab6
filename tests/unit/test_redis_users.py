"""The users of deploy/redis/users.acl: what `make verify SUITE=redis` shows with a Redis of its
own, as far as the embedded server can.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import redis

from shared.model.sampling_params import SamplingParams
from shared.wire.entries import LEAVE_GROUP
from shared.wire.messages import Offer, RequestError, TokenEvent, TokenizedRequest, decode
from shared.wire.offers import STEAL, TAKE_UP, offer
from shared.wire.streams import (
    GATEWAY_ID,
    MESSAGE,
    REQUEST_ID,
    RUNNING_LOG_TTL_S,
    SERVED,
    held_key,
    inflight_key,
    log_key,
    offered,
    offers_key,
    open_key,
    prefixes_key,
    prompts,
    reader_key,
    replica_key,
    served_key,
    stored_key,
)
from shared.wire.token_log import end_request, end_waiting, queue_find_waiting
from tests.redis_users import MAY, OWN_CONNECTION, add_users, as_user, risky_commands

STAGES = ("gateway", "tokenizer", "compute", "sampler", "jobs")


@pytest.fixture
def server(redis_url: str) -> "Iterator[redis.Redis]":
    add_users(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.mark.parametrize("user", MAY)
def test_no_user_may_disturb_others(user: str, server: Any) -> None:
    """Some commands are about the server, other connections, scripts or channels: a user may send
    those that its stage needs.
    """
    names = risky_commands(server)
    allowed = {
        name
        for name, arguments in names.items()
        if b"no permissions to run" not in server.execute_command("ACL", "DRYRUN", user, *arguments)
    }
    assert allowed == MAY[user] | (OWN_CONNECTION & names.keys())


def test_each_stage_can_end_a_request_and_only_jobs_can_list_keys(server: "redis.Redis", redis_url: str) -> None:
    for user in STAGES:
        request_id = f"resp_{user}.0"
        server.hset(inflight_key("m"), mapping={"": 5, request_id: 5})
        server.hset(reader_key(f"resp_{user}"), mapping={"generation": 1, "gateway": "gateway-1"})
        server.expire(reader_key(f"resp_{user}"), RUNNING_LOG_TTL_S)
        server.hset(open_key(f"resp_{user}"), mapping={"left": 1, "account": held_key("t"), "size": 9, "keeps": 0})
        server.zadd(held_key("t"), {f"9/resp_{user}": 2**40})
        server.set(stored_key(f"resp_{user}"), "asked")
        with redis.Redis.from_url(as_user(redis_url, user)) as client:
            pipe = client.pipeline(transaction=False)
            end_request(pipe, "m", request_id, None, error=RequestError("too long", 400))
            pipe.execute()
            for command in (["RANDOMKEY"], *([["SCAN", "0"]] if user != "jobs" else [])):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*command)
        assert server.xlen(log_key(request_id)) == 1 and not server.hexists(inflight_key("m"), request_id)
        assert not server.exists(open_key(f"resp_{user}"), stored_key(f"resp_{user}"), held_key("t"))
    assert server.xlen("events:gateway-1") == len(STAGES), "who reads a request hears of its end"


def test_tokenizers_offer_prompts_and_computes_take_them(server: "redis.Redis", redis_url: str) -> None:
    stream, message = (
        prompts("m"),
        TokenizedRequest("r.0", None, "m", SamplingParams(max_tokens=1), np.array([5], np.int32), ()),
    )
    clients: dict[str, Any] = {
        user: redis.Redis.from_url(as_user(redis_url, user)) for user in ("tokenizer", "compute")
    }
    try:
        clients["compute"].xgroup_create(stream.key, stream.group, id="0", mkstream=True)
        clients["compute"].set(replica_key("compute", "c"), "here")
        clients["compute"].sadd(prefixes_key("c"), b"12345678")
        assert clients["tokenizer"].execute_command("SMISMEMBER", prefixes_key("c"), b"12345678") == [1]
        assert clients["tokenizer"].xpending(stream.key, stream.group)["pending"] == 0
        for _ in range(2):
            with clients["tokenizer"].pipeline(transaction=True) as pipe:
                offer(pipe, stream, message, "c", 0)
                pipe.execute()
        told = clients["compute"].xrange(offered("c").key)
        assert len(told) == 2
        entry = decode(Offer, told[0][1][MESSAGE]).entry_id
        assert len(TAKE_UP.call(clients["compute"], [stream.key, offers_key("m")], stream.group, "c", entry)) == 1
        assert STEAL.call(clients["compute"], [stream.key, offers_key("m")], stream.group, "d", 9)[1] == 1
        LEAVE_GROUP.call(clients["compute"], [stream.key], stream.group, "c")
        clients["compute"].unlink(prefixes_key("c"), offered("c").key)
    finally:
        for client in clients.values():
            client.close()


def test_gateways_end_what_waits_in_vain_and_keda_sees_how_much_waits(server: "redis.Redis", redis_url: str) -> None:
    """Models are remembered by gateways and by workers of batches; tokenizers read that."""
    stream = prompts("m")
    server.xgroup_create(stream.key, stream.group, id="0", mkstream=True)
    entry_id: Any = server.xadd(stream.key, {MESSAGE: b"-", REQUEST_ID: "resp_1.0", GATEWAY_ID: ""})
    clients: dict[str, Any] = {
        user: redis.Redis.from_url(as_user(redis_url, user)) for user in ("gateway", "jobs", "tokenizer", "keda")
    }
    try:
        for user in ("gateway", "jobs"):
            pipe = clients[user].pipeline(transaction=False)
            pipe.set(served_key("compute", "m"), b"said", ex=9)
            pipe.sadd(SERVED, "compute:m")
            pipe.expire(SERVED, 9)
            pipe.smembers(SERVED)
            pipe.mget(served_key("compute", "m"))
            pipe.execute()
        assert clients["tokenizer"].get(served_key("compute", "m")) == b"said"
        clients["gateway"].srem(SERVED, "compute:m")
        assert (
            clients["keda"].xinfo_groups(stream.key)[0]["lag"] == 1
            and clients["keda"].xpending(stream.key, stream.group)["pending"] == 0
        )
        for command in (["XRANGE", stream.key, "-", "+"], ["GET", served_key("compute", "m")]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                clients["keda"].execute_command(*command)
        pipe = clients["gateway"].pipeline(transaction=False)
        queue_find_waiting(pipe, stream, 1, 9)
        end_waiting(
            pipe,
            stream,
            "gateway-1",
            entry_id,
            "m",
            TokenEvent("resp_1.0", 0, None, "", finish_reason="error", error=RequestError("late", 503)),
            None,
        )
        assert pipe.execute()[0] == [[entry_id, b"resp_1.0", b""]]
        assert server.xlen(log_key("resp_1.0")) == 1 and server.xlen(stream.key) == 0
    finally:
        for client in clients.values():
            client.close()
