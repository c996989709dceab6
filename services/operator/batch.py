"""`penstock batch`: a file of requests, answered; with a progress bar."""

import codecs
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import httpx
from tqdm import tqdm

from shared.process.errors import StartupError

POLL_S = 0.5
PATIENCE_S = 60.0  # for a gateway that does not answer, once the batch runs
MAX_LINE_BYTES = 64 << 20  # that is looked at, to see what the file asks for
FINAL = ("completed", "failed", "expired", "cancelled")


def run_batch(url: str, source: str, out: Path | None, window: str, api_key: str | None) -> int:
    """Upload the file, wait for the answers, and write them beside it; or wait for a batch that is running. Returns the exit code. Raises StartupError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, timeout=httpx.Timeout(30.0, write=None), trust_env=False, headers=headers) as client:
        try:
            is_batch = source.startswith("batch_") and not Path(source).exists()
            out = out or Path(f"{source}.out.jsonl" if is_batch or not Path(source).name else Path(source).with_suffix(".out.jsonl"))
            if is_batch or Path(source).exists():
                check_out(out, Path(source))
            batch = call(client, "GET", f"/v1/batches/{source}") if is_batch else create(client, Path(source), window)
            return collect(client, watch(client, batch), out)
        except httpx.HTTPError as error:
            raise StartupError(f"no gateway at {url}: is Penstock up? ({error})") from None


def check_out(out: Path, source: Path) -> None:
    """Raises StartupError for a place that can't be written to, or that the questions are in: better said now than when all is answered."""
    if out.is_dir():
        raise StartupError(f"{out}: Is a directory")
    for path in (out, errors_of(out)):
        if path.exists() and source.exists() and path.samefile(source):
            raise StartupError(f"{path} is the file of requests: the answers would take its place")
        try:
            part_of(path).touch()
            part_of(path).unlink()
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror}") from None


def errors_of(out: Path) -> Path:
    return out.with_suffix(".errors.jsonl")


def part_of(path: Path) -> Path:
    """Where a file is until it is whole."""
    return path.with_name(f"{path.name}.part")


def create(client: httpx.Client, source: Path, window: str) -> dict[str, Any]:
    """A batch of the file's requests."""
    try:
        with source.open("rb") as file:
            endpoint = endpoint_of(source, first_line(file))
            file.seek(0)
            uploaded = call(client, "POST", "/v1/files", files={"file": (source.name, file)}, data={"purpose": "batch"})
    except OSError as error:
        raise StartupError(f"{source}: {error.strerror}") from None
    batch = call(client, "POST", "/v1/batches", json={"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window})
    print(f"{batch['id']}: {source.name}, {uploaded['bytes']} bytes, for {endpoint}", file=sys.stderr)
    return batch


def first_line(file: IO[bytes]) -> bytes:
    """The first that is not empty, as far as a line may be long."""
    while (line := file.readline(MAX_LINE_BYTES)) and not line.removeprefix(codecs.BOM_UTF8).strip():
        pass
    return line.removeprefix(codecs.BOM_UTF8)


def endpoint_of(source: Path, line: bytes) -> str:
    """The endpoint and model of the first line; the others must ask for the same."""
    try:
        return str(json.loads(line)["url"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StartupError(f'{source}: the first line is no request: {{"custom_id": …, "method": "POST", "url": …, "body": …}}') from None


def watch(client: httpx.Client, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch when it has ended. Ctrl-C stops the watching only."""
    silent_since = time.monotonic()
    with tqdm(unit=" requests", file=sys.stderr, disable=None) as bar:
        while batch["status"] not in FINAL:
            counts = batch["request_counts"]
            bar.total, bar.n = counts["total"] or None, counts["completed"] + counts["failed"]
            bar.set_description(batch["status"], refresh=False)
            bar.set_postfix({"failed": counts["failed"]} if counts["failed"] else {}, refresh=False)
            bar.refresh()
            try:
                time.sleep(POLL_S)
                batch = call(client, "GET", f"/v1/batches/{batch['id']}")
                silent_since = time.monotonic()
            except KeyboardInterrupt:
                bar.close()
                print(f"\n{batch['id']} goes on: penstock batch {batch['id']} waits for it again", file=sys.stderr)
                raise
            except (httpx.HTTPError, Unavailable):
                if time.monotonic() - silent_since > PATIENCE_S:
                    raise
        bar.total = batch["request_counts"]["total"]
        bar.n = bar.total
    return batch


def collect(client: httpx.Client, batch: dict[str, Any], out: Path) -> int:
    """Write what came of it; say how it was. 0: every line has an answer."""
    counts, written = batch["request_counts"], []
    for field, path in (("output_file_id", out), ("error_file_id", errors_of(out))):
        if batch[field] is not None:
            download(client, batch[field], path)
            written.append(str(path))
    for error in (batch["errors"] or {"data": []})["data"]:
        print(f"line {error['line']}: {error['message']}" if error["line"] else error["message"], file=sys.stderr)
    words = f"{batch['status']}: {counts['completed']} of {counts['total']} answered, {counts['failed']} failed"
    print(f"{words}{'; written to ' + ' and '.join(written) if written else ''}", file=sys.stderr)
    return 0 if batch["status"] == "completed" and not counts["failed"] else 1


def download(client: httpx.Client, file_id: str, path: Path) -> None:
    """A file, whole or not at all: a gateway that dies meanwhile is waited for."""
    unfinished, until = part_of(path), time.monotonic() + PATIENCE_S
    try:
        while True:
            try:
                fetch(client, file_id, unfinished)
                break
            except (httpx.HTTPError, Unavailable):
                if time.monotonic() > until:
                    raise
                time.sleep(POLL_S)
        unfinished.replace(path)
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def fetch(client: httpx.Client, file_id: str, path: Path) -> None:
    with client.stream("GET", f"/v1/files/{file_id}/content") as response, path.open("wb") as file:
        if response.status_code != 200:
            response.read()
            raise failure_of(response)
        for piece in response.iter_bytes():
            file.write(piece)


class Unavailable(StartupError):
    """The gateway can't answer at the moment."""


def call(client: httpx.Client, method: str, path: str, **options: Any) -> dict[str, Any]:
    """The answer, JSON. Raises StartupError with the gateway's words, Unavailable if they may change."""
    response = client.request(method, path, **options)
    if response.status_code == 200:
        with suppress(ValueError):
            body: dict[str, Any] = response.json()
            return body
    raise failure_of(response)


def failure_of(response: httpx.Response) -> StartupError:
    """The gateway's words about what it could not do."""
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{response.request.method} {response.request.url.path}: {response.status_code}"
    return (Unavailable if response.status_code in (429, 500, 502, 503) else StartupError)(message)
