"""Prompts come to the replica that has their prefix, and what becomes of that replica changes no byte."""

import asyncio
import signal
import time
from collections import Counter
from typing import Any

import pytest

from shared.wire.registry import RENEW_EVERY_S
from shared.wire.replica import Replica
from shared.wire.streams import offers_key, prefixes_key, prompts
from tests.deployment import Deployment
from tests.waiting import wait_until

MODEL = "penstock-demo"
TEXT = " ".join(f"word {number % 37} of {number}." for number in range(40))
NUM_TURNS = 4


def start(deployment: Deployment) -> None:
    """Two replicas that know what a token costs them."""
    deployment.start_all(computes=2, dtype="float32")

    def are_warm() -> bool:
        asyncio.run(warm(deployment))
        time.sleep(RENEW_EVERY_S)  # they say so in their heartbeats
        return all(each.load.step_cost_per_token_s for each in computes(deployment))

    wait_until(are_warm, description="both have measured their steps")
    time.sleep(2 * RENEW_EVERY_S)  # and the tokenizer has seen it


async def warm(deployment: Deployment) -> None:
    await asyncio.gather(
        *(asyncio.to_thread(ask, deployment, f"{number} apples. " * (number + 1)) for number in range(8))
    )


def computes(deployment: Deployment) -> list[Replica]:
    return deployment.registry().of("compute")


def ask(deployment: Deployment, text: str) -> tuple[str, float]:
    """The answer, and the share of the prompt that was found."""
    reply = deployment.post(
        "/v1/completions",
        {"model": MODEL, "prompt": text, "max_tokens": 12, "temperature": 1.0, "seed": 1, "ignore_eos": True},
    )
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    usage = answer["usage"]
    return answer["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]


def test_conversations_go_on_where_they_began(deployment: Deployment) -> None:
    start(deployment)
    for number in range(6):
        text, shares = f"{number}. {TEXT}", list[float]()
        for turn in range(NUM_TURNS):
            answer, share = ask(deployment, text)
            shares.append(share)
            text += f"{answer} {turn}?"
        assert shares[0] < 0.5 < 0.8 < min(shares[1:]), shares
    with deployment.redis() as peer:
        assert not peer.exists(offers_key(MODEL)), "all were taken up"
        assert all(peer.scard(prefixes_key(each.replica_id)) for each in computes(deployment)), (
            "both were given conversations"
        )
        assert not peer.xlen(prompts(MODEL).key)


@pytest.mark.more
def test_a_prompt_does_not_wait_for_a_replica_that_stands_still(deployment: Deployment) -> None:
    """It is stolen long before that replica is taken for dead, and again when it is killed."""
    start(deployment)
    texts = [f"{number}. {TEXT}" for number in range(6)]
    expected = [ask(deployment, text)[0] for text in texts]
    assert [ask(deployment, text)[0] for text in texts] == expected
    with deployment.redis() as peer:
        held = Counter({each.replica_id: peer.scard(prefixes_key(each.replica_id)) for each in computes(deployment)})
    [(most, _), (left, _)] = held.most_common()
    deployment.processes[most].send_signal(signal.SIGSTOP)
    try:
        answers = [ask(deployment, text)[0] for text in texts]
    finally:
        deployment.processes[most].send_signal(signal.SIGCONT)
    assert answers == expected
    deployment.kill(most)
    assert [ask(deployment, text)[0] for text in texts] == expected
    wait_until(
        lambda: [each.replica_id for each in computes(deployment)] == [left], description="the dead replica is gone"
    )
    wait_until(lambda: any(each.load.stolen for each in computes(deployment)), description="it says that it has stolen")
