"""Two spellings of one number mean the same, in every body."""

import re
from typing import Any, Literal, get_origin

import numpy as np
import orjson
import pytest

from services.gateway.bodies import BODIES
from services.requests.bodies.body import Body
from services.requests.bodies.parse import parse
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody
from shared.process.errors import Invalid

CHAT: list[Any] = [{"role": "user", "content": "x"}]
# What a body must have, by its fields
REQUIRED: dict[str, Any] = {
    "messages": CHAT,
    "prompt": "x",
    "input": "x",
    "content": "x",
    "query": "x",
    "documents": ["x"],
    "texts": ["x"],
    "max_tokens": 5,
    "input_prefix": "x",
    "input_suffix": "x",
    "input_file_id": "file-x",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "model": "m",
    "modules": [{"name": "a", "text": "b"}],
    "requests": [{"custom_id": "a", "params": {}}],
    "tokens": [1],
    "name": "n",
}


def body_of(kind: type[Body], **more: Any) -> dict[str, Any]:
    return {name: REQUIRED[name] for name, field in kind.model_fields.items() if field.is_required()} | more


def least_of(kind: type[Body], name: str) -> int:
    """A value that the field takes, whatever its bounds are."""
    for number in (1, 2, -1, 3600):
        try:
            parse(kind, orjson.dumps(body_of(kind, **{name: number})))
        except Invalid:
            continue
        return number
    raise AssertionError(name)


def is_one(kind: type[Body], name: str) -> bool:
    """Whether the field takes one number, and no list or map of them."""
    return not {"Annotated", "list", "dict"} & {*repr(kind.model_fields[name].annotation).split("[")}


CASES = [(kind, name) for kind in BODIES for name in sorted(getattr(kind, "integers", ())) if is_one(kind, name)]


def test_the_fields_that_take_integers_are_found() -> None:
    """If a new way of writing a type hides them, this test finds none."""
    assert {
        "max_tokens",
        "top_k",
        "seed",
        "n",
        "logprobs",
        "stop_token_ids",
        "allowed_token_ids",
    } <= CompletionBody.integers.keys()
    assert not {"temperature", "top_p", "logit_bias", "deadline_s", "stream", "prompt"} & CompletionBody.integers.keys()
    assert len(CASES) > 40 and {kind.__name__ for kind, _ in CASES} >= {
        "MessagesBody",
        "ResponseBody",
        "LlamaCompletionBody",
        "OllamaEmbedBody",
        "RerankBody",
    }


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind.__name__}.{name}" for kind, name in CASES])
def test_a_whole_float_is_the_integer_and_no_other_float_is(kind: type[Body], name: str) -> None:
    number = least_of(kind, name)
    read = parse(kind, orjson.dumps(body_of(kind, **{name: float(number)})))
    assert getattr(read, name) == number and type(getattr(read, name)) is int
    for wrong in (number + 0.5, 1e300, -1e19):
        with pytest.raises(Invalid) as refused:
            parse(kind, orjson.dumps(body_of(kind, **{name: wrong})))
        assert refused.value.param == name
        is_listed = get_origin(kind.model_fields[name].annotation) is Literal  # whose values the error names
        assert (
            wrong == number + 0.5 or is_listed or re.search("from -?[0-9]+ to [0-9]+$|of 64 bits$", str(refused.value))
        )


def test_an_integer_out_of_its_range_is_told_the_range() -> None:
    for name, value, words in (
        ("seed", 2**64, "seed: expected an integer from 0 to 18446744073709551615"),
        ("n", 0, "n: expected an integer from 1 to 128"),
        ("truncate_prompt_tokens", 1 << 40, "truncate_prompt_tokens: expected an integer from -1 to 16777216"),
        ("top_k", 2**64, "top_k: expected an integer from -1 to 16777216"),
    ):
        with pytest.raises(Invalid) as refused:
            parse(CompletionBody, f'{{"prompt": "x", "{name}": {value}}}'.encode())
        assert (str(refused.value), refused.value.param) == (words, name)


def test_so_are_those_in_lists_and_those_that_stand_for_tokens() -> None:
    body = parse(
        CompletionBody,
        b'{"prompt": [[1.0, 2], [3]], "stop_token_ids": [1.0, 2], "allowed_token_ids": [7e0], "logit_bias": {"3": 1}}',
    )
    assert [each.tolist() for each in body.prompt if isinstance(each, np.ndarray)] == [[1, 2], [3]]
    params = body.params()
    assert (params.stop_token_ids, params.allowed_token_ids) == ((1, 2), (7,))
    for wrong in (b'{"prompt": [1.5]}', b'{"prompt": "x", "stop_token_ids": [1.5]}', b'{"prompt": [1, 1e300]}'):
        with pytest.raises(Invalid):
            parse(CompletionBody, wrong)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_in_json_is_none(number: str) -> None:
    with pytest.raises(Invalid, match="not JSON"):
        parse(ChatCompletionBody, f'{{"messages": [{{"role": "user", "content": "x"}}], "top_k": {number}}}'.encode())
