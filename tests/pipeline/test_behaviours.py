"""Checks of llama.cpp's server tests on OpenAI's routes, in words and code of our own: each name is
a behaviour. docs/use/chat.md says what we leave out.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from shared.wire.streams import inflight_key
from tests.deployment import MODEL, Deployment
from tests.waiting import wait_until

BOOK: list[Any] = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
PROMPT = "I believe the meaning of life is"
MANY = 300  # tokens: longer than any answer that the model gives by itself
CHAT = {"model": MODEL, "messages": BOOK, "max_tokens": 8}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8}


@pytest.fixture(scope="module")
def client(demo: Deployment) -> Iterator[openai.OpenAI]:
    with demo.client() as client:
        yield client


@pytest.fixture(scope="module")
def http(demo: Deployment) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo.url(), timeout=60, trust_env=False) as http:
        yield http


def tokens_of(http: httpx.Client, text: str, **options: Any) -> list[int]:
    tokens: list[int] = http.post("/tokenize", json={"prompt": text, **options}).json()["tokens"]
    return tokens


def text_of(client: openai.OpenAI, **fields: Any) -> str:
    return str(client.completions.create(**COMPLETION | fields).choices[0].text)


@pytest.mark.parametrize(
    "content",
    ["What is the best book", [{"type": "text", "text": "What is "}, {"type": "text", "text": "the best book"}]],
)
def test_a_chat_is_answered_whole(client: openai.OpenAI, content: Any) -> None:
    reply = client.chat.completions.create(
        **CHAT | {"messages": [BOOK[0], {"role": "user", "content": content}], "temperature": 0}
    )
    assert (
        reply.id.startswith("chatcmpl-")
        and reply.object == "chat.completion"
        and reply.system_fingerprint
        and reply.model == MODEL
    )
    assert reply.usage is not None and (reply.usage.completion_tokens, reply.usage.total_tokens) == (
        8,
        reply.usage.prompt_tokens + 8,
    )
    assert (reply.choices[0].message.role, reply.choices[0].finish_reason) == ("assistant", "length") and reply.choices[
        0
    ].message.content
    asked_plainly = client.chat.completions.create(**CHAT, temperature=0)
    assert reply.choices[0].message.content == asked_plainly.choices[0].message.content


def test_a_chat_is_streamed(client: openai.OpenAI) -> None:
    first, *chunks = client.chat.completions.create(
        **CHAT, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    assert first.choices[0].delta.role == "assistant" and not first.choices[0].delta.content
    assert {chunk.id for chunk in chunks} == {first.id} and {chunk.system_fingerprint for chunk in chunks} == {
        first.system_fingerprint
    }
    *texts, end, usage = chunks
    assert all(chunk.choices[0].delta.role is None and chunk.choices[0].finish_reason is None for chunk in texts)
    assert end.choices[0].finish_reason == "length" and not end.choices[0].delta.content
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == 8
    whole = client.chat.completions.create(**CHAT, temperature=0).choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == whole


def test_a_seed_and_a_temperature_are_taken(client: openai.OpenAI) -> None:
    one, other = (client.chat.completions.create(**CHAT, seed=42, temperature=0.8).choices[0] for _ in range(2))
    assert one.message.content == other.message.content and one.finish_reason == "length"


@pytest.mark.parametrize(
    "prefill", ["Penstock is", [{"type": "text", "text": "Penstock "}, {"type": "text", "text": "is"}]]
)
def test_an_assistant_s_beginning_is_gone_on_with(client: openai.OpenAI, prefill: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is Penstock?"}, {"role": "assistant", "content": prefill}]
    reply = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=4,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert reply.choices[0].message.content == " a server for large"


@pytest.mark.parametrize(
    ("response_format", "answer"),
    [
        ({"type": "json_object", "schema": {"const": "42"}}, '"42"'),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "foooooo"}}}, '"foooooo"'),
        ({"type": "json_schema", "json_schema": {"schema": {"const": "42"}}}, '"42"'),
        ({"type": "json_object"}, "{"),
    ],
)
def test_an_answer_has_the_format_that_is_asked_for(http: httpx.Client, response_format: Any, answer: str) -> None:
    reply = http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 20, "response_format": response_format})
    assert reply.json()["choices"][0]["message"]["content"].startswith(answer)


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "sound"},
        {"type": "json_object", "schema": 123},
        {"type": "json_object", "schema": {"type": 123}},
        {"type": "json_object", "schema": {"type": "hiccup"}},
        {"type": "json_schema"},
        {"type": 1},
        {},
        [],
    ],
)
def test_a_format_that_is_none_is_refused(http: httpx.Client, response_format: Any) -> None:
    reply = http.post("/v1/chat/completions", json=CHAT | {"response_format": response_format})
    assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("response_format")


def test_an_answer_follows_a_grammar(client: openai.OpenAI) -> None:
    assert text_of(client, extra_body={"guided_grammar": 'root ::= "a"{5,5}'}) == "aaaaa"


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "string",
        [123],
        [{}],
        [{"role": 123}],
        [{"role": "system", "content": 123}],
        [{"content": "hello"}],
        [{"role": "system", "content": "test"}, {}],
        [],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    ],
)
def test_messages_that_are_none_are_refused(http: httpx.Client, messages: Any) -> None:
    reply = http.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("messages")


def test_the_logprobs_of_a_chat_spell_it(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**CHAT, temperature=0, logprobs=True, top_logprobs=10).choices[0]
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert all(entry.logprob <= 0 and entry.bytes and len(entry.top_logprobs) == 10 for entry in entries)


def test_the_logprobs_of_a_streamed_chat_spell_it(client: openai.OpenAI) -> None:
    chunks = [
        chunk.choices[0]
        for chunk in client.chat.completions.create(**CHAT, temperature=0, logprobs=True, top_logprobs=10, stream=True)
    ]
    entries = [entry for choice in chunks if choice.logprobs is not None for entry in choice.logprobs.content]
    assert "".join(entry.token for entry in entries) == "".join(choice.delta.content or "" for choice in chunks)
    assert len(entries) == 8 and all(
        entry.logprob <= 0 and entry.bytes and len(entry.top_logprobs) == 10 for entry in entries
    )


def test_a_bias_keeps_words_out_of_an_answer(client: openai.OpenAI, http: httpx.Client) -> None:
    words = [" is", " a", " the", " of", " and"]
    bias = {str(token): -100 for word in words for token in tokens_of(http, word, add_special_tokens=False)}
    plain = text_of(client, temperature=0, max_tokens=40)
    biased = text_of(client, temperature=0, max_tokens=40, logit_bias=bias)
    assert any(f"{word} " in plain for word in words) and not any(f"{word} " in biased for word in words)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [CHAT | {"messages": BOOK * 200}, COMPLETION | {"prompt": PROMPT * 300}])
def test_what_is_longer_than_the_context_is_refused(http: httpx.Client, body: Any, stream: bool) -> None:
    reply = http.post(
        "/v1/chat/completions" if "messages" in body else "/v1/completions", json=body | {"stream": stream}
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (
        400,
        "invalid_request_error",
        "context_length_exceeded",
    )
    assert "maximum context length is 1024 tokens" in error["message"]


def test_a_chat_has_as_many_choices_as_are_asked_for(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**CHAT, n=2, seed=1)
    assert (
        [choice.index for choice in reply.choices] == [0, 1]
        and reply.usage is not None
        and reply.usage.completion_tokens == 16
    )
    assert {(choice.message.role, choice.finish_reason) for choice in reply.choices} == {("assistant", "length")}


def test_a_completion_is_answered_whole_and_its_tokens_are_told(client: openai.OpenAI) -> None:
    reply = client.completions.create(**COMPLETION, temperature=0, extra_body={"return_token_ids": True})
    assert (
        reply.id.startswith("cmpl-")
        and reply.system_fingerprint
        and reply.usage is not None
        and reply.usage.completion_tokens == 8
    )
    assert (reply.choices[0].finish_reason, len(reply.choices[0].model_extra["token_ids"])) == ("length", 8)
    without = client.completions.create(**COMPLETION).choices[0].model_extra or {}
    assert without.get("token_ids") is None


def test_a_completion_streamed_is_the_one_that_comes_whole(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(**COMPLETION, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text_of(client, temperature=0)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_stop_strings_end_a_stream_and_are_no_part_of_it(client: openai.OpenAI) -> None:
    plain = text_of(client, temperature=0, max_tokens=40)
    stop = plain[len(plain) // 2 :][:4]
    chunks = list(
        client.completions.create(**COMPLETION | {"max_tokens": 40}, temperature=0, stop=[stop, "User:\n"], stream=True)
    )
    assert (
        "".join(chunk.choices[0].text for chunk in chunks) == plain[: plain.index(stop)]
        and chunks[-1].choices[0].finish_reason == "stop"
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_seed_gives_one_answer_alone_and_in_a_crowd(client: openai.OpenAI, temperature: float) -> None:
    alone = text_of(client, seed=42, temperature=temperature, max_tokens=40)
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(text_of, client, seed=seed, temperature=1, max_tokens=60) for seed in range(3)]
        same = [pool.submit(text_of, client, seed=42, temperature=temperature, max_tokens=40) for _ in range(3)]
        assert {each.result() for each in same} == {alone} and all(each.result() for each in others)


def test_other_seeds_give_other_answers(client: openai.OpenAI) -> None:
    assert (
        len({text_of(client, seed=seed, temperature=1.5, max_tokens=30) for seed in range(12)}) >= 5
    )  # the model has favourites


def test_a_cached_prompt_gives_the_same_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT * 20, "seed": 42, "temperature": 1.0}
    assert (
        text_of(client, **asked, extra_body={"cache_salt": "fresh"})
        == text_of(client, **asked)
        == text_of(client, **asked)
    )


def test_a_prompt_may_be_tokens_or_several_of_one_kind(client: openai.OpenAI, http: httpx.Client) -> None:
    tokens, expected = tokens_of(http, PROMPT), text_of(client, temperature=0)
    assert text_of(client, prompt=tokens, temperature=0) == expected
    for prompts in ([tokens, tokens], [PROMPT, PROMPT]):
        reply = http.post("/v1/completions", json=COMPLETION | {"prompt": prompts, "temperature": 0}).json()
        assert [choice["text"] for choice in reply["choices"]] == [expected] * 2
    for mixed in ([tokens, PROMPT], [PROMPT, tokens], [1, 2, PROMPT, 3]):
        assert (
            http.post("/v1/completions", json=COMPLETION | {"prompt": mixed})
            .json()["error"]["param"]
            .startswith("prompt[")
        )


def test_the_likeliest_tokens_of_a_completion_are_told(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(**COMPLETION, temperature=0, logprobs=10).choices[0].logprobs
    assert len(logprobs.tokens) == 8 and all(logprob <= 0 for logprob in logprobs.token_logprobs)
    assert all(
        len(top) in (10, 11) and token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)
    )
    streamed = list(client.completions.create(**COMPLETION, temperature=0, logprobs=10, stream=True))
    assert [
        token for chunk in streamed if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens
    ] == logprobs.tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(demo: Deployment, http: httpx.Client, stream: bool) -> None:
    body = COMPLETION | {"max_tokens": MANY, "ignore_eos": True, "stream": stream}
    with (
        pytest.raises(httpx.TimeoutException),
        demo.redis() as redis,
        httpx.Client(base_url=demo.url(), trust_env=False) as leaving,
    ):
        wait_until(lambda: redis.hlen(inflight_key(MODEL)) <= 1, description="nothing runs")
        with leaving.stream("POST", "/v1/completions", json=body, timeout=0.3) as reply:
            threading.Event().wait(0.5 if stream else 0)
            raise httpx.ReadTimeout("enough of it", request=reply.request)
    with demo.redis() as redis:
        wait_until(lambda: redis.hlen(inflight_key(MODEL)) <= 1, description="its place is free")


def test_tokens_become_the_text_again(http: httpx.Client) -> None:
    text = "What is the capital of France ? \u5abd \U0001f917"
    tokens = tokens_of(http, text, add_special_tokens=False)
    assert len(tokens) > 5 and http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text


def test_the_texts_of_tokens_are_told(http: httpx.Client) -> None:
    reply = http.post("/tokenize", json={"prompt": "This is a test", "return_token_strs": True}).json()
    assert len(reply["token_strs"]) == len(reply["tokens"]) == reply["count"] and all(reply["token_strs"])


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]},
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(http: httpx.Client, stream: bool) -> None:
    asked = CHAT | {"max_tokens": 100, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    if not stream:
        choice = http.post("/v1/chat/completions", json=asked).json()["choices"][0]
        [call] = choice["message"]["tool_calls"]
        assert (
            call["function"] in [{"name": "weather", "arguments": f'{{"unit": "{unit}"}}'} for unit in "CF"]
            and choice["finish_reason"] == "tool_calls"
        )
        return
    text = http.post("/v1/chat/completions", json=asked | {"stream": True}).text
    assert '"name":"weather"' in text and '"finish_reason":"tool_calls"' in text


@pytest.mark.parametrize(
    "fields",
    [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": [WEATHER], "tool_choice": "auto"}],
)
def test_without_a_call_an_answer_is_text(http: httpx.Client, fields: dict[str, Any]) -> None:
    message = http.post("/v1/chat/completions", json=CHAT | {"temperature": 0} | fields).json()["choices"][0]["message"]
    assert message["content"] and not message.get("tool_calls")
