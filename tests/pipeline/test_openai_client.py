"""The `openai` package against a real pipeline, as a user would call it."""

import asyncio
from typing import Any

import openai
import pytest

from tests.deployment import MODEL, Deployment

ANSWER = (
    "Penstock is a server for large language models. It runs as a pipeline of separate processes, a gateway, a "
    "tokenizer, "
    "a compute stage and a sampler, joined by Redis Streams."
)
QUESTION = [{"role": "user", "content": "What is Penstock?"}]


def test_a_chat_is_answered_and_ends_its_turn(demo: Deployment) -> None:
    reply = demo.client().chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (7, 37)
    assert reply.usage.total_tokens == 44


def test_an_answer_goes_back_as_the_client_has_it(demo: Deployment) -> None:
    messages: list[Any] = [*QUESTION]
    messages.append(
        demo.client().chat.completions.create(model=MODEL, messages=QUESTION, temperature=0).choices[0].message
    )
    messages.append({"role": "user", "content": "And then?"})
    assert (
        demo.client()
        .chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=3)
        .choices[0]
        .message.content
    )


def test_a_stream_says_the_same_role_first_and_usage_last(demo: Deployment) -> None:
    stream = demo.client().chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 37
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_max_tokens_ends_with_length(demo: Deployment) -> None:
    reply = demo.client().chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=3
    )
    assert reply.choices[0].message.content == "Penstock is a"
    assert reply.choices[0].finish_reason == "length"


def test_n_choices_are_reproducible_from_a_seed_and_differ_from_each_other(demo: Deployment) -> None:
    def draw() -> list[str]:
        reply = demo.client().completions.create(model=MODEL, prompt="The", n=3, temperature=1.5, seed=7, max_tokens=12)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert reply.usage is not None and reply.usage.prompt_tokens == 1 and reply.usage.completion_tokens <= 36
        return [choice.text for choice in reply.choices]

    first = draw()
    assert draw() == first
    assert len(set(first)) == 3


def test_a_choice_is_the_same_alone_and_among_others(demo: Deployment) -> None:
    both = demo.client().completions.create(
        model=MODEL, prompt=["The", "A token"], temperature=1.3, seed=5, max_tokens=10, n=2
    )
    alone = demo.client().completions.create(model=MODEL, prompt="A token", temperature=1.3, seed=5, max_tokens=10, n=2)
    assert [choice.text for choice in both.choices[2:]] == [choice.text for choice in alone.choices]


def test_stop_strings_end_the_answer_and_never_leak(demo: Deployment) -> None:
    parts = []
    stream = demo.client().chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stop=["pipeline of", "xyz"], stream=True
    )
    finish = None
    for chunk in stream:
        parts.append(chunk.choices[0].delta.content or "")
        finish = chunk.choices[0].finish_reason or finish
    assert "".join(parts) == "Penstock is a server for large language models. It runs as a "
    assert finish == "stop"
    assert not any("pipe" in part for part in parts)


def test_stop_token_ids_and_ignore_eos(demo: Deployment) -> None:
    client = demo.client()
    plain = client.completions.create(
        model=MODEL, prompt="Penstock is", temperature=0, max_tokens=60, extra_body={"ignore_eos": True}
    )
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage is not None and plain.usage.completion_tokens == 60
    stopped = client.completions.create(
        model=MODEL, prompt="Penstock is", temperature=0, max_tokens=60, extra_body={"stop_token_ids": [18]}
    )
    assert stopped.choices[0].finish_reason == "stop"


def test_min_tokens_keeps_the_answer_going(demo: Deployment) -> None:
    reply = demo.client().chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=80, extra_body={"min_tokens": 70}
    )
    assert reply.usage is not None and reply.usage.completion_tokens >= 70


def test_chat_logprobs_belong_to_the_text(demo: Deployment) -> None:
    reply = demo.client().chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == reply.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy takes the likeliest
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert bytes(entry.bytes or []).decode() == entry.token


def test_completion_logprobs_echo_and_token_ids(demo: Deployment) -> None:
    client = demo.client()
    reply = client.completions.create(model=MODEL, prompt="Penstock is", temperature=0, max_tokens=4, logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == reply.choices[0].text
    assert logprobs.text_offset[0] == 0 and len(logprobs.text_offset) == 4
    echoed = client.completions.create(model=MODEL, prompt="Penstock is", temperature=0, max_tokens=4, echo=True)
    assert echoed.choices[0].text == "Penstock is" + reply.choices[0].text
    ids = client.completions.create(model=MODEL, prompt=[[40, 41], [42]], temperature=0, max_tokens=2)
    assert len(ids.choices) == 2 and ids.usage is not None and ids.usage.prompt_tokens == 3


def test_penalties_and_bias_change_the_answer(demo: Deployment) -> None:
    client = demo.client()
    plain = client.completions.create(model=MODEL, prompt="The", temperature=0, max_tokens=30)
    penalized = client.completions.create(
        model=MODEL, prompt="The", temperature=0, max_tokens=30, frequency_penalty=2, presence_penalty=2
    )
    repeated = client.completions.create(
        model=MODEL, prompt="The", temperature=0, max_tokens=30, extra_body={"repetition_penalty": 3.0}
    )
    biased = client.completions.create(model=MODEL, prompt="The", temperature=0, max_tokens=3, logit_bias={"40": 100})
    assert plain.choices[0].text not in (penalized.choices[0].text, repeated.choices[0].text)
    assert biased.choices[0].text == "DDD"  # token 40 is D


def test_errors_are_openai_s(demo: Deployment) -> None:
    client = demo.client()
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens") as long:
        client.completions.create(model=MODEL, prompt="word " * 3000)
    assert long.value.code == "context_length_exceeded"
    assert bad.value.code == "invalid_value"
    with pytest.raises(openai.BadRequestError, match=r"unknown or unsupported field: mirostat; n: .*; stop: ") as many:
        client.chat.completions.create(model=MODEL, messages=QUESTION, n=0, stop=7, extra_body={"mirostat": 2})
    assert many.value.code == "unknown_parameter"
    with pytest.raises(openai.BadRequestError, match=r"temperature must .*; top_p must"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1, top_p=7)


def test_a_bad_role_is_the_template_s_word_also_for_a_stream(demo: Deployment) -> None:
    body = {"model": MODEL, "messages": [{"role": "wizard", "content": "x"}], "stream": True}
    reply = demo.post("/v1/chat/completions", body)
    assert reply.status_code == 400
    assert "wizard" in reply.json()["error"]["message"]


def test_models_are_listed(demo: Deployment) -> None:
    client = demo.client()
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_64_requests_at_once_are_all_right(demo: Deployment) -> None:
    async def ask_all() -> list[str]:
        async with demo.async_client() as client:

            async def ask(number: int) -> str:
                if number % 2:
                    reply = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
                    return reply.choices[0].message.content or ""
                stream = await client.chat.completions.create(
                    model=MODEL, messages=QUESTION, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(ask(number) for number in range(64)))

    assert asyncio.run(ask_all()) == [ANSWER] * 64
