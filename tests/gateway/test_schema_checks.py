"""Parts of a schema that can't be enforced are checked at an answer's end: also of one read later,
from where its stream broke off, or by a batch's worker.
"""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import redis.asyncio

from services.jobs.asking import Asked, fold_choices
from services.jobs.reading import read_answer
from services.requests.store.record import read_response
from services.requests.workers.grammars import answers
from services.requests.workers.grammars.answers import NOT_CHECKED, AnswerChecker
from shared.wire.messages import GenerateRequest
from shared.wire.streams import response_key, response_of
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.conftest import start_gateways
from tests.gateway.test_resuming import resume

NAMES = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
SCHEMA = {"type": "object", "properties": {"names": NAMES}, "required": ["names"], "additionalProperties": False}
TOKENS = ['{"names":', '["a",', '"a"]', "}"]
BROKEN = [{"index": 0, "path": "$.names", "message": "uniqueItems does not hold"}]


def answered(
    gateways: Deployment, backstage: Backstage, path: str, **fields: Any
) -> tuple[httpx.Response, GenerateRequest]:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(gateways.post, path, {"model": NAME, **fields})
        [request] = backstage.take()
        backstage.write_texts(request, TOKENS)
        return asked.result(), request


def told(text: str) -> list[Any]:
    """The schema errors in a stream's chunks."""
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    return [
        (chunk.get("response") or chunk)["penstock"]["schema_errors"]
        for chunk in chunks
        if "penstock" in (chunk.get("response") or chunk)
    ]


def test_a_stream_that_is_resumed_is_checked_from_its_beginning(gateways: Deployment, backstage: Backstage) -> None:
    stream, request = answered(gateways, backstage, "/v1/completions", prompt="x", guided_json=SCHEMA, stream=True)
    assert told(stream.text) == [BROKEN]
    for position in ("0", "1", "3"):
        assert told(resume(gateways, response_of(request.request_id), position).text) == [BROKEN], position


def test_a_response_is_checked_each_time_that_it_is_read(gateways: Deployment, backstage: Backstage) -> None:
    form = {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}
    for background in (True, False):
        reply, _ = answered(gateways, backstage, "/v1/responses", input="Hi", background=background, **form)
        response_id = reply.json()["id"]
        whole = gateways.get(f"/v1/responses/{response_id}").json()
        assert (whole["status"], whole["penstock"]["schema_errors"]) == ("completed", BROKEN)
        assert told(gateways.get(f"/v1/responses/{response_id}?stream=true").text) == [BROKEN]


def test_the_worker_of_a_batch_checks_what_it_reads(
    gateways: Deployment, backstage: Backstage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "CHECK_TIMEOUT_S", 600.0)
    _, request = answered(gateways, backstage, "/v1/completions", prompt="x", guided_json=SCHEMA, stream=True)
    response_id = response_of(request.request_id)

    async def read() -> Any:
        async with redis.asyncio.Redis.from_url(gateways.redis_url) as client:
            record = read_response(response_id, await client.get(response_key(response_id)))
            assert record is not None
            checker = AnswerChecker()
            try:
                return await read_answer(
                    client, Asked(record, [request], b"", fold_choices), asyncio.Semaphore(1), checker
                )
            finally:
                await checker.helpers.stop()

    body, totals = asyncio.run(read())
    assert body["penstock"]["schema_errors"] == BROKEN and totals.completed == 1


def test_a_stream_s_pings_go_on_while_its_answer_is_checked(deployment: Deployment, own: Backstage) -> None:
    del deployment.programs["gateway"]  # the tests' own waits for minutes
    start_gateways(deployment)
    slow = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "not": {"properties": {"a": {"pattern": "^(a+)+$"}}},
    }
    chat = {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": slow}},
    }
    form = {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": slow}}}
    answer = ['{"a":"', "a" * 60, '!"}']
    for path, fields in (
        ("/v1/chat/completions", chat),
        ("/v1/responses", form),
        ("/v1/responses", form | {"background": True}),
    ):
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(deployment.post, path, {"model": NAME, "stream": True, **fields})
            [request] = own.take()
            own.write_texts(request, answer)
            text = asked.result().text
        [[problem]] = told(text)
        assert problem["message"].startswith(NOT_CHECKED), path
        assert text.rpartition('!\\"}')[0].count("\n\n\n") or text.count("\n\n\n"), "no ping"
