"""Scores, reranking, classification and vectors of conversations: of a decoder, and of models with
a classification head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from services.gateway.api.pooling.routes import cosines
from tests.deployment import MODEL, Deployment
from tests.kernels.test_embeddings import SMALL, save_word_tokenizer
from tests.waiting import wait_until

QUERY, DOCUMENTS = "What is a turbine?", ["A turbine turns.", "Bread is baked.", "A penstock feeds a turbine."]


def vectors(demo: Deployment, texts: list[str]) -> Any:
    return np.array(
        [each["embedding"] for each in demo.post("/v1/embeddings", {"model": MODEL, "input": texts}).json()["data"]]
    )


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_a_score_is_the_cosine_of_two_vectors(names: tuple[str, str], demo: Deployment) -> None:
    query, documents = vectors(demo, [QUERY]), vectors(demo, DOCUMENTS)
    reply = demo.post("/v1/score", {"model": MODEL, names[0]: QUERY, names[1]: DOCUMENTS}).json()
    assert [each["index"] for each in reply["data"]] == [0, 1, 2]
    assert np.allclose([each["score"] for each in reply["data"]], documents @ query[0], atol=1e-6)
    pairs = demo.post("/score", {"model": MODEL, names[0]: DOCUMENTS, names[1]: DOCUMENTS}).json()
    assert np.allclose([each["score"] for each in pairs["data"]], 1.0, atol=1e-6)


def test_no_score_is_above_one() -> None:
    vectors = np.random.default_rng(0).standard_normal((100, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    wide = [*vectors.astype(np.float64)]
    assert max(float(each @ each) for each in wide) > 1.0
    assert max(cosines(wide, wide)) == 1.0 and min(cosines(wide, [-each for each in wide])) == -1.0


def test_reranked_documents_come_best_first(demo: Deployment) -> None:
    expected = vectors(demo, DOCUMENTS) @ vectors(demo, [QUERY])[0]
    whole = demo.post(
        "/v2/rerank", {"model": MODEL, "query": QUERY, "documents": [{"text": each} for each in DOCUMENTS]}
    ).json()
    assert [each["index"] for each in whole["results"]] == np.argsort(-expected).tolist()
    for each in whole["results"]:
        assert each["document"]["text"] == DOCUMENTS[each["index"]]
        assert np.isclose(each["relevance_score"], expected[each["index"]], atol=1e-6)
    best = demo.post(
        "/rerank", {"model": MODEL, "query": QUERY, "documents": DOCUMENTS, "top_n": 1, "return_documents": False}
    ).json()
    assert best["results"] == [{name: whole["results"][0][name] for name in ("index", "relevance_score")}]
    assert best["usage"]["total_tokens"] == whole["usage"]["total_tokens"] > 0


def test_a_conversation_is_embedded_as_its_template_renders_it(demo: Deployment) -> None:
    messages = [{"role": "user", "content": QUERY}]
    prompt = demo.post("/tokenize", {"model": MODEL, "messages": messages, "add_generation_prompt": False}).json()[
        "tokens"
    ]
    of_tokens = demo.post("/v1/embeddings", {"model": MODEL, "input": prompt}).json()
    of_messages = demo.post("/v1/embeddings", {"model": MODEL, "messages": messages}).json()
    assert of_messages["data"] == of_tokens["data"] and of_messages["usage"]["prompt_tokens"] == len(prompt)
    [pooled] = demo.post("/pooling", {"model": MODEL, "messages": messages}).json()["data"]
    assert pooled == {"index": 0, "object": "pooling", "data": of_tokens["data"][0]["embedding"]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/rerank", {"query": 3, "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"title": "b"}]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 1100}, "documents"),
        ("/v1/score", {"text_1": "a", "text_2": ["a"] * 1100}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": ["a " * 20_000]}, "documents"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "task"),
        ("/classify", {"input": "a"}, "model"),
    ],
)
def test_wrong_bodies_are_named(path: str, body: dict[str, Any], param: str, demo: Deployment) -> None:
    reply = demo.post(path, {"model": MODEL} | body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


def save_classifier(folder: Path, num_labels: int) -> Any:
    torch.manual_seed(num_labels)
    config = transformers.BertConfig(**SMALL, max_position_embeddings=48, num_labels=num_labels, initializer_range=0.5)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    save_word_tokenizer(folder)
    return model


def logits(model: Any, first: str, second: str | None = None) -> Any:
    """As transformers has them of [CLS] first [SEP] second [SEP]."""
    sides = [[int(word[1:]) + 4 for word in text.split()] for text in (first, second) if text is not None]
    ids = [2, *(token for side in sides for token in (*side, 3))]
    types = [0] * (len(sides[0]) + 2) + [1] * (len(ids) - len(sides[0]) - 2)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0]


@contextmanager
def serving(demo: Deployment, folder: Path) -> Iterator[Deployment]:
    """The demo, with another model beside its own."""
    names = [demo.start(stage, model=folder, dtype="float32") for stage in ("tokenizer", "compute", "sampler")]
    demo.wait_live(*names)
    asked = {"model": folder.name, "input": "w1"}
    wait_until(
        lambda: demo.post("/v1/embeddings", asked).status_code not in (404, 503), description="the gateway knows of it"
    )
    yield demo
    for name in names:
        assert demo.terminate(name) == 0


def test_a_classifier_tells_texts_apart_as_transformers_does(demo: Deployment, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "classifier", num_labels=3)
    with serving(demo, tmp_path / "classifier"):
        check_classes(demo, model)


def check_classes(deployment: Deployment, model: Any) -> None:
    texts = ["w1 w2 w3", "w9"]
    reply = deployment.post("/classify", {"model": "classifier", "input": texts}).json()
    for text, each in zip(texts, reply["data"], strict=True):
        expected = logits(model, text).softmax(0)
        assert np.allclose(each["probs"], expected, atol=1e-5) and each["num_classes"] == 3
        assert each["label"] == f"LABEL_{int(expected.argmax())}"
    raw = deployment.post("/classify", {"model": "classifier", "input": texts[0], "use_activation": False}).json()[
        "data"
    ][0]
    assert np.allclose(raw["probs"], logits(model, texts[0]), atol=1e-5)
    refused = deployment.post("/score", {"model": "classifier", "text_1": "w1", "text_2": "w2"})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "model_not_supported"


def test_a_reranker_reads_both_texts_at_once(demo: Deployment, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "reranker", num_labels=1)
    with serving(demo, tmp_path / "reranker"):
        check_scores(demo, model)


def check_scores(deployment: Deployment, model: Any) -> None:
    query, documents = "w1 w2", ["w3", "w4 w5 w6", "w1 w2"]
    expected = [float(logits(model, query, each).sigmoid()) for each in documents]
    reply = deployment.post("/v1/score", {"model": "reranker", "text_1": query, "text_2": documents}).json()
    assert np.allclose([each["score"] for each in reply["data"]], expected, atol=1e-5)
    ranked = deployment.post("/v1/rerank", {"model": "reranker", "query": query, "documents": documents}).json()[
        "results"
    ]
    assert [each["index"] for each in ranked] == np.argsort(-np.array(expected)).tolist()
    long = {"model": "reranker", "query": query, "documents": ["w7 " * 60]}
    assert deployment.post("/v1/rerank", long).json()["error"]["code"] == "context_length_exceeded"
    cut = deployment.post("/v1/rerank", long | {"truncate_prompt_tokens": -1}).json()
    assert np.isclose(
        cut["results"][0]["relevance_score"], float(logits(model, query, "w7 " * 43).sigmoid()), atol=1e-5
    )
