"""Anthropic's batches, as far as a gateway without workers takes them."""

from typing import Any

import anthropic
import pytest

from services.gateway.api.anthropic.routes import result_of
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage

QUESTION: list[Any] = [{"role": "user", "content": "Hi"}]


def asked(custom_id: str) -> Any:
    return {"custom_id": custom_id, "params": {"model": NAME, "max_tokens": 9, "messages": QUESTION}}


def test_a_batch_is_made_listed_and_cancelled_and_one_that_runs_is_not_deleted(
    gateways: Deployment, backstage: Backstage
) -> None:
    with anthropic.Anthropic(base_url=gateways.url(), api_key="any", max_retries=0, timeout=60) as client:
        ids = [client.messages.batches.create(requests=[asked("a"), asked("b")]).id for _ in range(3)]
        made = client.messages.batches.retrieve(ids[0])
        assert (made.processing_status, made.request_counts.processing, made.results_url) == ("in_progress", 2, None)
        assert (made.expires_at - made.created_at).total_seconds() == 24 * 3600
        first = client.messages.batches.list(limit=2)
        assert len(first.data) == 2 and first.has_more
        assert len(list(client.messages.batches.list(limit=1))) == 3
        with pytest.raises(anthropic.BadRequestError, match="has not ended"):
            client.messages.batches.delete(ids[0])
        assert gateways.get(f"/v1/messages/batches/{ids[0]}/results").json()["error"]["type"] == "invalid_request_error"
        cancelled = client.messages.batches.cancel(ids[0])
        assert cancelled.processing_status == "canceling" and cancelled.cancel_initiated_at
        with pytest.raises(anthropic.NotFoundError, match="No batch found"):
            client.messages.batches.retrieve("msgbatch_0")


@pytest.mark.parametrize(
    ("requests", "word"),
    [([], "requests"), ([asked("no space")], "custom_id"), ([asked("one"), asked("one")], "stands twice")],
)
def test_what_no_worker_could_read_is_refused_at_once(gateways: Deployment, requests: Any, word: str) -> None:
    refused = gateways.post("/v1/messages/batches", {"requests": requests})
    assert (refused.status_code, refused.json()["type"]) == (400, "error") and word in refused.json()["error"][
        "message"
    ]


def test_a_line_of_our_batches_is_a_result_of_anthropic_s() -> None:
    line = {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "k", "body": {"type": "message"}},
        "error": None,
    }
    assert result_of(line) == {"custom_id": "a", "result": {"type": "succeeded", "message": {"type": "message"}}}
    wrong = {"status_code": 400, "request_id": "k", "body": {"error": {"message": "top_k must be"}}}
    told = {"type": "error", "error": {"type": "invalid_request_error", "message": "top_k must be"}, "request_id": "k"}
    assert result_of(line | {"response": wrong})["result"] == {"type": "errored", "error": told}
    for code, kind in (("batch_cancelled", "canceled"), ("batch_expired", "expired")):
        assert result_of(line | {"response": None, "error": {"code": code, "message": "x"}})["result"] == {"type": kind}
