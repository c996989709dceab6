"""The server that a chat talks to, over HTTP: its models, and its answers as they stream. Any that
speaks Chat Completions will do; an answer of Penstock's goes on where a connection broke off
(docs/use/chat.md, Streams)."""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from httpx_sse import EventSource, ServerSentEvent, SSEError

from shared.process.errors import PenstockError, StartupError, words_of

KEYS = ("PENSTOCK_API_KEY", "OPENAI_API_KEY")  # in the environment: the first that is set goes along as a bearer token
CONNECT_TIMEOUT_S = 10.0
# Penstock sends a comment every few seconds; others may think for minutes before their first byte
SILENCE_TIMEOUT_S = 60.0
PATIENCE_S = 60.0  # without a single event, before a broken answer is given up
TELL_AFTER_S = 2.0  # without one, the user sees a notice; a gateway that died is mostly back by then
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 3.0  # between two tries
MAX_ERROR_CHARACTERS = 2000
UNAVAILABLE = (502, 503, 504)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
CONTEXT_FULL = re.compile(
    r"maximum context length|context_length_exceeded|exceed_context_size|available context size", re.IGNORECASE
)


class ChatError(PenstockError):
    """The server's answer is an error, or there is none. The chat goes on."""

    def __init__(self, message: str, *, is_context_full: bool = False) -> None:
        super().__init__(message)
        self.is_context_full = is_context_full


class Interrupted(PenstockError):
    """The answer broke off, and the same server or its successor may go on with it."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    max_model_len: int | None = None  # tokens of prompt and answer; None if the server does not report it


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A piece of an answer: text or reasoning, how the answer ended, or a notice about the connection."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    usage: ReportedUsage | None = None
    notice: str = ""


@dataclass(slots=True)
class StreamPosition:
    """How far a response has come here, which is where it can be resumed."""

    response_id: str = ""
    event_id: str = ""


class Server:
    """A client of one server; close it."""

    def __init__(self, url: str) -> None:
        """Raises StartupError for a URL, or a key in the environment, that can't be one."""
        self.url = url if "://" in url else f"http://{url}"
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise StartupError(f"--url {url}: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise StartupError(f"--url {url}: not http://host:port, nor https://host/v1")
        base = self.url.rstrip("/") if parsed.path.strip("/") else f"{self.url.rstrip('/')}/v1"
        self.http = httpx.Client(
            base_url=base,
            headers=_authorization(),
            follow_redirects=True,
            timeout=httpx.Timeout(CONNECT_TIMEOUT_S, read=None),
            trust_env=parsed.host not in LOOPBACK,
        )
        self.is_penstock = False  # whose answers can be resumed

    def close(self) -> None:
        self.http.close()

    def models(self) -> list[ServedModel]:
        """The models that the server serves. Raises StartupError."""
        try:
            response = self.http.get("/models", timeout=CONNECT_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise StartupError(
                f"no server at {self.url}: is Penstock up? penstock up starts it, --url names another "
                f"({words_of(error)})"
            ) from None
        if response.status_code != 200:
            raise StartupError(f"{self.url}: {error_message(response)}")
        try:
            cards = [card for card in response.json()["data"] if isinstance(card["id"], str)]
        except (ValueError, KeyError, TypeError):
            raise StartupError(
                f"{self.url} answers, but not as an OpenAI-compatible server does: --url takes one, as https://host/v1"
            ) from None
        self.is_penstock = any(card.get("owned_by") == "penstock" for card in cards)
        lengths = [card.get("max_model_len") for card in cards]
        return [
            ServedModel(card["id"], length if isinstance(length, int) else None)
            for card, length in zip(cards, lengths, strict=True)
        ]

    def answer(self, body: dict[str, Any]) -> Iterator[AnswerDelta]:
        """The answer to a request of Chat Completions, piece by piece, to its end. Raises ChatError."""
        options: dict[str, Any] = {"include_usage": True} | ({"include_position": True} if self.is_penstock else {})
        body = body | {"stream": True, "stream_options": options}
        place = StreamPosition()
        pause_s, heard_at, has_notice = FIRST_PAUSE_S, time.monotonic(), False
        while True:
            try:
                for piece in self._pieces(body, place):
                    pause_s, heard_at, has_notice = FIRST_PAUSE_S, time.monotonic(), False
                    yield piece
                return
            except Interrupted as error:
                if not self.is_penstock or time.monotonic() - heard_at > PATIENCE_S:
                    raise ChatError(f"{error} ({error.details})" if error.details else str(error)) from None
                if not has_notice and time.monotonic() - heard_at > TELL_AFTER_S:
                    yield AnswerDelta(notice=f"{error}; trying again, Ctrl-C stops that")
                    has_notice = True
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _pieces(self, body: dict[str, Any], place: StreamPosition) -> Iterator[AnswerDelta]:
        """From place on, which moves along. Raises Interrupted, ChatError."""
        is_over = False
        for event in self._events(body, place):
            if event.data == "[DONE]":
                return
            piece = self._read(event, place)
            is_over = is_over or bool(piece.finish_reason)
            yield piece
        if not is_over:
            raise Interrupted("the connection ended within the answer")

    def _events(self, body: dict[str, Any], place: StreamPosition) -> Iterator[ServerSentEvent]:
        timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=SILENCE_TIMEOUT_S if self.is_penstock else None)
        headers = {"Last-Event-ID": place.event_id} if place.event_id else {}
        if place.response_id:
            request = self.http.build_request("GET", f"/streams/{place.response_id}", headers=headers, timeout=timeout)
        else:
            request = self.http.build_request("POST", "/chat/completions", json=body, timeout=timeout)
        with connected():
            response = self.http.send(request, stream=True)
        try:
            with connected():
                if response.status_code != 200:
                    response.read()
            if response.status_code in UNAVAILABLE:
                raise Interrupted(error_message(response))
            if response.status_code != 200:
                raise _failed(error_message(response), response.text)
            with connected():
                yield from EventSource(response).iter_sse()
        finally:
            response.close()

    def _read(self, event: ServerSentEvent, place: StreamPosition) -> AnswerDelta:
        """One event. Raises Interrupted, ChatError."""
        try:
            chunk = json.loads(event.data)
            if (error := chunk.get("error")) is not None:
                self._fail(error)
            piece = read_chunk(chunk)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
            raise ChatError(f"the server sent an event that is no chunk of an answer: {event.data[:80]!r}") from None
        if self.is_penstock:
            place.response_id = str(chunk["id"])
            place.event_id = event.id or place.event_id
        return piece

    def _fail(self, error: Any) -> None:
        message = str(error.get("message")) if isinstance(error, dict) else str(error)
        if isinstance(error, dict) and error.get("code") == "gateway_draining":
            raise Interrupted("the gateway is shutting down")
        raise _failed(message, json.dumps(error))


@contextmanager
def connected() -> Iterator[None]:
    """Turns a connection's failures into Interrupted and ChatError."""
    try:
        yield
    except SSEError as error:
        raise ChatError(f"the server does not stream: {error}") from None
    except (httpx.TransportError, httpx.StreamError) as error:
        raise Interrupted("connection lost", str(error) or type(error).__name__) from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ChatError(str(error) or type(error).__name__) from None


def read_chunk(chunk: dict[str, Any]) -> AnswerDelta:
    """A chunk of Chat Completions. Reasoning has two names: DeepSeek's, and vLLM's newer one; Penstock sends both."""
    usage = chunk.get("usage")
    counted = ReportedUsage(int(usage["prompt_tokens"]), int(usage["completion_tokens"])) if usage else None
    choices = chunk.get("choices")
    if not choices:
        return AnswerDelta(usage=counted)
    delta = choices[0].get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return AnswerDelta(
        str(delta.get("content") or ""), str(reasoning), str(choices[0].get("finish_reason") or ""), counted
    )


def error_message(response: httpx.Response) -> str:
    """The words of a response that is an error, in whichever shape its server has; at least its status."""
    status = f"HTTP {response.status_code} {response.reason_phrase}".strip()
    try:
        body = response.json()
        error = body.get("error", body.get("detail", body.get("message")))
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = None
    message = message[:MAX_ERROR_CHARACTERS] if isinstance(message, str) and message else status
    return f"{message} (a key goes into {' or '.join(KEYS)})" if response.status_code == 401 else message


def _failed(message: str, details: str) -> ChatError:
    return ChatError(message, is_context_full=CONTEXT_FULL.search(message + details) is not None)


def _authorization() -> dict[str, str]:
    """Raises StartupError for a key that no header can hold."""
    name = next((name for name in KEYS if os.environ.get(name)), None)
    if name is None:
        return {}
    key = os.environ[name].strip()
    if not key.isascii() or not key.isprintable():
        raise StartupError(f"{name} holds characters that no key has")
    return {"Authorization": f"Bearer {key}"}
