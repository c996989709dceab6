"""Anthropic's batches, by its own package, through a real worker."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.deployment import MODEL, Deployment
from tests.pipeline.test_openai_client import ANSWER
from tests.waiting import wait_until

QUESTION: list[Any] = [{"role": "user", "content": "What is Penstock?"}]


@pytest.fixture(scope="module")
def client(demo: Deployment) -> Iterator[anthropic.Anthropic]:
    demo.wait_live(demo.start("jobs"))
    with anthropic.Anthropic(base_url=demo.url(), api_key="any", max_retries=0, timeout=120) as client:
        yield client
    for worker in [name for name in demo.processes if name.startswith("jobs")]:
        assert demo.terminate(worker) == 0


def asked(custom_id: str, **more: Any) -> Any:
    return {
        "custom_id": custom_id,
        "params": {"model": MODEL, "max_tokens": 100, "messages": QUESTION, "temperature": 0} | more,
    }


def ended(client: anthropic.Anthropic, batch_id: str) -> Any:
    def is_over() -> Any:
        batch = client.messages.batches.retrieve(batch_id)
        return batch if batch.processing_status == "ended" else None

    return wait_until(is_over, description="the batch has ended", timeout_s=180)


def test_a_batch_of_messages_is_answered_and_each_request_has_its_result(client: anthropic.Anthropic) -> None:
    requests = [
        asked("good"),
        asked("bad", temperature=-1),
        asked("absent", model="claude"),
        asked("long", max_tokens=32_000),
    ]
    made = client.messages.batches.create(requests=requests)
    assert (made.type, made.request_counts.processing, made.results_url) == (
        "message_batch",
        4,
        None,
    ) and made.id.startswith("msgbatch_")
    batch = ended(client, made.id)
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing, counts.canceled, counts.expired) == (
        2,
        2,
        0,
        0,
        0,
    ) and batch.ended_at
    found = {each.custom_id: each.result for each in client.messages.batches.results(made.id)}
    assert found["good"].type == "succeeded" and found["good"].message.content[0].text == ANSWER
    assert found["good"].message.stop_reason == "end_turn" and found["long"].type == "succeeded"
    assert (found["bad"].type, found["bad"].error.error.type) == (
        "errored",
        "invalid_request_error",
    ) and "temperature" in found["bad"].error.error.message
    assert found["absent"].error.error.type == "not_found_error"


def test_batches_are_listed_cancelled_and_deleted(client: anthropic.Anthropic) -> None:
    ids = [client.messages.batches.create(requests=[asked("one")]).id for _ in range(3)]
    for batch_id in ids:
        ended(client, batch_id)
    first = client.messages.batches.list(limit=2)
    assert [each.id for each in first.data] == ids[:0:-1] and first.has_more
    assert ids[0] in [each.id for each in client.messages.batches.list(limit=1, after_id=ids[1]).data]
    assert [each.id for each in client.messages.batches.list(limit=1, before_id=ids[0]).data] == [ids[1]]
    assert client.messages.batches.cancel(ids[0]).processing_status == "ended"  # one that has ended stays as it is
    assert client.messages.batches.delete(ids[0]).type == "message_batch_deleted"
    for gone in (client.messages.batches.retrieve, client.messages.batches.delete):
        with pytest.raises(anthropic.NotFoundError, match="No batch found"):
            gone(ids[0])


def test_a_batch_that_is_cancelled_says_so_of_what_was_not_answered(client: anthropic.Anthropic) -> None:
    endless = {"max_tokens": 900, "messages": [{"role": "user", "content": "word " * 20}]}
    made = client.messages.batches.create(requests=[asked(f"r{number}", **endless) for number in range(300)])
    with pytest.raises(anthropic.BadRequestError, match="has not ended"):
        client.messages.batches.delete(made.id)
    assert client.messages.batches.cancel(made.id).processing_status in ("canceling", "ended")
    counts = ended(client, made.id).request_counts
    assert counts.canceled > 0 and counts.canceled + counts.succeeded + counts.errored == 300
    kinds = [each.result.type for each in client.messages.batches.results(made.id)]
    assert kinds.count("canceled") == counts.canceled and len(kinds) == 300
