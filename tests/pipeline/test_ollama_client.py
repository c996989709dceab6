"""The `ollama` package against a real pipeline."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import numpy as np
import ollama
import pytest

from services.gateway.api.ollama.routes import rounded
from services.requests.dialects.ollama.schemas import read_messages
from tests.deployment import MODEL, Deployment
from tests.pipeline.test_openai_client import ANSWER

QUESTION = [{"role": "user", "content": "What is Penstock?"}]
GREEDY = {"temperature": 0, "num_ctx": 2048, "num_gpu": 1, "mirostat": 0}


@pytest.fixture(scope="module")
def client(demo: Deployment) -> Iterator[ollama.Client]:
    with ollama.Client(host=demo.url(), trust_env=False) as client:
        yield client


def test_a_chat_is_answered_with_counts_and_durations(client: ollama.Client) -> None:
    reply = client.chat(model=MODEL, messages=QUESTION, options=GREEDY)
    assert reply.message.content == ANSWER and reply.message.role == "assistant"
    assert (reply.done, reply.done_reason, reply.prompt_eval_count, reply.eval_count) == (True, "stop", 7, 37)
    assert reply.total_duration >= reply.prompt_eval_duration + reply.eval_duration > 0


def test_a_stream_is_lines_that_make_the_answer(client: ollama.Client) -> None:
    parts = list(client.chat(model=f"{MODEL}:latest", messages=QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 37 and len(parts) > 10


def test_generate_renders_a_chat_unless_it_is_raw(demo: Deployment, client: ollama.Client) -> None:
    assert client.generate(model=MODEL, prompt="What is Penstock?", options=GREEDY).response == ANSWER
    parts = list(client.generate(model=MODEL, prompt="What is Penstock?", options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == ANSWER
    raw = client.generate(model=MODEL, prompt="The", raw=True, options=GREEDY | {"num_predict": 8})
    same = demo.client().completions.create(model=MODEL, prompt="The", temperature=0, max_tokens=8)
    assert (raw.response, raw.done_reason) == (same.choices[0].text, "length")


def test_options_are_the_chat_s(demo: Deployment, client: ollama.Client) -> None:
    options = {
        "temperature": 1.5,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 7,
        "num_predict": 12,
        "repeat_penalty": 1.1,
        "stop": ["zzz"],
    }
    more: Any = {
        "temperature": 1.5,
        "seed": 7,
        "max_tokens": 12,
        "stop": ["zzz"],
        "extra_body": {"repetition_penalty": 1.1},
    }
    same = demo.client().chat.completions.create(model=MODEL, messages=QUESTION, **more)
    assert (
        client.chat(model=MODEL, messages=QUESTION, options=options).message.content == same.choices[0].message.content
    )
    stopped = client.chat(model=MODEL, messages=QUESTION, options=GREEDY | {"stop": ["pipeline of"]})
    assert stopped.message.content == ANSWER.partition("pipeline of")[0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 2, "top_p": 0},
        {"temperature": 2, "top_p": -1},
        {"temperature": -1, "min_p": -1, "top_k": -7, "repeat_penalty": 0},
        {"temperature": 0, "num_predict": 900.0, "seed": 7.0, "num_ctx": 2048.0},
    ],
)
def test_numbers_mean_what_they_mean_to_ollama(client: ollama.Client, options: dict[str, Any]) -> None:
    assert client.chat(model=MODEL, messages=QUESTION, options=options).message.content == ANSWER


def test_a_template_of_ollama_s_is_passed_over_and_named(demo: Deployment) -> None:
    reply = demo.post(
        "/api/generate",
        {
            "model": MODEL,
            "prompt": "What is Penstock?",
            "template": "{{ .Prompt }}",
            "stream": False,
            "options": GREEDY,
        },
    )
    assert reply.json()["response"] == ANSWER and "template" in reply.headers["X-Penstock-Ignored"].split(", ")


@pytest.mark.parametrize("nothing", ["", []])
def test_vectors_of_nothing_are_none(demo: Deployment, client: ollama.Client, nothing: Any) -> None:
    assert client.embed(model=MODEL, input=nothing).embeddings == []
    assert demo.post("/api/embeddings", {"model": MODEL, "prompt": ""}).json() == {"embedding": []}
    with pytest.raises(ollama.ResponseError) as refused:
        client.embed(model="none", input=nothing)
    assert refused.value.status_code == 404


def test_the_async_client_gets_the_same(demo: Deployment) -> None:
    async def run() -> str:
        async with ollama.AsyncClient(host=demo.url(), trust_env=False) as client:
            stream = await client.chat(model=MODEL, messages=QUESTION, options=GREEDY, stream=True)
            return "".join([part.message.content async for part in stream])

    assert asyncio.run(run()) == ANSWER


def test_a_format_and_offered_tools_are_the_chat_s(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["pipe", "lock"]}, "at": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["name", "at"],
        "additionalProperties": False,
    }
    for stream in (False, True):
        options = {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "seed": 5, "num_predict": 900}
        parts: Any = client.chat(model=MODEL, messages=QUESTION, format=schema, options=options, stream=stream)
        jsonschema.validate(
            json.loads("".join(part.message.content for part in parts) if stream else parts.message.content), schema
        )
    plain = client.chat(
        model=MODEL,
        messages=QUESTION,
        tools=[{"type": "function", "function": {"name": "look"}}],
        options=GREEDY | {"num_predict": 8},
    )
    assert plain.message.content and not plain.message.tool_calls


def test_models_are_listed_and_shown(demo: Deployment, client: ollama.Client) -> None:
    [listed], [running] = client.list().models, client.ps().models
    assert listed.model == running.model == MODEL
    assert listed.digest == running.digest and re.fullmatch("[0-9a-f]{64}", listed.digest or ""), (
        "Ollama's command line fails at less"
    )
    shown = client.show(MODEL)
    meta = demo.get("/v1/models").json()["data"][0]["meta"]
    assert listed.size == running.size == meta["size"] > 100_000
    for details in (listed.details, running.details, shown.details):
        assert details is not None and (
            details.family,
            details.families,
            details.format,
            details.quantization_level,
        ) == (
            "llama",
            ["llama"],
            "safetensors",
            "BF16",
        )
        assert details.parameter_size == rounded(meta["n_params"])
    assert (shown.modelinfo["general.architecture"], shown.modelinfo["general.parameter_count"]) == (
        "llama",
        meta["n_params"],
    )
    assert shown.modelinfo["llama.context_length"] == 1024 and shown.capabilities == ["completion", "tools"]
    assert (
        demo.post("/api/show", {"model": "", "name": MODEL}).json() == demo.post("/api/show", {"model": MODEL}).json()
    ), "as older clients say it"
    assert demo.post("/api/show", {"model": ""}).json() == demo.post("/api/show", {"model": MODEL}).json(), (
        "the only one"
    )
    assert demo.get("/api/version").json()["version"]
    assert client.generate(model=MODEL).done_reason == "load"


@pytest.mark.parametrize(
    ("count", "words"), [(7_241_732_096, "7.2B"), (134_515_008, "134.52M"), (81_000, "81K"), (7, "7")]
)
def test_parameters_are_counted_in_ollama_s_words(count: int, words: str) -> None:
    assert rounded(count) == words


def test_embeddings_are_openai_s(demo: Deployment, client: ollama.Client) -> None:
    texts = ["What is Penstock?", "The"]
    same = demo.client().embeddings.create(model=MODEL, input=texts)
    reply = client.embed(model=f"{MODEL}:latest", input=texts)
    assert [np.float32(vector).tolist() for vector in reply.embeddings] == [
        np.float32(each.embedding).tolist() for each in same.data
    ]
    assert reply.prompt_eval_count == same.usage.prompt_tokens and reply.total_duration > 0
    one = np.array(client.embeddings(model=MODEL, prompt="The").embedding)
    assert np.allclose(one / np.linalg.norm(one), same.data[1].embedding, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"options": {"temperature": 1000}}, "options.temperature"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"stop": ["x" * 1000]}}, "options.stop"),
        ({"messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, "reads text only"),
    ],
)
def test_what_is_wrong_is_named_in_ollama_s_shape(client: ollama.Client, more: dict[str, Any], name: str) -> None:
    with pytest.raises(ollama.ResponseError, match=name) as caught:
        client.chat(**({"model": MODEL, "messages": QUESTION} | more))
    assert caught.value.status_code == 400


def test_other_errors_have_the_shape_too(demo: Deployment, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(model="nobody", messages=QUESTION)
    assert caught.value.status_code == 404
    wrong = httpx.post(demo.url() + "/api/chat", content=b"{", timeout=10, trust_env=False)
    assert wrong.status_code == 400 and list(wrong.json()) == ["error"]


def test_a_conversation_with_calls_keeps_their_order() -> None:
    calls = [{"function": {"name": name, "arguments": {"at": "here"}}} for name in ("weather", "time")]
    messages = read_messages(
        [
            {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
            {"role": "tool", "content": "rain", "tool_name": "weather"},
            {"role": "tool", "content": "noon", "tool_name": "time"},
        ]
    )
    assert (
        [call["id"] for call in messages[0]["tool_calls"]]
        == ["call_0_0", "call_0_1"]
        == [message["tool_call_id"] for message in messages[1:]]
    )
    assert (
        messages[0]["reasoning_content"] == "Hm."
        and messages[0]["tool_calls"][0]["function"]["arguments"] == '{"at":"here"}'
    )


def test_calls_that_have_ids_keep_them() -> None:
    calls = [{"id": each, "function": {"name": "weather", "arguments": {}}} for each in ("one", "two")]
    messages = read_messages(
        [
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "content": "rain", "tool_call_id": "two"},
            {"role": "tool", "content": "snow"},
        ]
    )
    assert [call["id"] for call in messages[0]["tool_calls"]] == ["one", "two"]
    assert [message["tool_call_id"] for message in messages[1:]] == ["two", "one"]
