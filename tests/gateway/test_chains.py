"""Chains of stored responses: each turn is kept once or twice, whatever the number of turns, and
each response is read as if it kept all of them.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import orjson
import redis

from shared.wire.streams import held_bytes_key, held_key, stored_key
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.conftest import start_gateways

TURN = "word " * 400  # 2,000 bytes


def say(gateways: Deployment, backstage: Backstage, text: str, before: str | None = None) -> str:
    """One turn. Returns the response's id."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            gateways.post, "/v1/responses", {"model": NAME, "input": text, "previous_response_id": before}
        )
        [request] = backstage.take()
        backstage.write_texts(request, [f"answer to {text[:8]}"])
        reply = asked.result()
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def inputs(gateways: Deployment, response_id: str) -> list[str]:
    """The users' turns of a response's conversation, as far as they are told apart."""
    reply = gateways.get(f"/v1/responses/{response_id}/input_items?order=asc&limit=100")
    assert reply.status_code == 200, reply.text
    return [_text(item)[:8] for item in reply.json()["data"] if item["role"] == "user"]


def _text(item: Any) -> str:
    content = item["content"]
    return content if isinstance(content, str) else content[0]["text"]


def test_a_chain_takes_memory_for_each_turn_and_not_for_all_before_it(deployment: Deployment, own: Backstage) -> None:
    start_gateways(deployment)
    with redis.Redis.from_url(deployment.redis_url) as client:
        turns = [f"turn-{number:02} {TURN}" for number in range(12)]
        chain: list[str] = []
        for turn in turns:
            chain.append(say(deployment, own, turn, chain[-1] if chain else None))
        sizes = [client.strlen(stored_key(each)) for each in chain]
        assert max(sizes[:-2]) < len(TURN) < 10 * len(TURN) < min(sizes[-2:]), sizes
        assert int(client.get(held_key("") + held_bytes_key("")) or 0) == sum(sizes), (
            "the tenant's account has what is there"
        )
        assert orjson.loads(client.get(stored_key(chain[-1]))).keys() == {"asked", "items"}, (
            "what is whole is as it always was"
        )
        for number, response_id in enumerate(chain):
            assert inputs(deployment, response_id) == [turn[:8] for turn in turns[: number + 1]]

        branch = say(deployment, own, "branched", chain[3])  # from one that names another
        assert inputs(deployment, branch) == [*(turn[:8] for turn in turns[:4]), "branched"]
        for gone in (5, 11, 4, 10):  # links, and those that keep
            assert (
                httpx.delete(f"{deployment.url()}/v1/responses/{chain[gone]}", timeout=60, trust_env=False).status_code
                == 200
            )
            chain[gone] = ""
            for number, response_id in enumerate(chain):
                if response_id:
                    assert inputs(deployment, response_id) == [turn[:8] for turn in turns[: number + 1]], (gone, number)
        kept = [client.strlen(stored_key(each)) for each in (*filter(None, chain), branch)]
        assert int(client.get(held_key("") + held_bytes_key("")) or 0) == sum(kept)


def test_a_record_of_a_newer_version_is_another_gateways_to_read(deployment: Deployment, own: Backstage) -> None:
    start_gateways(deployment)
    response_id = say(deployment, own, "hello")
    with redis.Redis.from_url(deployment.redis_url) as client:
        known = client.get(stored_key(response_id))
        for other in (orjson.dumps(orjson.loads(known) | {"of_tomorrow": 1}), b"no JSON", b"[]"):
            client.set(stored_key(response_id), other)
            reply = deployment.get(f"/v1/responses/{response_id}")
            assert (reply.status_code, reply.headers["retry-after"], reply.json()["error"]["code"]) == (
                503,
                "2",
                "stored_response_unreadable",
            )
            going_on = deployment.post(
                "/v1/responses", {"model": NAME, "input": "more", "previous_response_id": response_id}
            )
            assert (going_on.status_code, going_on.json()["error"]["code"]) == (503, "stored_response_unreadable")
        client.set(stored_key(response_id), known)
    assert inputs(deployment, response_id) == ["hello"]
