"""vLLM's server, by its documentation and by what its own tests check: a list of behaviours that
its clients may count on.
"""

from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.deployment import MODEL, Deployment
from tests.pipeline.checks import Check, Refusal, refuse, run

OF_TEXT, OF_CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "What is Penstock?"
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
STREAM = COMPLETION | {"stream": True}
ASKED = [{"role": "user", "content": PROMPT}]
BEGUN = [*ASKED, {"role": "assistant", "content": "Penstock is"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": ASKED, "max_tokens": 8, "temperature": 0}
GO_ON = CHAT | {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]},
    },
}
TEXTS = {"model": MODEL, "text_1": "What is a turbine?", "text_2": ["A turbine turns.", "Bread is baked."]}
MANY = 40


def text(it: Any) -> str:
    """A completion's text, or a chat's."""
    choice = it["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def joined(them: Any) -> str:
    """The text of a stream."""
    choices = [each["choices"][0] for each in them if each["choices"]]
    return "".join(each["text"] if "text" in each else each["delta"].get("content") or "" for each in choices)


def completed(ask: Any, **fields: Any) -> Any:
    return ask(OF_TEXT, COMPLETION | fields)


def ids(it: Any) -> list[int]:
    found: list[int] = it["choices"][0]["token_ids"]
    return found


def is_error(it: Any, param: str | None) -> bool:
    """OpenAI's shape, about a field."""
    error = it["error"]
    return (
        set(error) >= {"message", "type", "param", "code"}
        and error["type"] == "invalid_request_error"
        and error["param"] == param
    )


def wrong(path: str, field: str, value: Any) -> Check:
    """A value that is refused by its field's name."""
    body = CHAT if "chat" in path else COMPLETION
    return Check(f"{path} {field} {value!r:.30}", path, body | {field: value}, lambda it, _: is_error(it, field), 400)


CHECKS = [
    # what is served
    Check("/health", "/health", None, lambda it, _: it["status"] == "ok"),
    Check("/version", "/version", None, lambda it, _: isinstance(it["version"], str)),
    Check("/load", "/load", None, lambda it, _: isinstance(it["server_load"], int)),
    Check("/metrics", "/metrics", None, lambda it, _: "# TYPE " in it),
    Check(
        "/v1/models",
        "/v1/models",
        None,
        lambda it, _: (
            [(each["id"], each["object"], each["root"], each["parent"], each["max_model_len"]) for each in it["data"]]
            == [(MODEL, "model", MODEL, None, 1024)]
        ),
    ),
    Check(
        "permission in /v1/models",
        "/v1/models",
        None,
        lambda it, _: (
            it["data"][0]["permission"][0]["object"] == "model_permission"
            and it["data"][0]["permission"][0]["allow_sampling"] is True
        ),
    ),
    Check("/tokenizer_info", "/tokenizer_info", None, lambda it, _: it["tokenizer_class"] and it["chat_template"]),
    # tokens
    Check(
        "/tokenize",
        "/tokenize",
        {"model": MODEL, "prompt": PROMPT},
        lambda it, _: (
            set(it) == {"count", "max_model_len", "tokens", "token_strs"}
            and it["count"] == len(it["tokens"])
            and it["token_strs"] is None
        ),
    ),
    Check(
        "/tokenize of a conversation",
        "/tokenize",
        {"model": MODEL, "messages": ASKED},
        lambda it, ask: (
            it["count"] > ask("/tokenize", {"model": MODEL, "messages": ASKED, "add_generation_prompt": False})["count"]
        ),
    ),
    Check(
        "/tokenize that goes on with a message",
        "/tokenize",
        {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False},
        lambda it, ask: ask("/detokenize", it)["prompt"].endswith("Penstock is"),
    ),
    Check(
        "both prompts at once in /tokenize",
        "/tokenize",
        {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
        lambda it, _: is_error(it, "continue_final_message"),
        400,
    ),
    Check("/tokenize with tools", "/tokenize", {"messages": ASKED, "tools": [TOOL]}, lambda it, _: it["count"] > 5),
    Check(
        "return_token_strs",
        "/tokenize",
        {"prompt": PROMPT, "return_token_strs": True},
        lambda it, _: len(it["token_strs"]) == it["count"],
    ),
    Check(
        "add_special_tokens",
        "/tokenize",
        {"prompt": PROMPT, "add_special_tokens": False},
        lambda it, _: it["count"] > 0,
    ),
    Check(
        "/detokenize",
        "/tokenize",
        {"prompt": PROMPT, "add_special_tokens": False},
        lambda it, ask: ask("/detokenize", it)["prompt"] == PROMPT,
    ),
    Check(
        "tokens that no vocabulary has", "/detokenize", {"tokens": [10**6]}, lambda it, _: is_error(it, "tokens"), 400
    ),
    Check("neither prompt nor messages", "/tokenize", {}, lambda it, _: is_error(it, "prompt"), 400),
    Check(
        "render a chat",
        "/v1/chat/completions/render",
        CHAT | {"top_p": 0.5, "stream": True, "stream_options": {"include_usage": True}},
        lambda it, ask: (
            it["token_ids"] == ask("/tokenize", {"messages": ASKED})["tokens"]
            and it["sampling_params"]["top_p"] == 0.5
            and it["request_id"].startswith("chatcmpl-")
            and it["stream"] is True
            and it["stream_options"]["include_usage"] is True
        ),
    ),
    Check(
        "render completions",
        "/v1/completions/render",
        COMPLETION | {"prompt": [PROMPT, "b"]},
        lambda them, ask: (
            [each["token_ids"] for each in them]
            == [ask("/tokenize", {"prompt": each})["tokens"] for each in (PROMPT, "b")]
            and them[0]["request_id"].startswith("cmpl-")
            and them[0]["model"] == MODEL
        ),
    ),
    Check(
        "render for another model",
        "/v1/completions/render",
        COMPLETION | {"model": "none"},
        lambda it, _: "error" in it,
        404,
    ),
    # completions
    Check(
        "a completion",
        OF_TEXT,
        COMPLETION,
        lambda it, _: (
            it["object"] == "text_completion"
            and it["choices"][0]["finish_reason"] == "length"
            and it["usage"]["completion_tokens"] == 8
        ),
    ),
    Check(
        "16 tokens by default",
        "/v1/completions",
        {"model": MODEL, "prompt": "A penstock", "ignore_eos": True},
        lambda it, _: it["usage"]["completion_tokens"] == 16,
    ),
    Check(
        "token ids as a prompt",
        "/tokenize",
        {"prompt": PROMPT},
        lambda it, ask: text(completed(ask, prompt=it["tokens"])) == text(completed(ask)),
    ),
    Check(
        "several prompts",
        OF_TEXT,
        COMPLETION | {"prompt": [PROMPT, PROMPT]},
        lambda it, _: it["choices"][0]["text"] == it["choices"][1]["text"] and it["choices"][1]["index"] == 1,
    ),
    Check(
        "n",
        OF_TEXT,
        COMPLETION | {"n": 3, "temperature": 1.0},
        lambda it, _: [each["index"] for each in it["choices"]] == [0, 1, 2],
    ),
    Check("echo", OF_TEXT, COMPLETION | {"echo": True}, lambda it, ask: text(it) == PROMPT + text(completed(ask))),
    Check(
        "echo with logprobs and without tokens",
        OF_TEXT,
        COMPLETION | {"echo": True, "logprobs": 1, "max_tokens": 0},
        lambda it, _: text(it) == PROMPT and it["choices"][0]["logprobs"]["token_logprobs"][0] is None,
    ),
    Check(
        "logprobs",
        OF_TEXT,
        COMPLETION | {"logprobs": 5},
        lambda it, _: (
            len(it["choices"][0]["logprobs"]["tokens"]) == 8
            and all(len(each) >= 5 for each in it["choices"][0]["logprobs"]["top_logprobs"])
        ),
    ),
    Check(
        "logprobs 0",
        OF_TEXT,
        COMPLETION | {"logprobs": 0},
        lambda it, _: all(len(each) == 1 for each in it["choices"][0]["logprobs"]["top_logprobs"]),
    ),
    Check(
        "return_tokens_as_token_ids",
        OF_TEXT,
        COMPLETION | {"logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True},
        lambda it, _: it["choices"][0]["logprobs"]["tokens"] == [f"token_id:{each}" for each in ids(it)],
    ),
    Check(
        "return_token_ids",
        OF_TEXT,
        COMPLETION | {"return_token_ids": True},
        lambda it, ask: (
            it["choices"][0]["prompt_token_ids"] == ask("/tokenize", {"prompt": PROMPT})["tokens"]
            and ask("/detokenize", {"tokens": ids(it)})["prompt"] == text(it)
        ),
    ),
    Check(
        "return_token_ids in a stream",
        OF_TEXT,
        STREAM | {"return_token_ids": True},
        lambda them, ask: (
            them[0]["choices"][0]["prompt_token_ids"] == ask("/tokenize", {"prompt": PROMPT})["tokens"]
            and sum((each["choices"][0]["token_ids"] for each in them), [])
            == ids(completed(ask, return_token_ids=True))
        ),
    ),
    Check(
        "a stream",
        OF_TEXT,
        STREAM,
        lambda them, ask: joined(them) == text(completed(ask)) and them[-1]["choices"][0]["finish_reason"] == "length",
    ),
    Check(
        "include_usage",
        OF_TEXT,
        STREAM | {"stream_options": {"include_usage": True}},
        lambda them, _: (
            [each["usage"] for each in them[:-1]] == [None] * (len(them) - 1)
            and them[-1]["choices"] == []
            and them[-1]["usage"]["completion_tokens"] == 8
        ),
    ),
    Check(
        "continuous_usage_stats",
        OF_TEXT,
        STREAM | COUNTED,
        lambda them, _: (
            all(
                one["usage"]["completion_tokens"] <= other["usage"]["completion_tokens"]
                for one, other in pairwise(them)
            )
            and all(
                each["usage"]["total_tokens"] == each["usage"]["prompt_tokens"] + each["usage"]["completion_tokens"]
                for each in them
            )
        ),
    ),
    Check(
        "no usage unless asked for",
        OF_TEXT,
        STREAM | {"stream_options": {"include_usage": False}},
        lambda them, _: not any("usage" in each for each in them),
    ),
    Check(
        "stream_options without a stream",
        OF_TEXT,
        COMPLETION | {"stream_options": {"include_usage": True}},
        lambda it, _: is_error(it, "stream_options"),
        400,
    ),
    Check(
        "prompt_logprobs",
        OF_TEXT,
        COMPLETION | {"prompt_logprobs": 2},
        lambda it, ask: (
            it["choices"][0]["prompt_logprobs"][0] is None
            and len(it["choices"][0]["prompt_logprobs"]) == ask("/tokenize", {"prompt": PROMPT})["count"]
            and all(
                {"logprob", "rank", "decoded_token"} <= set(entry)
                for each in it["choices"][0]["prompt_logprobs"][1:]
                for entry in each.values()
            )
        ),
    ),
    Check(
        "best_of",
        OF_TEXT,
        COMPLETION | {"best_of": 3, "temperature": 1.0, "seed": 1},
        lambda it, _: len(it["choices"]) == 1,
    ),
    Check(
        "use_beam_search",
        OF_TEXT,
        COMPLETION | {"use_beam_search": True, "n": 2},
        lambda it, _: len({each["text"] for each in it["choices"]}) == 2,
    ),
    Check(
        "truncate_prompt_tokens",
        OF_TEXT,
        COMPLETION | {"truncate_prompt_tokens": 2},
        lambda it, _: it["usage"]["prompt_tokens"] == 2,
    ),
    Check(
        "truncate_prompt_tokens -1",
        OF_TEXT,
        COMPLETION | {"prompt": PROMPT * 400, "truncate_prompt_tokens": -1},
        lambda it, _: it["usage"]["prompt_tokens"] == 1024 - 8,
    ),
    Check(
        "min_tokens",
        OF_TEXT,
        COMPLETION | {"min_tokens": MANY, "max_tokens": MANY},
        lambda it, _: it["usage"]["completion_tokens"] == MANY,
    ),
    Check(
        "ignore_eos",
        OF_TEXT,
        COMPLETION | {"ignore_eos": True, "max_tokens": MANY},
        lambda it, _: it["usage"]["completion_tokens"] == MANY,
    ),
    Check(
        "stop",
        OF_TEXT,
        COMPLETION | {"guided_regex": "one two three", "max_tokens": 40, "stop": ["two"]},
        lambda it, _: (
            (text(it), it["choices"][0]["finish_reason"], it["choices"][0]["stop_reason"]) == ("one ", "stop", "two")
        ),
    ),
    Check(
        "include_stop_str_in_output",
        OF_TEXT,
        COMPLETION
        | {"guided_regex": "one two three", "max_tokens": 40, "stop": "two", "include_stop_str_in_output": True},
        lambda it, _: text(it) == "one two",
    ),
    Check(
        "stop_token_ids",
        OF_TEXT,
        COMPLETION | {"return_token_ids": True},
        lambda it, ask: completed(ask, stop_token_ids=ids(it)[3:4])["choices"][0]["stop_reason"] == ids(it)[3],
    ),
    Check(
        "bad_words",
        OF_TEXT,
        COMPLETION,
        lambda it, ask: "pipe" in text(it) and "pipe" not in text(completed(ask, bad_words=["pipe"])),
    ),
    Check(
        "allowed_token_ids",
        OF_TEXT,
        COMPLETION | {"allowed_token_ids": [40, 50], "return_token_ids": True},
        lambda it, _: set(ids(it)) <= {40, 50},
    ),
    Check(
        "logit_bias",
        OF_TEXT,
        COMPLETION | {"logit_bias": {"40": 100}, "return_token_ids": True},
        lambda it, _: ids(it)[0] == 40,
    ),
    Check(
        "skip_special_tokens",
        OF_TEXT,
        COMPLETION | {"allowed_token_ids": [1], "ignore_eos": True, "max_tokens": 2, "skip_special_tokens": False},
        lambda it, ask: text(it) == ask("/detokenize", {"tokens": [1, 1]})["prompt"],
    ),
    Check(
        "spaces_between_special_tokens",
        OF_TEXT,
        COMPLETION | {"spaces_between_special_tokens": False},
        lambda it, ask: text(it) == text(completed(ask)),
    ),
    Check(
        "top_p 0 takes the likeliest token, and whole floats are integers",
        OF_TEXT,
        COMPLETION
        | {
            "temperature": 1.5,
            "seed": 5,
            "top_p": 0,
            "top_k": 0.0,
            "max_tokens": float(COMPLETION["max_tokens"]),
            "n": 1.0,
            "stop": "",
        },
        lambda it, ask: it["choices"][0]["text"] == ask(OF_TEXT, COMPLETION | {"temperature": 0})["choices"][0]["text"],
    ),
    Check(
        "top_p 0 in a chat",
        OF_CHAT,
        CHAT | {"temperature": 1.5, "seed": 5, "top_p": 0},
        lambda it, ask: it["choices"][0]["message"] == ask(OF_CHAT, CHAT | {"temperature": 0})["choices"][0]["message"],
    ),
    Check(
        "top_k, top_p, min_p and penalties",
        OF_TEXT,
        COMPLETION
        | {
            "temperature": 1.0,
            "seed": 5,
            "top_k": 1,
            "top_p": 0.5,
            "min_p": 0.1,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
        },
        lambda it, ask: text(it) == text(completed(ask)),
    ),
    Check(
        "a repetition_penalty",
        OF_TEXT,
        COMPLETION | {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        lambda it, _: text(it),
    ),
    Check(
        "a seed",
        OF_TEXT,
        COMPLETION | {"temperature": 1.0, "seed": 11},
        lambda it, ask: text(it) == text(completed(ask, temperature=1.0, seed=11)),
    ),
    Check(
        "a negative seed",
        OF_TEXT,
        COMPLETION | {"temperature": 1.0, "seed": -5},
        lambda it, ask: text(it) == text(completed(ask, temperature=1.0, seed=-5)),
    ),
    Check("priority", OF_TEXT, COMPLETION | {"priority": 3}, lambda it, ask: text(it) == text(completed(ask))),
    Check(
        "cache_salt", OF_TEXT, COMPLETION | {"cache_salt": "pepper"}, lambda it, ask: text(it) == text(completed(ask))
    ),
    Check(
        "fields of vLLM's engine change nothing",
        OF_TEXT,
        COMPLETION | {"request_id": "r", "stream_interval": 1},
        lambda it, ask: text(it) == text(completed(ask)),
    ),
    # constrained answers
    *(
        Check(
            f"structured_outputs.{name}",
            OF_TEXT,
            COMPLETION | {"max_tokens": 40, "structured_outputs": {name: value}},
            lambda it, _, said=said: text(it) in said,
        )
        for name, value, said in (
            ("json", {"const": 7}, ["7"]),
            ("regex", "yes|no", ["yes", "no"]),
            ("choice", ["yes", "no"], ["yes", "no"]),
            ("grammar", 'root ::= "ab"', ["ab"]),
        )
    ),
    *(
        Check(
            f"guided_{name}",
            OF_TEXT,
            COMPLETION | {"max_tokens": 40, f"guided_{name}": value},
            lambda it, _, said=said: text(it) in said,
        )
        for name, value, said in (
            ("json", {"const": 7}, ["7"]),
            ("regex", "yes|no", ["yes", "no"]),
            ("choice", ["yes", "no"], ["yes", "no"]),
            ("grammar", 'root ::= "ab"', ["ab"]),
        )
    ),
    Check(
        "structured_outputs.json_object",
        OF_CHAT,
        CHAT | {"structured_outputs": {"json_object": True}},
        lambda it, _: text(it).startswith("{"),
    ),
    Check(
        "two constraints",
        OF_TEXT,
        COMPLETION | {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        lambda it, _: it["error"]["param"].startswith("structured_outputs"),
        400,
    ),
    Check(
        "response_format structural_tag",
        OF_CHAT,
        CHAT
        | {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}],
                "triggers": ["<a>"],
            }
        },
        lambda it, _: isinstance(text(it), str),
    ),
    # chats
    Check(
        "a chat",
        OF_CHAT,
        CHAT,
        lambda it, _: (
            it["object"] == "chat.completion"
            and it["choices"][0]["message"]["role"] == "assistant"
            and it["choices"][0]["stop_reason"] is None
        ),
    ),
    Check(
        "a chat's logprobs",
        OF_CHAT,
        CHAT | {"logprobs": True, "top_logprobs": 3},
        lambda it, _: [len(each["top_logprobs"]) for each in it["choices"][0]["logprobs"]["content"]] == [3] * 8,
    ),
    Check(
        "a chat's top_logprobs 0",
        OF_CHAT,
        CHAT | {"logprobs": True, "top_logprobs": 0},
        lambda it, _: all(each["top_logprobs"] == [] for each in it["choices"][0]["logprobs"]["content"]),
    ),
    Check("a message that is gone on with", OF_CHAT, GO_ON, lambda it, _: text(it).startswith(" a server for large")),
    Check(
        "a chat's echo",
        OF_CHAT,
        GO_ON | {"echo": True},
        lambda it, ask: text(it) == "Penstock is" + text(ask(OF_CHAT, GO_ON)),
    ),
    Check(
        "a chat's echo in a stream",
        OF_CHAT,
        GO_ON | {"echo": True, "stream": True},
        lambda them, ask: joined(them) == "Penstock is" + text(ask(OF_CHAT, GO_ON)),
    ),
    Check(
        "an echo without a message to go on with",
        OF_CHAT,
        CHAT | {"echo": True},
        lambda it, ask: text(it) == text(ask(OF_CHAT, CHAT)),
    ),
    Check(
        "add_generation_prompt",
        OF_CHAT,
        CHAT | {"add_generation_prompt": False, "return_token_ids": True},
        lambda it, ask: (
            it["prompt_token_ids"] == ask("/tokenize", {"messages": ASKED, "add_generation_prompt": False})["tokens"]
        ),
    ),
    Check(
        "both ends of a prompt",
        OF_CHAT,
        GO_ON | {"add_generation_prompt": True},
        lambda it, _: is_error(it, "continue_final_message"),
        400,
    ),
    Check(
        "a chat's token ids",
        OF_CHAT,
        CHAT | {"return_token_ids": True},
        lambda it, ask: it["prompt_token_ids"] == ask("/tokenize", {"messages": ASKED})["tokens"] and len(ids(it)) == 8,
    ),
    Check(
        "a chat's token ids in a stream",
        OF_CHAT,
        CHAT | {"return_token_ids": True, "stream": True},
        lambda them, ask: (
            them[0]["prompt_token_ids"] == ask("/tokenize", {"messages": ASKED})["tokens"]
            and not any("prompt_token_ids" in each for each in them[1:])
            and sum((each["choices"][0].get("token_ids", []) for each in them), [])
            == ids(ask(OF_CHAT, CHAT | {"return_token_ids": True}))
        ),
    ),
    Check(
        "a chat's usage in each chunk",
        OF_CHAT,
        CHAT | {"stream": True} | COUNTED,
        lambda them, _: (
            [each["usage"]["completion_tokens"] for each in them][:1] == [0]
            and all(each["usage"]["prompt_tokens"] > 5 for each in them)
        ),
    ),
    Check(
        "a chat's prompt_logprobs",
        OF_CHAT,
        CHAT | {"prompt_logprobs": 0},
        lambda it, _: it["prompt_logprobs"][0] is None,
    ),
    Check("chat_template_kwargs", OF_CHAT, CHAT | {"chat_template_kwargs": {"a": 1}}, lambda it, _: text(it)),
    Check(
        "a chat_template of the request's own",
        OF_CHAT,
        CHAT | {"chat_template": "x"},
        lambda it, _: is_error(it, "chat_template"),
        400,
    ),
    Check(
        "parts of a content",
        OF_CHAT,
        CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]},
        lambda it, ask: text(it) == text(ask(OF_CHAT, CHAT)),
    ),
    Check(
        "a named tool",
        OF_CHAT,
        CHAT
        | {"max_tokens": 60, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        lambda it, _: it["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather",
    ),
    Check(
        "tool_choice required",
        OF_CHAT,
        CHAT | {"max_tokens": 60, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        lambda it, _: it["choices"][0]["finish_reason"] == "tool_calls",
    ),
    Check("tool_choice null", OF_CHAT, CHAT | {"tool_choice": None}, lambda it, _: text(it)),
    Check(
        "a tool that nobody has",
        OF_CHAT,
        CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        lambda it, _: is_error(it, "tool_choice"),
        400,
    ),
    # vectors and scores
    Check(
        "/v1/embeddings of a conversation",
        "/v1/embeddings",
        {"model": MODEL, "messages": ASKED},
        lambda it, _: len(it["data"]) == 1,
    ),
    Check(
        "/v1/embeddings truncated",
        "/v1/embeddings",
        {"model": MODEL, "input": PROMPT * 400, "truncate_prompt_tokens": 10},
        lambda it, _: it["usage"]["prompt_tokens"] == 10,
    ),
    Check(
        "/pooling",
        "/pooling",
        {"model": MODEL, "input": ["a", "b"]},
        lambda it, _: [each["object"] for each in it["data"]] == ["pooling"] * 2,
    ),
    Check(
        "/score",
        "/score",
        TEXTS,
        lambda it, ask: (
            [each["object"] for each in it["data"]] == ["score"] * 2 and it["data"] == ask("/v1/score", TEXTS)["data"]
        ),
    ),
    Check(
        "/score of too many", "/score", TEXTS | {"text_1": ["a", "b", "c"]}, lambda it, _: is_error(it, "text_1"), 400
    ),
    *(
        Check(
            path,
            path,
            {"model": MODEL, "query": "a", "documents": ["b", "c"]},
            lambda it, _: len(it["results"]) == 2 and "document" in it["results"][0],
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Check(
        "/classify without a head",
        "/classify",
        {"model": MODEL, "input": "a"},
        lambda it, _: is_error(it, "model"),
        400,
    ),
    # what is wrong
    Check(
        "another model", OF_CHAT, CHAT | {"model": "none"}, lambda it, _: it["error"]["code"] == "model_not_found", 404
    ),
    Check("a body that is no object", "/v1/chat/completions", [1], lambda it, _: is_error(it, None), 400),
    wrong(OF_TEXT, "seed", 1 << 64),
    wrong(OF_TEXT, "cache_salt", ""),
    wrong(OF_CHAT, "cache_salt", ""),
    wrong(OF_TEXT, "temperature", -1),
    wrong(OF_TEXT, "top_p", -0.1),
    wrong(OF_TEXT, "top_k", -2),
    wrong(OF_TEXT, "min_p", 2),
    wrong(OF_TEXT, "presence_penalty", 3),
    wrong(OF_TEXT, "repetition_penalty", 0),
    wrong(OF_TEXT, "n", 0),
    wrong(OF_TEXT, "logprobs", -1),
    wrong(OF_TEXT, "logprobs", 21),
    wrong(OF_TEXT, "prompt_logprobs", -1),
    wrong(OF_TEXT, "prompt", []),
    wrong(OF_TEXT, "prompt", [10**6]),
    wrong(OF_TEXT, "logit_bias", {str(10**6): 1}),
    wrong(OF_TEXT, "logit_bias", {"a": 1}),
    wrong(OF_TEXT, "stop_token_ids", [10**6]),
    wrong(OF_TEXT, "allowed_token_ids", []),
    wrong(OF_TEXT, "truncate_prompt_tokens", 0),
    wrong(OF_TEXT, "guided_regex", "("),
    wrong(OF_CHAT, "top_logprobs", 3),
    wrong(OF_CHAT, "max_tokens", 0),
    wrong(OF_CHAT, "messages", []),
]

REFUSED = [
    Refusal(
        "`prompt_embeds`", OF_TEXT, COMPLETION | {"prompt_embeds": "x"}, 400, lambda it: is_error(it, "prompt_embeds")
    ),
    Refusal(
        "`suffix` where the model has no tokens for infilling",
        OF_TEXT,
        COMPLETION | {"suffix": "x"},
        400,
        lambda it: is_error(it, "suffix"),
    ),
    Refusal(
        "audio",
        OF_CHAT,
        CHAT
        | {
            "messages": [
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}
            ]
        },
        400,
        lambda it: it["error"]["param"] == "messages[0].content[0].type",
    ),
    *(
        Refusal(
            "`thinking_token_budget`, `repetition_detection`, `logprob_token_ids`",
            OF_CHAT,
            CHAT | {name: value},
            400,
            lambda it, name=name: is_error(it, name),
        )
        for name, value in (
            ("thinking_token_budget", 5),
            ("repetition_detection", {"max_pattern_size": 3}),
            ("logprob_token_ids", [1]),
        )
    ),
    Refusal(
        "`documents` for a template that knows of none",
        OF_CHAT,
        CHAT | {"documents": [{"title": "t", "text": "x"}]},
        400,
        lambda it: is_error(it, "documents"),
    ),
    Refusal(
        "a `logit_bias` beyond ±100",
        OF_TEXT,
        COMPLETION | {"logit_bias": {"1": 150}},
        400,
        lambda it: is_error(it, "logit_bias"),
    ),
    Refusal(
        "`seed` from 2^63 to 2^64 − 1",
        OF_TEXT,
        COMPLETION | {"seed": (1 << 64) - 1},
        200,
        lambda it: bool(it["choices"]),
    ),
    Refusal(
        "`prompt_logprobs` in a stream",
        OF_TEXT,
        STREAM | {"prompt_logprobs": 1},
        200,
        lambda them: len(them[0]["choices"][0]["prompt_logprobs"]) > 1,
    ),
    Refusal(
        "`continue_final_message` alone",
        OF_CHAT,
        CHAT | {"messages": BEGUN, "continue_final_message": True},
        200,
        lambda it: bool(it["choices"]),
    ),
    Refusal(
        "`task` of `/pooling` other than `embed`",
        "/pooling",
        {"model": MODEL, "input": "a", "task": "token_embed"},
        400,
        lambda it: is_error(it, "task"),
    ),
    *(
        Refusal(
            "`/v1/load_lora_adapter`, `/inference/v1/generate`, `/v1/chat/completions/batch`",
            path,
            {},
            404,
            lambda it: it["error"]["code"] == "unknown_url",
        )
        for path in ("/v1/load_lora_adapter", "/inference/v1/generate", "/v1/chat/completions/batch")
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=[each.what for each in CHECKS])
def test_a_client_of_vllm_finds_what_it_knows(check: Check, demo: Deployment) -> None:
    run(check, demo)


@pytest.mark.parametrize("refusal", REFUSED, ids=[each.what for each in REFUSED])
def test_what_vllm_does_is_done_otherwise_on_purpose(refusal: Refusal, demo: Deployment) -> None:
    refuse(refusal, demo)


def test_a_request_s_own_id_comes_back(demo: Deployment) -> None:
    reply = httpx.post(f"{demo.url()}/v1/completions", json=COMPLETION, headers={"X-Request-Id": "mine-7"}, timeout=60)
    assert reply.headers["X-Request-Id"] == "mine-7"
