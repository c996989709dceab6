"""A value that is nested too deep, or holds endless numbers or no JSON, is a client's error or a
model's text, wherever it stands: nothing else is raised.
"""

import json
import pickle
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
import pytest

from services.gateway.bodies import BODIES
from services.requests.bodies.parse import MAX_BODY_DEPTH, parse
from services.requests.dialects.anthropic import chat as anthropic_chat
from services.requests.dialects.anthropic.schemas import CountTokensBody
from services.requests.dialects.llamacpp.schemas import LlamaCompletionBody, LlamaEmbeddingBody
from services.requests.dialects.ollama.schemas import OllamaChatBody, OllamaGenerateBody
from services.requests.dialects.openai.schemas import ChatCompletionBody, GenerateBody
from services.requests.dialects.openai.translate import make_chat
from services.requests.dialects.responses import chat as responses_chat
from services.requests.dialects.responses.schemas import ResponseBody
from services.requests.dialects.responses.stored import StoredResponse
from services.requests.store.batches.lines import read_line
from services.requests.text.answers.answer import input_of
from services.requests.text.answers.translate import arguments_of, is_broken_off
from services.requests.text.schemas.prepare import prepare
from services.requests.workers.grammars.answer_worker import problems_of
from shared.model.constraint import Constraint
from shared.model.json_text import MAX_DEPTH, MAX_DIGITS, TooDeep, check_depth, check_text, read_json, write_json
from shared.model.parsing.answer import FORCED, AnswerParser, Parsing
from shared.model.parsing.forms import REASONING, TOOL_CALLS
from shared.model.parsing.json_scanner import JsonScanner
from shared.model.parsing.pieces import Piece, merged
from shared.process.errors import Invalid
from tests.hostile.depths import HERE, LEAVES, LIMITS, content_of, nested, places

ROUNDS = range(40)  # one of them in `make test`
WRAPPED = (  # a call with arguments of its own, in each form
    '<tool_call>{"name": "f", "arguments": %s}</tool_call>',
    '<tool_call>{"arguments": %s, "name": "f"}</tool_call>',
    '<|python_tag|>{"name": "f", "parameters": %s}',
    "[TOOL_CALLS]f[ARGS]%s",
    '[TOOL_CALLS][{"name": "f", "arguments": %s}]',
    '<|tool_call|>[{"arguments": %s, "name": "f"}]',
    "[f(a=%s)]",
    "<|python_start|>[f(a=%s)]<|python_end|>",
    "%s",
    "<start_function_call>call:f{a:%s}<end_function_call>",
    '[{"name": "f", "parameters": %s}]',
    "<tool_call><function=f><parameter=a>\n%s\n</parameter></function></tool_call>",
    "<|channel|>commentary to=functions.f<|message|>%s<|call|>",
)
KIND_OF = {
    "/v1/chat/completions": "ChatCompletionBody",
    "/v1/messages": "MessagesBody",
    "/v1/messages/count_tokens": "CountTokensBody",
    "/v1/messages/batches": "MessageBatchBody",
    "/api/chat": "OllamaChatBody",
    "/api/generate": "OllamaGenerateBody",
    "/v1/responses": "ResponseBody",
    "/tokenize": "TokenizeBody",
    "/v1/completions": "CompletionBody",
    "/completion": "LlamaCompletionBody",
    "/infill": "InfillBody",
    "/v1/embeddings": "EmbeddingBody",
    "/api/embed": "OllamaEmbedBody",
    "/v1/prompt_modules": "PromptModulesBody",
    "/detokenize": "DetokenizeBody",
    "/rerank": "RerankBody",
    "/score": "ScoreBody",
    "/classify": "ClassificationBody",
    "/v1/batches": "BatchBody",
}
NAMED = {each.__name__: each for each in BODIES}


def read_in_parts(text: str, form: str, reasoning: str, step: int) -> list[Piece]:
    parser = AnswerParser(Parsing(reasoning, form, ("f",), texts=("f.b",)))
    return merged(
        [piece for at in range(0, len(text), step) for piece in parser.feed(text[at : at + step])] + parser.finish()
    )


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": ' + "1" * 5000 + '}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": NaN}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": ' + "[" * 200 + "]" * 200 + '}"}</tool_call>'),
        ("pythonic", "[f(a=0x" + "f" * 5000 + ")]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[f(a=" + "[" * 150 + "]" * 150 + ")]"),
        ("gemma", "<start_function_call>call:f{a:" + "[" * 129 + "]" * 129 + "}<end_function_call>"),
    ],
)
def test_a_call_that_can_t_be_json_is_content(form: str, text: str) -> None:
    assert read_in_parts(text, form, "", 7) == [Piece("content", text)]


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 5000])
def test_a_word_without_quotes_that_is_no_json_is_a_text(word: str) -> None:
    for form, text in (
        ("gemma", f"<start_function_call>call:f{{a:{word}}}<end_function_call>"),
        ("qwen3_coder", f"<tool_call><function=f><parameter=a>\n{word}\n</parameter></function></tool_call>"),
    ):
        assert read_in_parts(text, form, "", 7) == [Piece("call", "f"), Piece("arguments", json.dumps({"a": word}))]


def test_what_may_be_read_may_be_written_and_no_deeper() -> None:
    deepest = "[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH
    assert write_json(read_json(deepest)) == deepest
    check_text(deepest)
    for levels in (MAX_DEPTH + 1, 987, 5000, 200_000):
        for check in (read_json, check_text):
            with pytest.raises(TooDeep, match="nested deeper than 128 levels"):
                check('{"a":' * levels + "1" + "}" * levels)
    check_text("[" * 500)  # no JSON
    check_depth({"a": [{}] * 1000}, 3)
    assert (
        write_json({"a": "\ud800", "é": "ü"}) == '{"a": "\\ud800", "\\u00e9": "\\u00fc"}'
        and write_json({"é": 1}) == '{"é": 1}'
    )
    for value in (float("nan"), float("inf"), int("9" * MAX_DIGITS) * 100):
        with pytest.raises(ValueError, match=r"JSON|digit"):
            write_json([value])


@pytest.mark.sampled(40)
@pytest.mark.parametrize("number", ROUNDS)
def test_no_answer_raises_and_calls_are_json(number: int) -> None:
    rng = random.Random(number)
    for form in ("", *TOOL_CALLS, *FORCED):
        for _ in range(40):
            text = "".join(
                rng.choice(WRAPPED) % nested_any(rng) if rng.random() < 0.9 else rng.choice("<[{ x")
                for _ in range(rng.choice((1, 1, 2)))
            )
            if rng.random() < 0.2:  # the arguments as a text of JSON
                text = '<tool_call>{"name": "f", "arguments": ' + json.dumps(nested_any(rng)) + "}</tool_call>"
            text = text[:100_000]
            for piece in read_in_parts(text, form, rng.choice(("", "", *REASONING)), rng.choice((40, 500, 5000))):
                if piece.kind == "arguments":
                    assert form in FORCED or is_begun_json(piece.text), (form, text[:200])
                    told = arguments_of(piece.text)
                    orjson.dumps(told), input_of(piece.text), is_broken_off(piece.text)


def nested_any(rng: random.Random) -> str:
    return nested(rng, rng.choice((0, 1, 64, 120, 127, 129, *LIMITS, rng.randint(1, 2000))))


def is_begun_json(arguments: str) -> bool:
    scanner = JsonScanner()
    return scanner.feed(arguments) == len(arguments) and not scanner.is_broken


def of_ollama(body: OllamaChatBody | OllamaGenerateBody) -> ChatCompletionBody:
    messages = body.messages if isinstance(body, OllamaChatBody) else [{"role": "user", "content": body.prompt}]
    tools = body.tools if isinstance(body, OllamaChatBody) else []
    given = body.sampling() | {"messages": messages, "tools": tools, "response_format": body.response_format()}
    return make_chat(given, {}, str, str)


def go_on(body: Any) -> None:
    """Make of a body all that is made of it before a request is submitted."""
    pickle.dumps(body)
    if isinstance(body, CountTokensBody):
        body = anthropic_chat.chat_of(body)
    if isinstance(body, ResponseBody):
        pickle.dumps(StoredResponse({"tools": body.tools}, body.input).encode())
        body = responses_chat.chat_of(body, [])
    if isinstance(body, OllamaChatBody | OllamaGenerateBody):
        body = of_ollama(body)
    if isinstance(body, LlamaCompletionBody):
        body.as_completion("m", ["x"], {})
    if isinstance(body, LlamaEmbeddingBody):
        assert body.inputs
    if isinstance(body, GenerateBody):
        body.constraint()
    if isinstance(body, ChatCompletionBody):
        calling = body.calling()
        calling.forced(), calling.offered("hermes"), body.chat_options(calling, may_bring_template=True)
        for message in body.messages:
            message.to_wire()


@pytest.mark.sampled(40)
@pytest.mark.parametrize("number", ROUNDS)
def test_no_body_raises_anything_but_a_client_s_error(number: int) -> None:
    """On a stack that is as deep as a gateway's is."""
    rng = random.Random(number)
    for path, body in places() * 4:
        value = nested_any(rng) if rng.random() < 0.7 else nested(rng, rng.randint(1, 140), "1")
        below(100, partial(taken, path, content_of(body, value)))


def taken(path: str, content: bytes) -> None:
    try:
        go_on(parse(NAMED[KIND_OF[path]], content))
    except Invalid as error:
        assert error.status == 400 and len(str(error)) < 5000


def below(levels: int, call: Callable[[], None]) -> None:
    if levels:
        below(levels - 1, call)
    else:
        call()


@pytest.mark.parametrize("levels", [MAX_BODY_DEPTH, 255, 987, 1020])
def test_the_field_that_is_nested_too_deep_is_named(levels: int) -> None:
    for kind, body in zip(NAMED.values(), [{"unknown": HERE}] * len(NAMED), strict=True):
        with pytest.raises(Invalid, match="unknown: the body is nested deeper than 144 levels") as found:
            parse(kind, content_of(body, "[" * levels + "]" * levels))
        assert found.value.param == "unknown"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": HERE}}
    with pytest.raises(Invalid, match="body: the line is nested deeper than 144 levels"):
        read_line(content_of(line, "[" * levels + "]" * levels), "/v1/completions", 1 << 20)


def test_arguments_as_a_text_are_nested_no_deeper() -> None:
    for depth, is_taken in ((MAX_DEPTH, True), (MAX_DEPTH + 1, False), (987, False), (5000, False)):
        arguments = "[" * depth + "]" * depth
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        content = json.dumps({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}).encode()
        try:
            assert parse(ChatCompletionBody, content).messages and is_taken
        except Invalid as error:
            assert (
                not is_taken
                and str(error) == "messages[0].tool_calls[0].function.arguments: nested deeper than 128 levels"
            )


@pytest.mark.sampled(40)
@pytest.mark.parametrize("number", ROUNDS)
def test_no_answer_or_schema_ends_the_helpers(number: int) -> None:
    rng = random.Random(number)
    schemas: list[Any] = [
        {},
        {"type": "array"},
        {"uniqueItems": True},
        {"$ref": "#"},
        {"items": {"$ref": "#"}},
        {"additionalProperties": {"$ref": "#"}},
    ]
    schemas += [
        {"multipleOf": 0},
        {"multipleOf": 1e-320},
        {"const": [[1]]},
        {"pattern": "("},
        {"$schema": []},
        {"properties": 1},
        {"$ref": 1},
        {"type": {}},
    ]
    for _ in range(150):
        text, schema = nested_any(rng), rng.choice(schemas)
        assert all(set(each) == {"path", "message"} for each in problems_of(schema, text))
        leaf = rng.choice([leaf for leaf in LEAVES if len(leaf) < 1000])
        schema_text = nested(rng, rng.randint(1, MAX_DEPTH), leaf)
        try:
            read_json(schema_text)
            prepare(Constraint("json_schema", schema_text, "x", is_lenient=rng.random() < 0.5))
        except (Invalid, ValueError):
            continue


def test_an_answer_that_is_nested_too_deep_is_said_to_be_unchecked() -> None:
    depth = sys.getrecursionlimit() - 10
    [told] = problems_of({"uniqueItems": True}, "[" * depth + "]" * depth)
    assert told == {"path": "$", "message": "not checked: it is nested deeper than 128 levels"}
    assert problems_of({"type": "array"}, "[1e999]") == []
    assert problems_of({}, "[NaN]") == [{"path": "$", "message": "it is not JSON"}]
