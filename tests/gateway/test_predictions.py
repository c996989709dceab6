"""OpenAI's field `prediction`: which shapes it takes, what is refused, and that all choices of an
answer have it. What it counts: tests/pipeline.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from services.requests.bodies.fields import MAX_PARTS
from services.requests.bodies.ignored import HEADER
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage

CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
TEXT = {"type": "text", "text": "a"}


def post(gateways: Deployment, prediction: Any, **fields: Any) -> httpx.Response:
    return gateways.post("/v1/chat/completions", CHAT | {"prediction": prediction} | fields)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ({"type": "content", "content": "def f():\n    return 1\n"}, "def f():\n    return 1\n"),
        (
            {
                "type": "content",
                "content": [TEXT, {"type": "text", "text": "é\n"}, {"type": "input_text", "text": "b"}],
            },
            "aé\nb",
        ),
        ({"type": "content", "content": [TEXT] * MAX_PARTS}, "a" * MAX_PARTS),
        (
            {"type": "content", "content": "x" * 300_000},
            "x" * 300_000,
        ),  # a helper parses it; the tokenizer cuts it to the model's length
        ({"type": "content", "content": ""}, ""),
        ({"type": "content", "content": []}, ""),
        (None, ""),
    ],
    ids=["text", "parts", "most parts", "long", "no text", "no parts", "null"],
)
def test_a_prediction_is_a_text_or_parts(
    gateways: Deployment, backstage: Backstage, prediction: Any, expected: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(post, gateways, prediction)
        [request] = backstage.take()
        backstage.write_texts(request, ["y"])
        assert reply.result().status_code == 200, reply.result().text
    assert request.prediction == expected


@pytest.mark.parametrize("padding", ["", "x" * 100_000], ids=["", "long"])
@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("the answer", "prediction"),
        (["the answer"], "prediction"),
        (7, "prediction"),
        ({}, "prediction.type"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "content", "content": {"type": "text", "text": "a"}}, "prediction.content"),
        ({"type": "content", "content": [TEXT, "a"]}, "prediction.content[1]"),
        (
            {"type": "content", "content": [TEXT, {"type": "image_url", "image_url": {"url": "x"}}]},
            "prediction.content[1].type",
        ),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ({"type": "content", "content": [{"type": "text", "text": 7}]}, "prediction.content[0].text"),
        ({"type": "content", "content": [TEXT] * (MAX_PARTS + 1)}, "prediction.content"),
    ],
)
def test_a_bad_one_is_refused_as_openai_does(gateways: Deployment, prediction: Any, param: str, padding: str) -> None:
    reply = post(gateways, prediction, messages=[{"role": "user", "content": f"x{padding}"}])
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert param in error["message"] and set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("is_stream", [False, True])
def test_each_choice_has_the_prediction(gateways: Deployment, backstage: Backstage, is_stream: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(post, gateways, {"type": "content", "content": "a b"}, n=3, stream=is_stream)
        requests = backstage.take(3)
        for request in requests:
            backstage.write_texts(request, ["y"])
        assert reply.result().status_code == 200
    assert [request.prediction for request in requests] == ["a b"] * 3
    assert len({request.params.seed for request in requests}) == 3


def test_what_is_unknown_in_it_is_named(gateways: Deployment, backstage: Backstage) -> None:
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(post, gateways, {"type": "content", "content": "a", "lora": "x"})
        [request] = backstage.take()
        backstage.write_texts(request, ["y"])
        assert reply.result().status_code == 200 and reply.result().headers[HEADER] == "prediction.lora"
    assert request.prediction == "a"


def test_completions_pass_it_over(gateways: Deployment, backstage: Backstage) -> None:
    """OpenAI's have no such field; a client that sends it all the same loses nothing but time."""
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(
            gateways.post,
            "/v1/completions",
            {"model": NAME, "prompt": "x", "prediction": {"type": "content", "content": "a"}},
        )
        [request] = backstage.take()
        backstage.write_texts(request, ["y"])
        assert reply.result().status_code == 200 and request.prediction == ""
