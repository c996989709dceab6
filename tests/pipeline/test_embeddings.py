"""Embeddings through the `openai` package: of the demo model, which also writes; durable, and the
same in any company.
"""

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, BertTokenizer

from shared.model.files import DEMO_MODEL
from tests.deployment import MODEL, Deployment
from tests.kernels.test_embeddings import ENCODERS, save_word_tokenizer
from tests.kernels.test_gguf_encoders import VOCABULARY, make
from tests.stages.test_deaths import start_fragile
from tests.waiting import wait_until

TEXTS = ["What is Penstock?", "The", "A token log is the truth; every process's memory is a cache. " * 12]


def embed(demo: Deployment, given: Any, **more: Any) -> Any:
    return demo.client().embeddings.create(model=MODEL, input=given, **more)


def expected(text: str, pooling: str) -> Any:
    """transformers' last hidden states, pooled as sentence-transformers does, of length 1."""
    model = AutoModel.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(DEMO_MODEL)(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        states = model(input_ids=ids).last_hidden_state[0].double()
    pooled = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[pooling]
    return (pooled / pooled.norm()).numpy()


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_embeddings_are_transformers_hidden_states_pooled(demo: Deployment, pooling: str) -> None:
    reply = embed(demo, TEXTS, extra_body={"pooling": pooling})
    assert [each.index for each in reply.data] == [0, 1, 2]
    for text, each in zip(TEXTS, reply.data, strict=True):
        assert np.allclose(each.embedding, expected(text, pooling), atol=2e-5), text
        assert np.isclose(np.linalg.norm(each.embedding), 1.0)
    ids = AutoTokenizer.from_pretrained(DEMO_MODEL)(TEXTS).input_ids
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, ids))


def test_forms_of_input_and_of_vectors(demo: Deployment) -> None:
    ids = AutoTokenizer.from_pretrained(DEMO_MODEL)(TEXTS[0]).input_ids
    one = embed(demo, TEXTS[0]).data[0].embedding
    for given in (TEXTS[0], [TEXTS[0]], ids, [ids]):
        assert embed(demo, given).data[0].embedding == one  # the package asks for base64
    body = {"model": MODEL, "input": TEXTS[0]}
    as_floats = demo.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    as_base64 = demo.post("/v1/embeddings", body | {"encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(as_base64), "<f4"), np.array(as_floats, np.float32))
    raw = np.array(embed(demo, TEXTS[0], extra_body={"normalize": False}).data[0].embedding)
    assert np.allclose(raw / np.linalg.norm(raw), one, atol=1e-6) and not np.isclose(np.linalg.norm(raw), 1.0)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["x", 3]}, "input[1]"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": "word " * 3000}, "input"),
        ({"dimensions": 8}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
    ],
)
def test_what_is_wrong_is_named(demo: Deployment, more: dict[str, Any], param: str) -> None:
    reply = demo.post("/v1/embeddings", {"model": MODEL, "input": "x"} | more)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


@pytest.mark.more
def test_embeddings_survive_compute_and_are_the_same_alone_and_in_a_crowd(deployment: Deployment) -> None:
    """In bfloat16, by the bits. Chunks of prompts are cut again in every step, and whoever takes a
    request over begins it again.
    """
    small_steps = {"PENSTOCK_DTYPE": "bfloat16", "PENSTOCK_MAX_BATCHED_TOKENS": "64"}
    first = start_fragile(
        deployment, "compute-first", FRAGILE_STEP_S="0.05", FRAGILE_TOKEN="-1", **small_steps
    )  # a hundred: time to disturb it
    deployment.wait_live(first, *(deployment.start(stage) for stage in ("sampler", "tokenizer", "gateway")))
    wait_until(lambda: deployment.get("/ready").status_code == 200, description="the gateway is ready")
    texts = [
        f"{number} " + "A penstock is the pipe that feeds a turbine. " * (1 + number % 5 * 6) for number in range(40)
    ]
    mean: Any = {"pooling": "mean"}
    alone = [embed(deployment, text, extra_body=mean).data[0].embedding for text in texts[:5]]
    with deployment.redis() as redis, ThreadPoolExecutor(1) as pool:
        chats = deployment.client().completions.create(
            model=MODEL, prompt="The", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        next(chats)
        crowd = pool.submit(embed, deployment, texts, extra_body=mean)
        wait_until(lambda: len(redis.keys("log:embd-*")) > 7, description="some are there")
        deployment.kill(first)
        assert redis.xlen(f"requests:{MODEL}") + redis.xlen(f"prompts:{MODEL}") > 15, "most are not"
        deployment.wait_live(deployment.start("compute", "compute-next", dtype="bfloat16", max_batched_tokens=48))
        vectors = [each.embedding for each in crowd.result(timeout=120).data]
        assert vectors[:5] == alone and len({tuple(vector) for vector in vectors}) == len(texts)
        assert list(chats)


def test_an_encoder_makes_embeddings_and_no_text(deployment: Deployment, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = AutoModelForMaskedLM.from_config(ENCODERS["bert"], dtype=torch.float32)
    model.save_pretrained(tmp_path / "encoder")
    save_word_tokenizer(tmp_path / "encoder")
    deployment.environment = {"PENSTOCK_MODEL": str(tmp_path / "encoder")}
    deployment.start_all(dtype="float32")
    texts = ["w1 w2 w3", "w9", " ".join(f"w{number}" for number in range(46))]
    reply = deployment.client().embeddings.create(model="encoder", input=texts)
    reference = model.base_model.eval()
    for text, each in zip(texts, reply.data, strict=True):
        ids = [2, *(int(word[1:]) + 4 for word in text.split()), 3]  # between [CLS] and [SEP]
        with torch.inference_mode():
            vector = reference(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
        assert np.allclose(each.embedding, vector / vector.norm(), atol=1e-5)
    assert reply.usage.prompt_tokens == 5 + 3 + 48
    too_long: Any = {"model": "encoder", "input": texts[2] + " w50 w51"}
    cut = deployment.client().embeddings.create(**too_long, extra_body={"truncate_prompt_tokens": -1}).data[0].embedding
    [of_ollama] = deployment.post("/api/embed", too_long).json()["embeddings"]
    assert cut == reply.data[2].embedding, "the beginning, and [SEP]"
    assert np.array_equal(np.float32(of_ollama), np.float32(cut))
    assert deployment.post("/api/embed", too_long | {"truncate": False}).status_code == 400
    assert deployment.post("/api/show", {"model": "encoder"}).json()["capabilities"] == ["embedding"], (
        "by which front ends choose"
    )
    by_another_name = deployment.post(
        "/v1/embeddings", {"model": "GPT-4", "input": texts[1]}
    )  # which clients have built in
    assert (by_another_name.json()["model"], by_another_name.headers["X-Penstock-Ignored"]) == ("encoder", "model")
    assert (
        by_another_name.json()["data"][0]["embedding"]
        == deployment.post("/embedding", {"model": "GPT-4", "content": texts[1]}).json()[0]["embedding"][0]
    )
    assert deployment.post("/v1/completions", {"model": "GPT-4", "prompt": "w1"}).status_code == 404
    for wrong, code in (
        ({"input": "w1 " * 47}, "context_length_exceeded"),
        ({"prompt": "w1", "max_tokens": 3}, "model_not_supported"),
    ):
        path = "/v1/embeddings" if "input" in wrong else "/v1/completions"
        refused = deployment.post(path, {"model": "encoder"} | wrong)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, code), refused.text


def test_an_encoder_may_be_a_gguf_file(deployment: Deployment, tmp_path: Path) -> None:
    model = make("bert", tmp_path / "small.gguf")
    deployment.environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    deployment.start_all(model=str(tmp_path / "small.gguf"), dtype="float32")
    reply = deployment.client().embeddings.create(model="small", input=TEXTS[:2])
    for text, each in zip(TEXTS, reply.data, strict=False):
        with torch.inference_mode():
            ids = BertTokenizer(VOCABULARY, do_lower_case=True)(text, return_tensors="pt").input_ids
            vector = model(input_ids=ids).last_hidden_state[0, 0]
        assert np.allclose(each.embedding, vector / vector.norm(), atol=1e-5)
