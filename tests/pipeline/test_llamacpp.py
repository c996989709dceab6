"""llama.cpp's own endpoints, as its clients call them."""

import json
from typing import Any

import httpx
import pytest

from tests.deployment import MODEL, Deployment

PROMPT = "What is Penstock?"


def tokens_of(demo: Deployment, text: str) -> list[int]:
    found: list[int] = demo.post("/tokenize", {"model": MODEL, "prompt": text, "add_special_tokens": False}).json()[
        "tokens"
    ]
    return found


def complete(demo: Deployment, **body: Any) -> Any:
    reply = demo.post("/completion", {"n_predict": 12, "temperature": 0} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_completion_is_that_of_openais_api_in_other_words(demo: Deployment) -> None:
    given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "seed": 7, "logprobs": 2}
    known = demo.post("/v1/completions", given).json()
    reply = complete(demo, prompt=PROMPT, n_probs=2, return_tokens=True, seed=7)
    assert reply["content"] == known["choices"][0]["text"]
    assert (reply["stop"], reply["stop_type"], reply["stopping_word"], reply["truncated"]) == (True, "limit", "", False)
    assert reply["tokens_predicted"] == len(reply["tokens"]) == 12
    assert reply["tokens_evaluated"] == known["usage"]["prompt_tokens"]
    listed = known["choices"][0]["logprobs"]["token_logprobs"]
    assert [each["logprob"] for each in reply["completion_probabilities"]] == listed
    assert all(len(each["top_logprobs"]) == 2 for each in reply["completion_probabilities"])
    assert reply["timings"]["predicted_n"] == 12 and reply["timings"]["predicted_ms"] > 0
    assert reply["generation_settings"]["temperature"] == 0


def test_a_stream_says_the_same_and_ends_without_done(demo: Deployment) -> None:
    whole = complete(demo, prompt=PROMPT)
    with httpx.stream(
        "POST",
        f"{demo.url()}/completion",
        timeout=60,
        json={"prompt": PROMPT, "n_predict": 12, "temperature": 0, "stream": True},
    ) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines]
    assert "".join(each["content"] for each in chunks) == whole["content"]
    assert [each["stop"] for each in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["tokens_predicted"] == 12 and chunks[-1]["stop_type"] == "limit"


def test_texts_and_token_ids_may_be_mixed(demo: Deployment) -> None:
    first, second = "What is", " Penstock?"
    known = complete(demo, prompt=[*tokens_of(demo, first), *tokens_of(demo, second)])["content"]
    assert complete(demo, prompt=[*tokens_of(demo, first), second])["content"] == known
    alone = complete(demo, prompt=PROMPT)["content"]
    for prompts in ([PROMPT, "The"], [tokens_of(demo, PROMPT), "The"], [{"prompt_string": PROMPT}, "The"]):
        several = complete(demo, prompt=prompts)
        assert [each["index"] for each in several] == [0, 1] and several[0]["content"] == alone


def test_a_stop_word_and_an_unbounded_length(demo: Deployment) -> None:
    whole = complete(demo, prompt=PROMPT, n_predict=-1)
    assert whole["stop_type"] == "eos"
    word = whole["content"].split()[2]
    stopped = complete(demo, prompt=PROMPT, n_predict=-1, stop=[word])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert stopped["content"] == whole["content"][: whole["content"].index(word)]


def test_biases_name_tokens_by_id_or_by_text(demo: Deployment) -> None:
    usual = complete(demo, prompt=PROMPT, return_tokens=True)
    never = usual["tokens"][0]
    for biases in ([[never, False]], [[never, -100.0]], {str(never): -100.0}):
        assert complete(demo, prompt=PROMPT, return_tokens=True, logit_bias=biases)["tokens"][0] != never
    [wanted, *_] = tokens_of(demo, " turbine")
    assert complete(demo, prompt=PROMPT, return_tokens=True, logit_bias=[[" turbine", 100.0]])["tokens"][
        0
    ] in tokens_of(demo, " turbine"), wanted


@pytest.mark.parametrize("how", [{"grammar": 'root ::= "yes" | "no"'}, {"json_schema": {"enum": ["yes", "no"]}}])
def test_an_answer_keeps_to_a_grammar(how: dict[str, Any], demo: Deployment) -> None:
    assert complete(demo, prompt=PROMPT, **how)["content"].strip('"') in ("yes", "no")


def test_the_template_is_applied_and_told(demo: Deployment) -> None:
    messages = [{"role": "user", "content": "Say <|im_start|> twice."}]
    prompt = demo.post("/apply-template", {"model": MODEL, "messages": messages}).json()["prompt"]
    tokens = demo.post("/tokenize", {"model": MODEL, "messages": messages}).json()["tokens"]
    assert messages[0]["content"] in prompt
    assert len(tokens) >= 4 and demo.post("/detokenize", {"model": MODEL, "tokens": tokens}).json()["content"] == prompt
    told = demo.get("/props").json()
    assert told["chat_template"] and told["model_alias"] == MODEL and told["total_slots"] >= 1
    assert told["modalities"] == {"vision": False, "audio": False}
    assert told["default_generation_settings"]["n_ctx"] == demo.get(f"/v1/models/{MODEL}").json()["max_model_len"]


def test_embeddings_and_the_lists_without_v1(demo: Deployment) -> None:
    known = demo.post("/v1/embeddings", {"model": MODEL, "input": [PROMPT]}).json()["data"][0]["embedding"]
    assert demo.post("/embedding", {"content": PROMPT}).json() == [{"index": 0, "embedding": [known]}]
    assert demo.get("/models").json() == demo.get("/v1/models").json()
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 8}
    assert (
        demo.post("/chat/completions", chat).json()["choices"]
        == demo.post("/v1/chat/completions", chat).json()["choices"]
    )


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/completion", {"prompt": "a", "n_predict": -7}, 400, "n_predict"),
        ("/completion", {"prompt": ["a", 1.5]}, 400, "prompt[1]"),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, 400, "prompt.multimodal_data"),
        ("/completion", {"prompt": "a", "logit_bias": [[1, "x"]]}, 400, "logit_bias[0][1]"),
        ("/completion", {"prompt": "a", "grammar": 'root ::= ("yes"'}, 400, "grammar"),
        ("/completion", {"prompt": "a", "repeat_penalty": -1}, 400, "repeat_penalty"),
        ("/completion", {"prompt": "a", "mirostat": 2}, 400, "mirostat"),
        ("/completion", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, 501, "model"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/v1/fim/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/v1/fim/completions", {"prompt": "a"}, 400, "model"),
    ],
)
def test_what_is_wrong_is_named_as_llamacpps_clients_know_it(
    path: str, body: dict[str, Any], status: int, param: str, demo: Deployment
) -> None:
    reply = demo.post(path, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
