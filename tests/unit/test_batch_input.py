"""A batch's input in blocks: all lines in order, and no more in a block than its answers may take of memory."""

import asyncio
import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from services.jobs.asking import ENDPOINTS
from services.jobs.input import check_input, read_block, read_index, weight_of
from services.jobs.output import answered
from services.requests.store.batches.store import Totals
from services.requests.store.files.storage import Storage
from shared.process.errors import Invalid


@pytest.mark.parametrize(
    ("body", "weight"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["x", [1, 2]], "n": 3, "best_of": 5}, 10),
        ({"prompt": "x", "n": 7.0, "logprobs": 1.0}, 14),
        ({"input": ["x"] * 300}, 300),
        ({"input": [{"role": "user", "content": "x"}] * 9}, 1),  # a conversation
        ({"messages": [], "logprobs": True, "top_logprobs": 20}, 21),
        ({"prompt": {}, "n": "many", "best_of": -7, "logprobs": None}, 1),  # nobody has checked it
    ],
)
def test_a_line_weighs_what_its_answer_may_take(body: dict[str, Any], weight: int) -> None:
    assert weight_of(body) == weight


@pytest.mark.parametrize(
    ("body", "sizes"),
    [
        ({"prompt": "x"}, [100, 100, 50]),
        ({"prompt": "x", "logprobs": 4}, [100, 100, 50]),
        ({"prompt": "x", "n": 300}, [1] * 250),
    ],
)
def test_blocks_have_all_lines_in_order(body: dict[str, Any], sizes: list[int], tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    lines = [
        {"custom_id": f"{number:03}", "method": "POST", "url": "/v1/completions", "body": {"model": "m"} | body}
        for number in reversed(range(250))
    ]
    storage.write("in", "\n".join(map(json.dumps, lines)).encode())
    checked = check_input(storage, "in", "batch_a", "/v1/completions", 1000)
    assert (checked.total, checked.model, checked.errors) == (250, "m", [])
    index = read_index(storage, "batch_a")
    blocks = [
        read_block(storage, "batch_a", "/v1/completions", *index[number : number + 2])
        for number in range(len(index) - 1)
    ]
    assert [len(block) for block in blocks] == sizes
    assert [line.custom_id for block in blocks for line in block] == [f"{number:03}" for number in range(250)]


def test_a_byte_order_mark_and_empty_lines_are_no_requests(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}}
    storage.write("in", codecs.BOM_UTF8 + b"\n\r\n" + json.dumps(line).encode() + b"\r\n  \n")
    assert check_input(storage, "in", "batch_a", "/v1/completions", 1000).total == 1
    storage.write("in", codecs.BOM_UTF8 + json.dumps(line).encode() + b"\n" + codecs.BOM_UTF8)
    assert [each["line"] for each in check_input(storage, "in", "batch_a", "/v1/completions", 1000).errors] == [2], (
        "in the middle it is a mistake"
    )


def test_an_answer_is_one_line_however_lines_are_split() -> None:
    body = {"text": "a\u2028b\u2029c\x85d\ne", "\u2028": 1}
    line = answered("key", "custom\u2028id", 200, body, Totals(completed=1)).line
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line)["response"]["body"] == body and json.loads(line)["custom_id"] == "custom\u2028id"


def test_a_line_has_no_suffix() -> None:
    """The prompt of an infill needs the tokenizer, which a batch's worker does not ask."""
    with pytest.raises(Invalid, match="not available in batches"):
        asyncio.run(ENDPOINTS["/v1/completions"](None, {"model": "m", "prompt": "a", "suffix": "b"}, "", 0))  # type: ignore[arg-type]
