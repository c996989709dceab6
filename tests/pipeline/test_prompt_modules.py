"""Prompt modules through a whole pipeline: no byte of an answer depends on what is cached, on who
computes it, or on who dies.
"""

import json
import random
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.deployment import MODEL, Deployment
from tests.waiting import wait_until

MODULES = [
    *(
        {
            "name": f"doc{number}",
            "text": " ".join(f"Fact {each} of {number}: {each * number % 17}." for each in range(6)) + "\n",
        }
        for number in range(4)
    ),
    {
        "union": [
            {"name": "short", "text": "Answer in one word.\n"},
            {"name": "long", "text": "Answer at length, with all that you know.\n"},
        ]
    },
    {"name": "trip", "text": "Plan {days} days in {city}.\n", "parameters": {"days": 4, "city": 12}},
]
USES: list[list[Any]] = [
    ["doc0", "doc1"],
    ["doc1", "doc0"],
    ["doc3", "doc1", "short"],
    ["doc2", "doc0", "doc3", "long"],
    ["doc1", {"name": "trip", "arguments": {"days": "two", "city": "Rome"}}],
    ["doc1", {"name": "trip", "arguments": {"city": "Oslo"}}],
]


def make(deployment: Deployment) -> str:
    reply = deployment.post("/v1/prompt_modules", {"model": MODEL, "modules": MODULES})
    assert reply.status_code == 200, reply.text
    found: str = reply.json()["id"]
    return found


def ask(deployment: Deployment, set_id: str, use: list[Any], seed: int) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were found."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"What is question {seed}?"}],
        "max_tokens": 20,
        "seed": seed,
        "temperature": 1.0,
        "ignore_eos": True,
        "repetition_penalty": 1.1,
        "prompt_modules": {"id": set_id, "use": use},
    }
    reply = deployment.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_all(deployment: Deployment, set_id: str) -> list[tuple[str, int]]:
    return [ask(deployment, set_id, use, seed) for seed, use in enumerate(USES)]


@pytest.mark.more
def test_no_byte_depends_on_the_cache_or_on_deaths(deployment: Deployment, tmp_path: Path) -> None:
    deployment.start_all(prefix_caching=False, dtype="float32")
    [compute] = [name for name in deployment.processes if name.startswith("compute")]
    set_id = make(deployment)
    plain = ask_all(deployment, set_id)
    expected = [text for text, _ in plain]
    assert expected[0] != expected[2] and not any(count for _, count in plain)
    assert (
        ask(deployment, set_id, ["doc0", "doc1"], 1)[0]
        == ask(deployment, set_id, ["doc1", "doc0"], 1)[0]
        == expected[1]
    )
    deployment.kill(compute)
    settings = {"kv_disk": f"{tmp_path / 'kv'},64MiB", "dtype": "float32", "max_batched_tokens": 48}
    rng = random.Random(1)
    for turn in range(2):
        computes = [deployment.start("compute", f"compute-{turn}-{number}", **settings) for number in range(2)]
        deployment.wait_live(*computes)
        wait_until(lambda: deployment.get("/ready").status_code == 200, description="the gateway is ready")
        for _ in range(2):
            found = ask_all(deployment, set_id)
            assert [text for text, _ in found] == expected
        assert all(count for _, count in found)
        if turn == 0:
            [file] = (tmp_path / "kv").iterdir()
            with file.open("r+b") as opened:
                for _ in range(2000):
                    opened.seek(rng.randrange(file.stat().st_size))
                    opened.write(rng.randbytes(1))
        for name in computes:
            deployment.kill(name)


@pytest.fixture(scope="module")
def set_id(demo: Deployment) -> str:
    return make(demo)


def test_the_same_set_is_one_and_says_its_places(demo: Deployment, set_id: str) -> None:
    assert make(demo) == set_id
    found = demo.get(f"/v1/prompt_modules/{set_id}").json()
    places = {each["name"]: (each["position"], each["num_positions"]) for each in found["modules"]}
    assert found["id"] == set_id and found["object"] == "prompt_modules" and found["model"] == MODEL
    assert places["doc0"][0] == 0 and places["doc1"][0] == places["doc0"][1] and places["short"][0] == places["long"][0]
    assert places["trip"][0] == places["long"][0] + max(places["short"][1], places["long"][1])
    assert found["num_positions"] == sum(places["trip"])
    assert [each["id"] for each in demo.get("/v1/prompt_modules").json()["data"]].count(set_id) == 1


def test_openai_s_client_streams_with_modules_and_finds_them_again(demo: Deployment, set_id: str) -> None:
    client = demo.client()
    modules = {"prompt_modules": {"id": set_id, "use": ["doc0", "doc2"]}}
    whole = client.completions.create(
        model=MODEL, prompt="What is a stage?", max_tokens=12, temperature=0, extra_body=modules
    )
    stream = client.completions.create(
        model=MODEL, prompt="What is a stage?", max_tokens=12, temperature=0, extra_body=modules, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text
    several = client.completions.create(
        model=MODEL, prompt=["One.", "Two."], n=2, max_tokens=5, seed=3, extra_body=modules
    )
    assert several.usage is not None and several.usage.prompt_tokens > 2 * 60 and len(several.choices) == 4


@pytest.mark.parametrize(
    ("used", "more", "param", "code"),
    [
        ({"use": ["doc9"]}, {}, "prompt_modules.use[0]", "invalid_value"),
        ({"use": ["short", "long"]}, {}, "prompt_modules.use[1]", "invalid_value"),
        ({"use": ["doc0", "doc0"]}, {}, "prompt_modules.use", "invalid_value"),
        ({"use": []}, {}, "prompt_modules.use", "invalid_value"),
        ({"use": [{"name": "doc0", "arguments": {"city": "Rome"}}]}, {}, "prompt_modules.use[0]", "invalid_value"),
        (
            {"use": [{"name": "trip", "arguments": {"days": "a number of days that is longer than its room"}}]},
            {},
            "prompt_modules",
            "invalid_value",
        ),
        ({"use": ["doc0"], "id": "pm-000000000000000000000000"}, {}, "prompt_modules.id", "prompt_modules_not_found"),
        ({"use": ["doc0"]}, {"echo": True}, "echo", "invalid_value"),
        ({"use": ["doc0"]}, {"prompt_logprobs": 1}, "prompt_logprobs", "invalid_value"),
        ({"use": ["doc0"]}, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "invalid_value"),
        ({"use": ["doc0"]}, {"use_beam_search": True, "best_of": 2}, "use_beam_search", "invalid_value"),
        (
            {"use": ["doc0", "doc1", "doc2", "doc3", "long"]},
            {"prompt": "word " * 1100},
            "prompt",
            "context_length_exceeded",
        ),
    ],
)
def test_what_is_refused(
    demo: Deployment, set_id: str, used: dict[str, Any], more: dict[str, Any], param: str, code: str
) -> None:
    reply = demo.post(
        "/v1/completions",
        {"model": MODEL, "prompt": "Why?", "max_tokens": 4, "prompt_modules": {"id": set_id} | used} | more,
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (404 if "not_found" in code else 400, param, code), (
        error
    )


@pytest.mark.parametrize(
    ("modules", "param"),
    [
        ([], "modules"),
        ([{"name": "a"}], "modules[0]"),
        ([{"text": "a"}], "modules[0]"),
        ([{"union": []}], "modules[0]"),
        ([{"name": "a b", "text": "c"}], "modules[0].name"),
        ([{"name": "a", "text": "b"}, {"name": "a", "text": "c"}], "modules"),
        ([{"name": "a", "text": "b", "parameters": {"c": 3}}], "modules[0].text"),
        ([{"name": "a", "text": "{c}", "parameters": {"c": 0}}], "modules[0].parameters.c"),
        ([{"name": "a", "text": "b", "position": -1}], "modules[0].position"),
        ([{"name": "a", "text": "b", "union": [{"name": "c", "text": "d"}]}], "modules[0]"),
    ],
)
def test_sets_that_are_refused(demo: Deployment, modules: list[Any], param: str) -> None:
    reply = demo.post("/v1/prompt_modules", {"model": MODEL, "modules": modules})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


def test_a_deleted_set_is_gone(demo: Deployment) -> None:
    found = demo.post("/v1/prompt_modules", {"modules": [{"name": "alone", "text": "Something."}]}).json()["id"]
    with demo.client() as client:
        assert client.delete(f"/prompt_modules/{found}", cast_to=object)
    for reply in (
        demo.get(f"/v1/prompt_modules/{found}"),
        demo.post("/v1/completions", {"prompt": "a", "prompt_modules": {"id": found, "use": ["alone"]}}),
    ):
        assert reply.status_code == 404 and reply.json()["error"]["code"] == "prompt_modules_not_found"


def test_a_batch_uses_modules(demo: Deployment, set_id: str) -> None:
    demo.wait_live(worker := demo.start("jobs"))
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is a stage?"}],
        "temperature": 0,
        "max_tokens": 12,
    }
    body |= {"prompt_modules": {"id": set_id, "use": ["doc3"]}}
    expected = demo.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    client: openai.OpenAI = demo.client()
    line = json.dumps({"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()
    file = client.files.create(file=("lines.jsonl", line), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(
        lambda: client.batches.retrieve(batch.id).status == "completed",
        description="the batch has ended",
        timeout_s=120,
    )
    written = client.files.content(client.batches.retrieve(batch.id).output_file_id or "").text
    assert json.loads(written)["response"]["body"]["choices"][0]["message"]["content"] == expected
    assert demo.terminate(worker) == 0
