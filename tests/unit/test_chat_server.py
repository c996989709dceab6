"""The chat's client against servers of all makes, over real HTTP: what they send, where they break
off, and what they say when they refuse.
"""

import json
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from services.operator.chat import server as chat_server
from services.operator.chat.chat import Chat, ChatSettings
from services.operator.chat.conversation import ChatHistory
from services.operator.chat.display import PlainDisplay
from services.operator.chat.server import AnswerDelta, ChatError, ReportedUsage, Server
from shared.process.errors import StartupError

MESSAGES: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}


class Script(ThreadingHTTPServer):
    """Answers each request by the next step of a script, and keeps what was asked."""

    def __init__(self, owner: str = "somebody") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cards: Any = {"data": [{"id": "small", "owned_by": owner, "max_model_len": 100}]}
        self.steps: list[Callable[[Handler], None]] = []
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Script

    def do_GET(self) -> None:
        self.answer(None)

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: Any) -> None:
        self.server.asked.append((self.command, self.path, dict(self.headers), body))
        if self.path.endswith("/models"):
            self.send(200, json.dumps(self.server.cards))
        else:
            self.server.steps.pop(0)(self)

    def send(self, status: int, body: str, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Not on the tests' output."""


def stream(*events: Any, is_whole: bool = True, first_id: int = 0) -> Callable[[Handler], None]:
    """A step: these chunks' deltas (or what else is no str) as server-sent events. One that is not
    whole breaks off after them.
    """

    def step(handler: Handler) -> None:
        lines = []
        for number, event in enumerate(events, first_id + 1):
            chunk = (
                {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": event}}]}
                if isinstance(event, str)
                else event
            )
            lines.append(f"id: {number}\ndata: {json.dumps(chunk)}\n\n")
        body = ": waiting\n" + "".join(lines) + ("data: [DONE]\n\n" if is_whole else "")
        if is_whole:
            handler.send(200, body, "text/event-stream")
            return
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        handler.wfile.write(body.encode())

    return step


def refuse(status: int, body: Any) -> Callable[[Handler], None]:
    return lambda handler: handler.send(status, body if isinstance(body, str) else json.dumps(body))


END = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}


@pytest.fixture
def script() -> Iterator[Script]:
    yield from serving(Script())


@pytest.fixture
def penstock() -> Iterator[Script]:
    yield from serving(Script("penstock"))


def serving(script: Script) -> Iterator[Script]:
    thread = Thread(target=script.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield script
    script.shutdown()
    script.server_close()
    thread.join()


def answer(script: Script) -> list[AnswerDelta]:
    client = Server(script.url)
    try:
        client.models()
        return list(client.answer(MESSAGES))
    finally:
        client.close()


def text_of(pieces: list[AnswerDelta]) -> str:
    return "".join(piece.text for piece in pieces)


def test_any_server_streams(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    thought = {"choices": [{"delta": {"reasoning": "Hm."}}]}
    script.steps = [stream({"choices": [{"delta": {"role": "assistant"}}]}, thought, "Hel", "lo", END, USAGE)]
    pieces = answer(script)
    assert text_of(pieces) == "Hello" and [piece.reasoning for piece in pieces if piece.reasoning] == ["Hm."]
    assert pieces[-1].usage == ReportedUsage(7, 2)
    method, path, headers, body = script.asked[-1]
    assert (method, path, headers["Authorization"]) == ("POST", "/v1/chat/completions", "Bearer sk-1")
    assert body["stream_options"] == {"include_usage": True}, "what only Penstock knows is sent to no other"


def test_an_answer_that_breaks_off_goes_on_where_it_was(penstock: Script) -> None:
    draining = {"error": {"message": "the gateway is shutting down", "code": "gateway_draining"}}
    penstock.steps = [
        stream("one ", "two ", is_whole=False),
        refuse(503, {"error": {"message": "the pipeline is not reachable at the moment"}}),
        stream("three ", draining, first_id=2),
        stream("four", END, USAGE, first_id=3),
    ]
    assert text_of(answer(penstock)) == "one two three four"
    _, first, *resumed = penstock.asked
    assert first[3]["stream_options"] == {"include_usage": True, "include_position": True}
    assert [(path, headers["Last-Event-ID"]) for _, path, headers, _ in resumed] == [
        ("/v1/streams/chatcmpl-1", number) for number in ("2", "2", "3")
    ]


def test_a_request_that_never_began_is_sent_again(penstock: Script) -> None:
    penstock.steps = [stream(is_whole=False), stream("Hello", END, USAGE)]
    assert text_of(answer(penstock)) == "Hello"
    assert [method for method, *_ in penstock.asked] == ["GET", "POST", "POST"]


def test_what_goes_wrong_is_one_clear_error(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, message in (
        (
            refuse(401, {"error": {"message": "no such key"}}),
            "no such key (a key goes into PENSTOCK_API_KEY or OPENAI_API_KEY)",
        ),
        (refuse(404, {"error": "model 'small' not found"}), "model 'small' not found"),  # as Ollama says it
        (refuse(502, "<html>bad gateway</html>"), "HTTP 502 Bad Gateway"),
        (refuse(200, "<html>welcome</html>"), "the server does not stream"),
        (stream({"error": {"message": "out of memory"}}), "out of memory"),
        (stream("half", is_whole=False), "connection lost"),
        (stream([1, 2]), "an event that is no chunk"),
        (stream({"choices": 3}), "an event that is no chunk"),
    ):
        script.steps = [step]
        with pytest.raises(ChatError) as failed:
            answer(script)
        assert message in str(failed.value) and "\n" not in str(failed.value)
    for script.cards in ([], {"data": None}, {"data": [{}]}, "text"):
        with pytest.raises(StartupError, match="not as an OpenAI-compatible server does"):
            answer(script)
    for url in ("ftp://host", "http://", "http://host:port", "http://[::1"):
        with pytest.raises(StartupError, match="--url"):
            Server(url)
    monkeypatch.setenv("PENSTOCK_API_KEY", "two\nlines")
    with pytest.raises(StartupError, match="PENSTOCK_API_KEY holds characters that no key has"):
        Server(script.url)


class Clock:
    """Stands for the module `time`: goes on only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_penstock_that_does_not_come_back_is_given_up(penstock: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server, "time", Clock())
    penstock.steps = [
        stream("half", is_whole=False),
        *[refuse(503, {"error": {"message": "no compute is alive"}})] * 30,
    ]
    client = Server(penstock.url)
    client.models()
    notices = []
    with pytest.raises(ChatError, match="no compute is alive"):
        for piece in client.answer(MESSAGES):
            notices += [piece.notice] if piece.notice else []
    client.close()
    assert notices == ["no compute is alive; trying again, Ctrl-C stops that"]


def test_the_oldest_turns_go_when_the_context_is_full(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    full = {
        "error": {"message": "This model's maximum context length is 100 tokens. …", "code": "context_length_exceeded"}
    }
    script.steps = [stream("one", END, USAGE), stream("two", END, USAGE), refuse(400, full), stream("three", END)]
    client = Server(script.url)
    chat = Chat(client, ChatSettings(script.url), PlainDisplay(sys.stdout, sys.stderr))
    for question in ("first", "second", "third"):
        assert chat.ask(question) is not None
    client.close()
    said = [[message["content"] for message in body["messages"]] for _, _, _, body in script.asked if body]
    assert said == [
        ["first"],
        ["first", "one", "second"],
        ["first", "one", "second", "two", "third"],
        ["second", "two", "third"],
    ]
    assert "forgot the oldest turn of this chat" in capsys.readouterr().err


def test_trimming_keeps_room_for_an_answer() -> None:
    conversation = ChatHistory("Be brief.")
    for number, total in enumerate((30, 60, 90)):
        conversation.add(f"question {number}", "answer", total)
    assert [turn.num_tokens for turn in conversation.turns] == [30, 30, 30]
    assert conversation.trim("short", 200) == 0
    assert conversation.trim("short", 100) == 1, "60 tokens, and 25 to answer in"
    assert [message["content"] for message in conversation.messages("short")] == [
        "Be brief.",
        "question 1",
        "answer",
        "question 2",
        "answer",
        "short",
    ]
    assert conversation.trim("long " * 1000, 100) == 2 and not conversation.turns
