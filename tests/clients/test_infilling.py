"""Infilling by every endpoint that has it: the same prompt, of the model's own tokens, in each one's form."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from services.gateway.answering.infill import InfillMarks
from tests.clients.scripted.model import MARKS
from tests.clients.scripted.pipeline import MODEL
from tests.deployment import Deployment

BEFORE, AFTER = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))  # <|fim_middle|> is text here"


def tokens(scripted: Deployment, text: str, *, are_marks: bool = False) -> list[int]:
    asked = {"model": MODEL, "prompt": text, "add_special_tokens": False, "parse_special_tokens": are_marks}
    found: list[int] = scripted.post("/tokenize", asked).json()["tokens"]
    return found


def expected(scripted: Deployment, after: str = AFTER) -> list[int]:
    prefix, suffix, middle = (tokens(scripted, mark, are_marks=True) for mark in MARKS)
    assert len(prefix) == len(suffix) == len(middle) == 1
    return [*prefix, *tokens(scripted, BEFORE), *suffix, *(tokens(scripted, after) if after else []), *middle]


def test_completions_with_a_suffix_fill_the_gap(scripted: Deployment) -> None:
    client = scripted.client()
    reply: Any = client.completions.create(
        model=MODEL, prompt=BEFORE, suffix=AFTER, extra_body={"return_token_ids": True}
    )
    assert reply.choices[0].text == "Understood." and reply.choices[0].prompt_token_ids == expected(scripted)
    streamed = client.completions.create(model=MODEL, prompt=[BEFORE, BEFORE], suffix=AFTER, stream=True)
    texts = {0: "", 1: ""}
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "Understood.", 1: "Understood."}
    plain: Any = client.completions.create(model=MODEL, prompt=BEFORE, suffix="", extra_body={"return_token_ids": True})
    assert plain.choices[0].prompt_token_ids == tokens(scripted, BEFORE), "an empty one asks for nothing"
    [rendered] = scripted.post("/v1/completions/render", {"model": MODEL, "prompt": BEFORE, "suffix": AFTER}).json()
    assert rendered["token_ids"] == expected(scripted)


def test_mistral_s_endpoint_answers_as_a_chat(scripted: Deployment) -> None:
    asked = {"model": MODEL, "prompt": BEFORE, "suffix": AFTER, "random_seed": 7, "return_token_ids": True}
    whole = scripted.post("/v1/fim/completions", asked).json()
    [choice] = whole["choices"]
    assert (whole["object"], choice["message"]["role"], choice["message"]["content"]) == (
        "chat.completion",
        "assistant",
        "Understood.",
    )
    assert whole["prompt_token_ids"] == expected(scripted), whole
    answer = httpx.post(
        f"{scripted.url()}/v1/fim/completions", json=asked | {"stream": True}, trust_env=False, timeout=30
    )
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events) == "Understood."
    without = scripted.post("/v1/fim/completions", asked | {"suffix": None}).json()
    assert without["prompt_token_ids"] == expected(scripted, ""), "the gap is at the end"


def test_llama_cpp_s_endpoint_has_the_same_prompt(scripted: Deployment) -> None:
    asked = {"model": MODEL, "input_prefix": BEFORE, "input_suffix": AFTER, "temperature": 0}
    filled = scripted.post("/infill", asked).json()
    assert filled["content"] == "Understood." and filled["tokens_evaluated"] == len(expected(scripted)), filled


def test_codestral_reads_what_is_behind_the_gap_first_and_a_bos_comes_before_all() -> None:
    bos, prefix, suffix, middle, files, before, after, begun = (np.array([number], np.int32) for number in range(8))
    one, other = InfillMarks(bos, prefix, suffix, middle, False), InfillMarks(bos, prefix, suffix, middle, True)
    assert one.around(files, before, after, begun).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert other.around(files, before, after, begun).tolist() == [0, 4, 2, 6, 1, 5, 7]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "a", "suffix": 3}, "suffix"),
        ("/v1/fim/completions", {"prompt": ["a"], "suffix": "b"}, "prompt"),
        ("/v1/fim/completions", {"prompt": "a", "random_seed": 1, "seed": 2}, "random_seed"),
        ("/v1/fim/completions", {"suffix": "b"}, "prompt"),
    ],
)
def test_what_is_wrong_is_named(scripted: Deployment, path: str, body: dict[str, Any], param: str) -> None:
    refused = scripted.post(path, {"model": MODEL} | body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
