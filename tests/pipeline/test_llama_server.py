"""llama.cpp's server, by its documentation and by what its own tests check: a list of behaviours
that its clients may count on.
"""

import math
from typing import Any

import pytest

from tests.deployment import MODEL, Deployment
from tests.pipeline.checks import Check, Refusal, refuse, run

PROMPT = "I believe the meaning of life is"
COMPLETION: dict[str, Any] = {"prompt": PROMPT, "n_predict": 8, "temperature": 0}
BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": BOOK, "max_tokens": 8, "temperature": 0}
DOCUMENTS = ["A turbine turns.", "Bread is baked.", "A penstock feeds a turbine."]
RERANK: dict[str, Any] = {"query": "What is a turbine?", "documents": DOCUMENTS}
TEXTS: dict[str, Any] = {"query": "What is a turbine?", "texts": DOCUMENTS}
TIMINGS = {"cache_n"} | {
    f"{of}_{unit}" for of in ("prompt", "predicted") for unit in ("n", "ms", "per_token_ms", "per_second")
}
SIZES = ("n_vocab", "n_ctx_train", "n_embd", "n_params", "size")
SILENT = {
    "n_predict": -1,
    "seed": 4294967295,
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "dry_base": 1.75,
}
EMOJI = "\U0001f917"


def is_error(found: Any, status: int, kind: str) -> bool:
    """llama.cpp's shape."""
    error = found["error"]
    return (error["code"], error["type"]) == (status, kind) and isinstance(error["message"], str)


def length(vector: list[float]) -> float:
    return math.hypot(*vector)


def vectors(found: Any) -> list[list[float]]:
    """Vectors of OpenAI's list."""
    return [each["embedding"] for each in found["data"]]


CHECKS = [
    # what a completion says
    Check(
        "counts and times",
        "/completion",
        COMPLETION,
        lambda it, _: (
            it["timings"]["predicted_n"] == it["tokens_predicted"] == 8
            and it["timings"]["prompt_n"] + it["timings"]["cache_n"] == it["tokens_evaluated"] > 5
        ),
    ),
    Check("timings have all names", "/completion", COMPLETION, lambda it, _: set(it["timings"]) == TIMINGS),
    Check("no tokens unless asked for", "/completion", COMPLETION, lambda it, _: it["tokens"] == []),
    Check(
        "return_tokens",
        "/completion",
        COMPLETION | {"return_tokens": True},
        lambda it, ask: ask("/detokenize", it)["content"] == it["content"],
    ),
    Check(
        "stop, stop_type and truncated",
        "/completion",
        COMPLETION,
        lambda it, _: (it["stop"], it["stop_type"], it["stopping_word"], it["truncated"]) == (True, "limit", "", False),
    ),
    Check(
        "has_new_line",
        "/completion",
        COMPLETION | {"grammar": 'root ::= "a\\nb"'},
        lambda it, _: it["has_new_line"] is True,
    ),
    Check(
        "an end by the model",
        "/completion",
        COMPLETION | {"n_predict": -1, "grammar": 'root ::= "yes"'},
        lambda it, _: (it["content"], it["stop_type"], it["has_new_line"]) == ("yes", "eos", False),
    ),
    Check(
        "an end by a word",
        "/completion",
        COMPLETION | {"grammar": 'root ::= "one two three"', "n_predict": 40, "stop": ["two"]},
        lambda it, _: (it["content"], it["stop_type"], it["stopping_word"]) == ("one ", "word", "two"),
    ),
    Check(
        "model, prompt and tokens_cached",
        "/completion",
        COMPLETION,
        lambda it, _: (
            (it["model"], it["prompt"]) == (MODEL, PROMPT) and 0 <= it["tokens_cached"] < it["tokens_evaluated"]
        ),
    ),
    Check(
        "id_slot and index",
        "/completion",
        COMPLETION | {"id_slot": -1},
        lambda it, _: isinstance(it["id_slot"], int) and it["index"] == 0,
    ),
    Check(
        "generation_settings",
        "/completion",
        COMPLETION | {"seed": 42, "top_k": 7, "stop": ["x"]},
        lambda it, _: (
            {
                name: it["generation_settings"][name]
                for name in ("n_predict", "max_tokens", "seed", "top_k", "stop", "repeat_penalty", "min_p")
            }
            == {
                "n_predict": 8,
                "max_tokens": 8,
                "seed": 42,
                "top_k": 7,
                "stop": ["x"],
                "repeat_penalty": 1.0,
                "min_p": 0.05,
            }
        ),
    ),
    Check(
        "n_predict -1 in generation_settings",
        "/completion",
        {"prompt": PROMPT, "grammar": 'root ::= "a"'},
        lambda it, _: it["generation_settings"]["n_predict"] == -1,
    ),
    Check(
        "n_predict 0 evaluates the prompt alone",
        "/completion",
        COMPLETION | {"n_predict": 0, "return_tokens": True},
        lambda it, _: (
            (it["content"], it["tokens"], it["tokens_predicted"], it["stop"]) == ("", [], 0, True)
            and it["tokens_evaluated"] > 5
        ),
    ),
    Check(
        "response_fields",
        "/completion",
        COMPLETION | {"response_fields": ["content", "generation_settings/n_predict", "prompt", "nothing"]},
        lambda it, _: (
            set(it) == {"content", "generation_settings/n_predict", "prompt"}
            and it["generation_settings/n_predict"] == 8
        ),
    ),
    Check(
        "response_fields may be empty",
        "/completion",
        COMPLETION | {"response_fields": []},
        lambda it, _: "generation_settings" in it,
    ),
    Check(
        "/completions without /v1",
        "/completions",
        COMPLETION,
        lambda it, ask: it["content"] == ask("/completion", COMPLETION)["content"],
    ),
    # streams
    Check(
        "a stream",
        "/completion",
        COMPLETION | {"stream": True},
        lambda them, ask: (
            "".join(each["content"] for each in them) == ask("/completion", COMPLETION)["content"]
            and [each["stop"] for each in them] == [False] * (len(them) - 1) + [True]
        ),
    ),
    Check(
        "a stream's events have tokens",
        "/completion",
        COMPLETION | {"stream": True},
        lambda them, _: (
            all(isinstance(token, int) for each in them[:-1] for token in each["tokens"])
            and any(each["tokens"] for each in them[:-1])
        ),
    ),
    Check(
        "a stream's last event says all",
        "/completion",
        COMPLETION | {"stream": True},
        lambda them, _: (
            them[-1]["stop_type"] == "limit"
            and them[-1]["generation_settings"]["n_predict"] == them[-1]["timings"]["predicted_n"] == 8
        ),
    ),
    Check(
        "timings_per_token",
        "/completion",
        COMPLETION | {"stream": True, "timings_per_token": True},
        lambda them, _: (
            [each["timings"]["predicted_n"] for each in them][-1] == 8
            and all(each["timings"]["prompt_ms"] > 0 for each in them)
        ),
    ),
    Check(
        "n_probs in a stream",
        "/completion",
        COMPLETION | {"stream": True, "n_probs": 3},
        lambda them, _: (
            [len(each["top_logprobs"]) for event in them for each in event.get("completion_probabilities", [])]
            == [3] * 8
        ),
    ),
    # sampling
    Check(
        "n_probs",
        "/completion",
        COMPLETION | {"n_probs": 10, "n_predict": 5},
        lambda it, _: (
            len(it["completion_probabilities"]) == 5
            and all(
                len(each["top_logprobs"]) == 10 and each["logprob"] <= 0 and each["id"] >= 0 and each["bytes"]
                for each in it["completion_probabilities"]
            )
        ),
    ),
    Check(
        "a seed gives its text again",
        "/completion",
        COMPLETION | {"seed": 42, "temperature": 1.0, "cache_prompt": False},
        lambda it, ask: (
            it["content"]
            == ask("/completion", COMPLETION | {"seed": 42, "temperature": 1.0, "cache_prompt": True})["content"]
        ),
    ),
    Check(
        "seed -1 is drawn, and told",
        "/completion",
        COMPLETION | {"seed": -1, "temperature": 1.5, "n_predict": 20},
        lambda it, ask: (
            it["generation_settings"]["seed"]
            != ask("/completion", COMPLETION | {"seed": (1 << 32) - 1})["generation_settings"]["seed"]
        ),
    ),
    Check(
        "logit_bias false",
        "/completion",
        COMPLETION | {"logit_bias": [[5, False], [" the", False]]},
        lambda it, _: (
            [each["bias"] for each in it["generation_settings"]["logit_bias"]]
            == [-100.0] * len(it["generation_settings"]["logit_bias"])
            and " the" not in it["content"]
        ),
    ),
    Check(
        "grammar", "/completion", COMPLETION | {"grammar": 'root ::= "a"{5,5}'}, lambda it, _: it["content"] == "aaaaa"
    ),
    Check(
        "json_schema",
        "/completion",
        COMPLETION | {"json_schema": {"const": "42"}, "n_predict": 20},
        lambda it, _: it["content"] == '"42"',
    ),
    Check(
        "ignore_eos",
        "/completion",
        COMPLETION | {"ignore_eos": True, "n_predict": 60},
        lambda it, _: it["tokens_predicted"] == 60,
    ),
    Check(
        "llama.cpp's samplers",
        "/completion",
        COMPLETION
        | {
            "temperature": 0.7,
            "typical_p": 0.9,
            "top_n_sigma": 2.0,
            "xtc_probability": 0.1,
            "dynatemp_range": 0.2,
            "dry_multiplier": 0.5,
        },
        lambda it, _: (
            it["generation_settings"]["dry_multiplier"] == 0.5 and it["generation_settings"]["typical_p"] == 0.9
        ),
    ),
    Check(
        "n_cmpl",
        "/completion",
        COMPLETION | {"n_cmpl": 2, "seed": 1},
        lambda them, _: [each["index"] for each in them] == [0, 1],
    ),
    Check(
        "what asks for nothing is taken",
        "/completion",
        COMPLETION
        | {
            "cache_prompt": True,
            "n_keep": 0,
            "mirostat": 0,
            "lora": [],
            "post_sampling_probs": False,
            "samplers": ["top_k"],
            "min_keep": 0,
        },
        lambda it, ask: it["content"] == ask("/completion", COMPLETION)["content"],
    ),
    Check(
        "whole floats are integers",
        "/completion",
        COMPLETION | {"n_predict": 8.0, "top_k": 40.0, "n_cmpl": 1.0, "seed": 4.0, "prompt": [1.0, 2, 3]},
        lambda it, ask: it["content"] == ask("/completion", COMPLETION | {"prompt": [1, 2, 3]})["content"],
    ),
    *(
        Check(
            f"top_p {share} takes the likeliest token",
            "/completion",
            COMPLETION | {"temperature": 1.5, "top_p": share},
            lambda it, ask: it["content"] == ask("/completion", COMPLETION)["content"],
        )
        for share in (0, -1)
    ),
    Check(
        "numbers beyond a range are its end",
        "/completion",
        COMPLETION | {"temperature": -1, "top_p": 7, "min_p": -0.5, "typical_p": 2, "top_k": -5},
        lambda it, ask: (
            it["content"] == ask("/completion", COMPLETION)["content"]
            and [it["generation_settings"][name] for name in ("top_p", "min_p", "typical_p", "top_k")] == [1, 0, 1, 0]
        ),
    ),
    # prompts
    Check(
        "token ids",
        "/tokenize",
        {"content": PROMPT, "add_special": True},
        lambda it, ask: (
            ask("/completion", COMPLETION | {"prompt": it["tokens"]})["content"]
            == ask("/completion", COMPLETION)["content"]
        ),
    ),
    Check(
        "several prompts of several kinds",
        "/tokenize",
        {"content": PROMPT, "add_special": True},
        lambda it, ask: (
            len(
                {
                    each["content"]
                    for each in ask(
                        "/completion", COMPLETION | {"prompt": [it["tokens"], PROMPT, {"prompt_string": PROMPT}]}
                    )
                }
            )
            == 1
        ),
    ),
    Check(
        "texts among token ids",
        "/completion",
        COMPLETION | {"prompt": [1, 2, 3, PROMPT, 7, 8, PROMPT]},
        lambda it, _: it["tokens_predicted"] == 8,
    ),
    Check(
        "a prompt that is too long",
        "/completion",
        COMPLETION | {"prompt": PROMPT * 400},
        lambda it, _: (
            is_error(it, 400, "exceed_context_size_error")
            and it["error"]["n_prompt_tokens"] > it["error"]["n_ctx"] == 1024
        ),
        400,
    ),
    # errors
    Check(
        "a wrong body",
        "/completion",
        {"prompt": {"a": 1}},
        lambda it, _: is_error(it, 400, "invalid_request_error"),
        400,
    ),
    Check("no prompt", "/completion", {"n_predict": 1}, lambda it, _: is_error(it, 400, "invalid_request_error"), 400),
    Check(
        "a broken grammar",
        "/completion",
        COMPLETION | {"grammar": "root ::= ("},
        lambda it, _: is_error(it, 400, "invalid_request_error"),
        400,
    ),
    Check(
        "another model",
        "/completion",
        COMPLETION | {"model": "none"},
        lambda it, _: is_error(it, 404, "not_found_error"),
        404,
    ),
    # tokens
    Check(
        "tokenize",
        "/tokenize",
        {"content": "What is the capital of France ?"},
        lambda it, ask: (
            set(it) == {"tokens"}
            and it == ask("/tokenize", {"content": "What is the capital of France ?", "add_special": False})
        ),
    ),
    Check(
        "tokenize with pieces",
        "/tokenize",
        {"content": "This is a test", "with_pieces": True},
        lambda it, _: (
            "".join(each["piece"] for each in it["tokens"]) == "This is a test"
            and all(isinstance(each["id"], int) for each in it["tokens"])
        ),
    ),
    Check(
        "pieces of a character are bytes",
        "/tokenize",
        {"content": EMOJI, "with_pieces": True},
        lambda it, _: bytes(byte for each in it["tokens"] for byte in each["piece"]).decode() == EMOJI,
    ),
    Check(
        "special tokens are parsed, or not",
        "/tokenize",
        {"content": "<|end|>"},
        lambda it, ask: (
            len(it["tokens"]) == 1 < len(ask("/tokenize", {"content": "<|end|>", "parse_special": False})["tokens"])
        ),
    ),
    Check("no text, no tokens", "/tokenize", {"content": ""}, lambda it, _: it["tokens"] == []),
    Check(
        "detokenize",
        "/tokenize",
        {"content": f"What is {EMOJI}?"},
        lambda it, ask: ask("/detokenize", it)["content"] == f"What is {EMOJI}?",
    ),
    Check(
        "apply-template", "/apply-template", {"messages": BOOK}, lambda it, _: "What is the best book" in it["prompt"]
    ),
    Check(
        "apply-template without a turn to come",
        "/apply-template",
        {"messages": BOOK, "add_generation_prompt": False},
        lambda it, ask: (
            ask("/apply-template", {"messages": BOOK})["prompt"].startswith(it["prompt"])
            and not it["prompt"].endswith("assistant\n")
        ),
    ),
    Check(
        "a conversation's tokens are counted",
        "/v1/chat/completions/input_tokens",
        CHAT,
        lambda it, ask: (
            it == {"object": "response.input_tokens", "input_tokens": ask("/tokenize", {"messages": BOOK})["count"]}
        ),
    ),
    # embeddings
    Check(
        "/embedding",
        "/embedding",
        {"content": PROMPT},
        lambda them, _: them[0]["index"] == 0 and abs(length(them[0]["embedding"][0]) - 1) < 1e-3,
    ),
    Check(
        "/embeddings",
        "/embeddings",
        {"input": [PROMPT, "b"]},
        lambda them, ask: them[0] == ask("/embedding", {"content": PROMPT})[0] and len(them) == 2,
    ),
    Check(
        "/embeddings of texts among token ids",
        "/embeddings",
        {"input": [[12, "string", 34], "b", [1, 2]]},
        lambda them, _: len(them) == 3,
    ),
    Check(
        "embd_normalize -1",
        "/embedding",
        {"content": PROMPT, "embd_normalize": -1},
        lambda them, _: abs(length(them[0]["embedding"][0]) - 1) > 1e-3,
    ),
    Check("/v1/embeddings", "/v1/embeddings", {"input": PROMPT}, lambda it, _: abs(length(vectors(it)[0]) - 1) < 1e-3),
    Check(
        "/v1/embeddings of a mixed list",
        "/v1/embeddings",
        {
            "input": [
                "string",
                [12, 34, 56],
                {"prompt_string": "string"},
                {"content": [{"type": "text", "text": "str"}, {"type": "text", "text": "ing"}]},
            ]
        },
        lambda it, _: vectors(it)[0] == vectors(it)[2] == vectors(it)[3] != vectors(it)[1],
    ),
    Check(
        "/v1/embeddings of one object",
        "/v1/embeddings",
        {"input": {"prompt_string": "string"}},
        lambda it, ask: vectors(it) == vectors(ask("/v1/embeddings", {"input": "string"})),
    ),
    Check(
        "the same input gives the same vector",
        "/v1/embeddings",
        {"input": [PROMPT] * 5},
        lambda it, _: len({str(each) for each in vectors(it)}) == 1,
    ),
    Check(
        "usage of embeddings",
        "/v1/embeddings",
        {"input": [PROMPT, PROMPT]},
        lambda it, _: it["usage"]["prompt_tokens"] == it["usage"]["total_tokens"] > 10,
    ),
    Check(
        "base64",
        "/v1/embeddings",
        {"input": PROMPT, "encoding_format": "base64"},
        lambda it, _: isinstance(vectors(it)[0], str),
    ),
    Check(
        "an input that is none",
        "/v1/embeddings",
        {"input": {"content": "string"}},
        lambda it, _: it["error"]["param"] == "input",
        400,
    ),
    Check(
        "an empty list of inputs", "/v1/embeddings", {"input": []}, lambda it, _: "empty" in it["error"]["message"], 400
    ),
    Check(
        "an image among the inputs",
        "/v1/embeddings",
        {"input": {"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}},
        lambda it, _: "images can't be understood here" in it["error"]["message"],
        400,
    ),
    # reranking
    Check(
        "/rerank",
        "/rerank",
        RERANK,
        lambda it, _: (
            [each["relevance_score"] for each in it["results"]]
            == sorted((each["relevance_score"] for each in it["results"]), reverse=True)
        ),
    ),
    Check(
        "its aliases",
        "/v1/rerank",
        RERANK,
        lambda it, ask: all(
            ask(path, RERANK)["results"] == it["results"] for path in ("/rerank", "/reranking", "/v1/reranking")
        ),
    ),
    Check(
        "top_n",
        "/rerank",
        RERANK | {"top_n": 2},
        lambda it, ask: len(it["results"]) == 2 and len(ask("/rerank", RERANK | {"top_n": 99})["results"]) == 3,
    ),
    Check(
        "usage of reranking",
        "/rerank",
        RERANK,
        lambda it, _: it["usage"]["prompt_tokens"] == it["usage"]["total_tokens"] > 0,
    ),
    Check(
        "TEI's texts",
        "/rerank",
        TEXTS,
        lambda them, ask: (
            them
            == [
                {"index": each["index"], "score": each["relevance_score"]} for each in ask("/rerank", RERANK)["results"]
            ]
        ),
    ),
    Check(
        "TEI's return_text and top_n",
        "/rerank",
        TEXTS | {"return_text": True, "top_n": 1},
        lambda them, _: len(them) == 1 and them[0]["text"] == DOCUMENTS[them[0]["index"]],
    ),
    *(
        Check(
            f"documents {documents}",
            "/rerank",
            {"query": "a", "documents": documents},
            lambda it, _: it["error"]["param"].startswith("documents"),
            400,
        )
        for documents in ([], None, 123, [1, 2, 3])
    ),
    # the server
    Check("/health", "/health", None, lambda it, _: it["status"] == "ok"),
    Check("/v1/health", "/v1/health", None, lambda it, _: it["status"] == "ok"),
    Check("the web page", "/", None, lambda text, _: "<!doctype html>" in text.lower()),
    Check(
        "/props",
        "/props",
        None,
        lambda it, _: (
            it["total_slots"] > 0
            and it["chat_template"]
            and it["default_generation_settings"]["n_ctx"] == 1024
            and it["is_sleeping"] is False
        ),
    ),
    Check(
        "/props: what is used by default",
        "/props",
        None,
        lambda it, _: {name: it["default_generation_settings"]["params"][name] for name in SILENT} == SILENT,
    ),
    Check(
        "/models and their meta",
        "/models",
        None,
        lambda it, ask: it == ask("/v1/models", None) and all(it["data"][0]["meta"][name] > 0 for name in SIZES),
    ),
    Check(
        "/slots",
        "/slots",
        None,
        lambda them, ask: (
            len(them) == ask("/props", None)["total_slots"] and them[0]["n_ctx"] == 1024 and "params" not in them[0]
        ),
    ),
    Check(
        "/slots?fail_on_no_slot",
        "/slots?fail_on_no_slot=1",
        None,
        lambda them, _: not all(each["is_processing"] for each in them),
    ),
    Check("/metrics", "/metrics", None, lambda text, _: "# TYPE " in text),
    Check("/lora-adapters", "/lora-adapters", None, lambda them, _: them == []),
    Check("none of the adapters is set", "/lora-adapters", [], lambda it, _: it == {"success": True}),
    # chats
    Check(
        "/chat/completions without /v1",
        "/chat/completions",
        CHAT,
        lambda it, ask: it["choices"] == ask("/v1/chat/completions", CHAT)["choices"],
    ),
    Check(
        "a chat's grammar",
        "/v1/chat/completions",
        CHAT | {"grammar": 'root ::= "a"{5,5}'},
        lambda it, _: it["choices"][0]["message"]["content"] == "aaaaa",
    ),
    Check(
        "a chat's json_schema",
        "/v1/chat/completions",
        CHAT | {"json_schema": {"const": "42"}, "max_tokens": 20},
        lambda it, _: it["choices"][0]["message"]["content"] == '"42"',
    ),
    Check(
        "a chat of max_tokens -1",
        "/v1/chat/completions",
        CHAT | {"grammar": 'root ::= "a"{20,20}', "max_tokens": -1},
        lambda it, _: it["choices"][0]["message"]["content"] == "a" * 20,
    ),
    Check(
        "a completion of max_tokens -1",
        "/v1/completions",
        {"prompt": PROMPT, "grammar": 'root ::= "a"{30,30}', "max_tokens": -1},
        lambda it, _: it["choices"][0]["text"] == "a" * 30,
    ),
    Check(
        "a chat of n_predict 0 evaluates the prompt alone",
        "/v1/chat/completions",
        {"messages": BOOK, "n_predict": 0, "samplers": [], "t_max_predict_ms": 1},
        lambda it, _: (
            it["usage"]["completion_tokens"] == 0 < it["usage"]["prompt_tokens"]
            and not it["choices"][0]["message"]["content"]
        ),
    ),
    Check(
        "a chat's timings",
        "/v1/chat/completions",
        CHAT | {"timings_per_token": True},
        lambda it, _: (
            it["timings"]["predicted_n"] == 8
            and it["timings"]["prompt_n"] + it["timings"]["cache_n"] == it["usage"]["prompt_tokens"]
        ),
    ),
    Check(
        "a streamed chat's timings",
        "/v1/chat/completions",
        CHAT | {"timings_per_token": True, "stream": True},
        lambda them, _: (
            them[-1]["timings"]["predicted_n"] == 8 and all(each["timings"]["predicted_ms"] >= 0 for each in them[1:])
        ),
    ),
    Check(
        "an infill that is no infill",
        "/infill",
        {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "ok"}]},
        lambda it, _: is_error(it, 400, "invalid_request_error") and "input_extra[0].text" in it["error"]["message"],
        400,
    ),
    Check(
        "infilling with a model that can't",
        "/infill",
        {"input_prefix": "a", "input_suffix": "b"},
        lambda it, _: is_error(it, 501, "not_supported_error"),
        501,
    ),
]

REFUSED = [
    Refusal(
        "`post_sampling_probs`",
        "/completion",
        COMPLETION | {"n_probs": 2, "post_sampling_probs": True},
        400,
        lambda it: is_error(it, 400, "invalid_request_error") and "post_sampling_probs" in it["error"]["message"],
    ),
    Refusal(
        "`mirostat` 1 and 2",
        "/completion",
        COMPLETION | {"mirostat": 2},
        400,
        lambda it: it["error"]["param"] == "mirostat",
    ),
    Refusal(
        "LoRA adapters",
        "/lora-adapters",
        [{"id": 0, "scale": 0.5}],
        400,
        lambda it: is_error(it, 400, "invalid_request_error"),
    ),
    Refusal(
        "LoRA adapters",
        "/completion",
        COMPLETION | {"lora": [{"id": 0, "scale": 0.5}]},
        400,
        lambda it: it["error"]["param"] == "lora",
    ),
    Refusal(
        "`POST /slots/{id}`", "/slots/0?action=erase", {}, 501, lambda it: is_error(it, 501, "not_supported_error")
    ),
    Refusal("`POST /props`", "/props", {}, 405, lambda it: it["error"]["code"] == 405),
    Refusal(
        "`multimodal_data`",
        "/completion",
        COMPLETION | {"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}},
        400,
        lambda it: it["error"]["param"] == "prompt.multimodal_data",
    ),
    Refusal(
        "`embd_normalize` other than 2 and -1",
        "/embedding",
        {"content": "a", "embd_normalize": 1},
        400,
        lambda it: it["error"]["param"] == "embd_normalize",
    ),
    Refusal(
        "texts among token ids in one input of `/v1/embeddings`",
        "/v1/embeddings",
        {"input": [[12, "string"]]},
        400,
        lambda it: it["error"]["param"].startswith("input"),
    ),
    Refusal("`timings` of a chat that does not ask", "/v1/chat/completions", CHAT, 200, lambda it: "timings" not in it),
    Refusal(
        "the names of llama.cpp's metrics",
        "/metrics",
        None,
        200,
        lambda text: "llamacpp:" not in text and "penstock_" in text,
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=[each.what for each in CHECKS])
def test_a_client_of_llama_cpp_finds_what_it_knows(check: Check, demo: Deployment) -> None:
    run(check, demo)


@pytest.mark.parametrize("refusal", REFUSED, ids=[each.what for each in REFUSED])
def test_what_llama_cpp_does_is_refused_on_purpose(refusal: Refusal, demo: Deployment) -> None:
    refuse(refusal, demo)
