"""`penstock batch`: files as people have them, and gateways that die."""

import codecs
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.operator import batch
from services.operator.batch import download, endpoint_of, first_line, run_batch
from shared.process.errors import StartupError

LINE = b'{"url": "/v1/completions"}'


@pytest.mark.parametrize("before", [b"", b"\n", b"  \r\n\n", codecs.BOM_UTF8, codecs.BOM_UTF8 + b"\n"])
def test_what_a_file_asks_for_is_found_behind_empty_lines_and_a_byte_order_mark(before: bytes) -> None:
    assert endpoint_of(Path("x"), first_line(io.BytesIO(before + LINE + b"\n{"))) == "/v1/completions"


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[" * 100_000, b"[1]", b"\xff\xfe"])
def test_a_file_that_asks_for_nothing_is_told_so_in_a_line(content: bytes) -> None:
    with pytest.raises(StartupError, match="the first line is no request"):
        endpoint_of(Path("x"), first_line(io.BytesIO(content)))


class Broken(httpx.SyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
        yield b"the first ha"
        raise httpx.ReadError("the gateway has died")


def test_answers_are_written_whole_though_the_gateway_dies_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "POLL_S", 0.01)
    replies = [httpx.Response(200, stream=Broken()), httpx.Response(503), httpx.Response(200, content=b"the first half, and the second")]
    with httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(lambda _: replies.pop(0))) as client:
        download(client, "file-a", tmp_path / "out.jsonl")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.jsonl", "the first half, and the second")]


def test_answers_that_do_not_come_leave_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PATIENCE_S", 0.0)
    (tmp_path / "out.jsonl").write_text("of the last time")
    with (
        httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=Broken()))) as client,
        pytest.raises(httpx.ReadError),
    ):
        download(client, "file-a", tmp_path / "out.jsonl")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.jsonl", "of the last time")]


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
