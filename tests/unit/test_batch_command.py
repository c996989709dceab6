"""`penstock batch`: files as people have them, and gateways that die."""

import codecs
import io
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.operator import batch
from services.operator.batch import call, download, insist, run_batch
from services.operator.batch_lines import Sifted, sift
from shared.process.errors import StartupError

REQUEST = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
LINE = json.dumps(REQUEST).encode()


def sifted(content: bytes) -> Sifted:
    return sift(Path("x"), io.BytesIO(content))


@pytest.mark.parametrize(
    "before", [b"", b"\n", b"  \r\n\n", codecs.BOM_UTF8, codecs.BOM_UTF8 + b"\n", b"[1]\n", b'{"url": 7}\n']
)
def test_what_a_file_asks_for_is_found_behind_whatever_is_no_request(before: bytes) -> None:
    assert sifted(before + LINE + b"\n{").endpoint == "/v1/completions"


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[" * 100_000, b"[1]", b"\xff\xfe", LINE[:-1]])
def test_a_file_that_asks_for_nothing_is_told_so_in_a_line(content: bytes) -> None:
    with pytest.raises(StartupError, match="no line is a request"):
        sifted(content)


BROKEN: list[tuple[bytes, str | None]] = [
    (b"{", "invalid_json_line"),
    (LINE, "duplicate_custom_id"),
    (json.dumps(REQUEST | {"url": "/v1/embeddings", "custom_id": "b"}).encode(), "mismatched_endpoint"),
    (json.dumps(REQUEST | {"custom_id": ""}).encode(), "invalid_custom_id"),
    (b"[" * 100_000, "invalid_value"),
    (b'{"a": NaN}', "invalid_json_line"),
    (json.dumps(REQUEST | {"custom_id": "c", "body": []}).encode(), "invalid_body"),
]


def test_each_line_that_is_no_request_has_an_answer_of_its_own() -> None:
    found = sifted(b"\n".join([LINE, *(line for line, _ in BROKEN), LINE.replace(b'"a"', b'"d"')]))
    answers = [json.loads(line) for line in found.answers().splitlines()]
    assert [(each["id"], each["error"]["line"], each["error"]["code"]) for each in answers] == [
        (f"line_{number}", number, code) for number, (_, code) in enumerate(BROKEN, 2)
    ]
    assert found.custom_ids == {"a", "d"} and all(
        each["error"]["message"] and each["response"] is None for each in answers
    )


def test_a_line_beyond_all_bounds_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.operator.batch_lines.MAX_LINE_BYTES", 1000)
    found = sifted(LINE + b"\n" + b"x" * 5500 + b"\n" + LINE)
    assert {number: error.code for number, error in found.refused.items()} == {
        2: "line_too_long",
        3: "duplicate_custom_id",
    }


class Broken(httpx.SyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
        yield b"the first ha"
        raise httpx.ReadError("the gateway has died")


def test_answers_are_written_whole_though_the_gateway_dies_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "POLL_S", 0.01)
    replies = [
        httpx.Response(200, stream=Broken()),
        httpx.Response(503),
        httpx.Response(200, content=b"the first half, and the second"),
    ]
    with httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(lambda _: replies.pop(0))) as client:
        download(client, "file-a", tmp_path / "out.jsonl")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("out.jsonl", "the first half, and the second")
    ]


def test_answers_that_do_not_come_leave_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "PATIENCE_S", 0.0)
    (tmp_path / "out.jsonl").write_text("of the last time")
    with (
        httpx.Client(
            base_url="http://gateway", transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=Broken()))
        ) as client,
        pytest.raises(httpx.ReadError),
    ):
        download(client, "file-a", tmp_path / "out.jsonl")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.jsonl", "of the last time")]


def test_a_gateway_that_is_being_restarted_is_waited_for_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch, "POLL_S", 0.01)
    uploads: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        uploads.append(request.read())
        if len(uploads) == 1:
            raise httpx.ConnectError("[Errno 111] Connection refused")
        return httpx.Response(503 if len(uploads) == 2 else 200, json={"id": "file-a"})

    with httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(answer)) as client:
        file = io.BytesIO(LINE)
        assert insist(lambda: call(client, "POST", "/v1/files", files={"file": file})) == {"id": "file-a"}
    assert len(uploads) == 3 and all(LINE in each for each in uploads), "each is whole"
    assert capsys.readouterr().err == "no gateway now (Connection refused): trying for 20 s\n"


def test_without_a_gateway_the_error_says_so_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch, "START_PATIENCE_S", 0.6)
    url = "http://127.0.0.1:9"  # nobody listens there
    with pytest.raises(StartupError) as refused:
        run_batch(url, "batch_x", tmp_path / "out.jsonl", "24h", None)
    assert str(refused.value) == f"no gateway at {url}: is Penstock up? (Connection refused)"
    assert capsys.readouterr().err == "no gateway now (Connection refused): trying for 0.6 s\n"


@pytest.mark.parametrize(
    ("out", "line"),
    [
        (".", "Is a directory"),
        ("none/out.jsonl", "out.jsonl: No such file or directory"),
        ("asked.errors.jsonl", "asked.errors.jsonl is the file of requests"),
        ("asked.jsonl", "asked.errors.jsonl is the file of requests"),
    ],
)
def test_where_the_answers_can_t_go_is_said_before_anything_is_sent(tmp_path: Path, out: str, line: str) -> None:
    asked = tmp_path / "asked.errors.jsonl"
    asked.write_bytes(LINE)
    with pytest.raises(StartupError, match=line):
        run_batch("http://127.0.0.1:1", str(asked), tmp_path / out, "24h", None)
    assert list(tmp_path.iterdir()) == [asked] and asked.read_bytes() == LINE
    with pytest.raises(StartupError, match=r"nowhere/asked\.jsonl: No such file"):
        run_batch("http://127.0.0.1:1", "/nowhere/asked.jsonl", None, "24h", None)
