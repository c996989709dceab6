"""Logprobs of the prompt and requests for no token, through the `openai` package against a real pipeline."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.model.files import DEMO_MODEL
from shared.model.token_table import byte_of_character
from tests.conftest import running_redis
from tests.deployment import MODEL, Deployment
from tests.stages.test_deaths import start_fragile
from tests.waiting import wait_until

PROMPT = "Penstock is a server for large language models, naïve or not."
QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
LONG = (
    "The sampler decides each token. Compute owns what needs the whole vocabulary, and the gateway what needs the "
    "client. " * 16
)


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def spelled(token_id: int) -> str:
    """A token's text; of a part of a character, its bytes as OpenAI writes them."""
    text = str(tokenizer().decode([token_id]))
    alphabet = byte_of_character()
    return (
        text
        if "\ufffd" not in text
        else "bytes:" + "".join(f"\\x{alphabet[each]:02x}" for each in tokenizer().convert_ids_to_tokens(token_id))
    )


@torch.inference_mode()
def expected(token_ids: list[int]) -> torch.Tensor:
    """transformers' log_softmax over the vocabulary in the place of each token after the first."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, attn_implementation="eager")
    found: torch.Tensor = model(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(dim=-1)
    return found


def check_field(field: Any, token_ids: list[int], num_top: int) -> None:
    """vLLM's form, against transformers."""
    assert field[0] is None and len(field) == len(token_ids)
    rows = expected(token_ids)
    for row, token_id, entry in zip(rows, token_ids[1:], field[1:], strict=True):
        own = entry[str(token_id)]
        assert next(iter(entry)) == str(token_id)
        assert own["logprob"] == pytest.approx(float(row[token_id]), abs=1e-4)
        assert own["rank"] == 1 + int((row > row[token_id]).sum())
        assert own["decoded_token"] == tokenizer().decode([token_id])
        others = [each for each in entry if each != str(token_id) or entry[each]["rank"] <= num_top]
        assert sorted(entry[each]["rank"] for each in others) == list(range(1, num_top + 1))
        for each in others:
            assert entry[each]["logprob"] == pytest.approx(float(row[int(each)]), abs=1e-4)


def test_a_completion_echoes_the_logprobs_of_prompt_and_answer(demo: Deployment) -> None:
    client, token_ids = demo.client(), tokenizer().encode(PROMPT)
    choice = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=4, logprobs=2, echo=True
    ).choices[0]
    alone = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=4, logprobs=2).choices[0]
    found, answer = choice.logprobs, alone.logprobs
    assert choice.text == PROMPT + alone.text
    n = len(token_ids)
    assert found.tokens[:n] == [spelled(each) for each in token_ids] and found.tokens[n:] == answer.tokens
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    rows = expected(token_ids)
    assert found.token_logprobs[1:n] == pytest.approx(
        [float(row[each]) for row, each in zip(rows, token_ids[1:], strict=True)], abs=1e-4
    )
    assert all(
        len(top) <= 3 and top[token] == logprob
        for top, token, logprob in list(zip(found.top_logprobs, found.tokens, found.token_logprobs, strict=True))[1:]
    )
    assert all(
        max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
        for row, top in zip(rows, found.top_logprobs[1:n], strict=True)
    )
    assert found.token_logprobs[n:] == pytest.approx(answer.token_logprobs, abs=1e-5)
    assert found.text_offset[0] == 0 and found.text_offset[n] == len(PROMPT) and len(found.text_offset) == n + 4
    assert all(
        choice.text[at:].startswith(token)
        for at, token in zip(found.text_offset, found.tokens, strict=True)
        if not token.startswith("bytes:")
    )
    none = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=1, logprobs=0, echo=True
    ).choices[0]
    assert none.logprobs.token_logprobs[:n] == found.token_logprobs[:n] and none.logprobs.top_logprobs[1:] == [
        {token: logprob}
        for token, logprob in zip(none.logprobs.tokens[1:], none.logprobs.token_logprobs[1:], strict=True)
    ]


def test_both_endpoints_have_vllms_field(demo: Deployment) -> None:
    client = demo.client()
    completion = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=2, extra_body={"prompt_logprobs": 3}
    ).choices[0]
    check_field(completion.model_extra["prompt_logprobs"], tokenizer().encode(PROMPT), 3)
    assert completion.logprobs is None
    text = tokenizer().apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    chat = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=2, n=2, extra_body={"prompt_logprobs": 0}
    )
    check_field(chat.model_extra["prompt_logprobs"], tokenizer().encode(text, add_special_tokens=False), 0)
    assert (
        "prompt_logprobs"
        not in client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1).choices[0].model_extra
    )


def test_a_stream_brings_them_with_the_first_chunk(demo: Deployment) -> None:
    client = demo.client()
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 5, "extra_body": {"prompt_logprobs": 2}}
    whole = client.completions.create(prompt=PROMPT, logprobs=1, echo=True, n=2, **asked)
    chunks = list(client.completions.create(prompt=PROMPT, logprobs=1, echo=True, n=2, stream=True, **asked))
    for index, choice in enumerate(whole.choices):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].model_extra["prompt_logprobs"] == choice.model_extra["prompt_logprobs"]
        assert all("prompt_logprobs" not in each.model_extra for each in own[1:])
        assert "".join(each.text for each in own) == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [each for part in own if part.logprobs is not None for each in getattr(part.logprobs, name)]
            assert streamed == getattr(choice.logprobs, name)
    chat = client.chat.completions.create(messages=QUESTION, **asked)
    streamed_chat = list(client.chat.completions.create(messages=QUESTION, stream=True, **asked))
    [field] = [
        chunk.model_extra["prompt_logprobs"] for chunk in streamed_chat if "prompt_logprobs" in chunk.model_extra
    ]
    assert field == chat.model_extra["prompt_logprobs"]


def test_no_token_at_all(demo: Deployment) -> None:
    """The request ends after its prompt: as whoever scores texts asks."""
    client, token_ids = demo.client(), tokenizer().encode(PROMPT)
    scored = client.completions.create(model=MODEL, prompt=[PROMPT, "The"], max_tokens=0, logprobs=1, echo=True)
    assert [choice.text for choice in scored.choices] == [PROMPT, "The"]
    assert [choice.finish_reason for choice in scored.choices] == ["length", "length"]
    assert len(scored.choices[0].logprobs.tokens) == len(token_ids) and scored.choices[1].logprobs.token_logprobs == [
        None
    ]
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (len(token_ids) + 1, 0)
    fields = client.completions.create(
        model=MODEL, prompt=token_ids, max_tokens=0, n=2, extra_body={"prompt_logprobs": 1}
    )
    for choice in fields.choices:
        assert choice.text == ""
        check_field(choice.model_extra["prompt_logprobs"], token_ids, 1)
    echoed = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, echo=True)
    assert echoed.choices[0].text == PROMPT and echoed.choices[0].logprobs is None
    longest = client.completions.create(model=MODEL, prompt=[40] * 1024, max_tokens=0, logprobs=0, echo=True)
    assert len(longest.choices[0].logprobs.tokens) == 1024


def test_a_stream_of_no_token_can_be_read_again(demo: Deployment) -> None:
    body = {"model": MODEL, "prompt": [PROMPT, "The"], "max_tokens": 0, "logprobs": 1, "echo": True, "stream": True}
    body["stream_options"] = {"include_usage": True, "include_position": True}
    lines = demo.post("/v1/completions", body).text.splitlines()
    assert not any(line.startswith("id:") for line in lines), "there is no place from which less than all would be read"
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert {event["choices"][0]["index"]: event["choices"][0]["text"] for event in events[:-1]} == {
        0: PROMPT,
        1: "The",
    } and events[-1]["usage"]["completion_tokens"] == 0
    again = httpx.get(demo.url() + f"/v1/streams/{events[0]['id']}", timeout=30, trust_env=False)
    assert sorted(again.text.splitlines()) == sorted(lines), "the sequences of a response come in any order"


def test_a_stop_string_penalties_and_a_cached_prefix_leave_them_as_they_are(demo: Deployment) -> None:
    client = demo.client()

    def field(**asked: Any) -> Any:
        more = {"prompt_logprobs": 2, **asked.pop("extra_body", {})}
        return (
            client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=6, extra_body=more, **asked)
            .choices[0]
            .model_extra["prompt_logprobs"]
        )

    plain = field()
    assert field() == plain
    assert field(stop=["a", "e"]) == plain
    assert field(frequency_penalty=2, logit_bias={"40": 100}, extra_body={"repetition_penalty": 3.0}) == plain
    assert field(extra_body={"cache_salt": "other"}) == plain


def test_what_is_wrong_is_named(demo: Deployment) -> None:
    client = demo.client()
    for asked, param in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "extra_body": {"min_tokens": 1}}, "min_tokens"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"logprobs": 21, "echo": True}, "logprobs"),
        ({"prompt": [40] * 1025, "max_tokens": 0, "echo": True}, "prompt"),
    ):
        with pytest.raises(openai.BadRequestError) as wrong:
            client.completions.create(**{"model": MODEL, "prompt": "x", **asked})
        assert wrong.value.param == param, asked
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=0, extra_body={"prompt_logprobs": 0})
    assert wrong.value.param == "max_tokens"


def test_offsets_are_those_of_the_text_that_is_returned(deployment: Deployment, tmp_path: Path) -> None:
    """The prompt has a BOS, which its text lacks, and a character of several tokens."""
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "own")
    described = json.loads((folder / "tokenizer.json").read_text())
    described["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<|system|>", "type_id": 0}})
    described["post_processor"]["special_tokens"] = {
        "<|system|>": {"id": "<|system|>", "ids": [2], "tokens": ["<|system|>"]}
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    deployment.start_all(model=folder, dtype="float32")
    prompt, emoji = "It's a 🙂 day", tokenizer().encode("🙂")
    assert len(emoji) == 4
    found = (
        deployment.client()
        .completions.create(model="own", prompt=prompt, temperature=0, max_tokens=2, logprobs=0, echo=True)
        .choices[0]
    )
    assert found.text.startswith(prompt) and found.logprobs.tokens[:2] == ["<|system|>", "It"]
    assert found.logprobs.text_offset[:2] == [0, 0], "a length of 0"
    at = found.logprobs.text_offset.index(prompt.index("🙂"))
    assert found.logprobs.text_offset[at : at + 5] == [7, 7, 7, 7, 8] and found.logprobs.tokens[at + 4] == " day"
    assert found.logprobs.text_offset[-2] == len(prompt)
    ids = [2, *tokenizer().encode(" a"), *emoji, 40]
    given = (
        deployment.client().completions.create(model="own", prompt=ids, max_tokens=0, logprobs=0, echo=True).choices[0]
    )
    begin = len("<|system|> a")
    assert given.text == "<|system|> a🙂D" and given.logprobs.text_offset == [
        0,
        begin - 2,
        begin,
        begin,
        begin,
        begin,
        begin + 1,
    ]


@pytest.fixture
def slow(tmp_path: Path, redis_binary: Path | None) -> Iterator[Deployment]:
    """Two compute replicas that take their time over small chunks."""
    with running_redis(tmp_path / "redis", redis_binary) as url:
        deployment = Deployment(url, tmp_path)
        chunks = {"PENSTOCK_MAX_BATCHED_TOKENS": "32", "PENSTOCK_MAX_NUM_SEQS": "8", "FRAGILE_STEP_S": "0.3"}
        try:
            names = [deployment.start("sampler"), deployment.start("tokenizer"), deployment.start("gateway")]
            deployment.wait_live(
                *names, *(start_fragile(deployment, each, **chunks) for each in ("compute-a", "compute-b"))
            )
            wait_until(lambda: deployment.get("/ready").status_code == 200, description="the gateway is ready")
            yield deployment
        finally:
            deployment.stop()


@pytest.mark.more
def test_compute_is_killed_in_the_middle_of_a_long_prompt(slow: Deployment) -> None:
    """Its successor begins the prompt again, and the client gets the same bits once."""
    body = {
        "model": MODEL,
        "prompt": LONG,
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
        "prompt_logprobs": 4,
        "stream": True,
    }
    undisturbed = chunks_of(slow.post("/v1/completions", body).text)
    assert len(undisturbed[0]["prompt_logprobs"]) == len(tokenizer().encode(LONG)) > 300
    before = prompt_tokens(slow)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(slow.post, "/v1/completions", body)
        slow.kill(
            wait_until(
                lambda: next((each for each, count in prompt_tokens(slow).items() if count >= before[each] + 64), None),
                description="it is at it",
            )
        )
        assert not reply.done(), "it was over before it could be disturbed"
        text = reply.result(120).text
    assert chunks_of(text) == undisturbed


def prompt_tokens(deployment: Deployment) -> dict[str, float]:
    """Computed so far, by replica."""
    return {each.replica_id: each.load.prompt_tokens or 0 for each in deployment.registry().of("compute")}


def chunks_of(text: str) -> list[Any]:
    """The choices of a stream's chunks."""
    return [
        json.loads(line.removeprefix("data: "))["choices"][0]
        for line in text.splitlines()
        if line.startswith("data: {")
    ]
