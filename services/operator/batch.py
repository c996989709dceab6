"""`penstock batch`: a file of requests, answered; with a progress bar."""

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tqdm import tqdm

from services.operator.batch_lines import MAX_LINE_BYTES, Sifted, sift
from services.requests.store.batches.lines import lines_of
from shared.process.errors import StartupError, words_of

POLL_S = 0.5
T = TypeVar("T")
START_PATIENCE_S = 20.0  # for a gateway that is not there, before the batch runs
PATIENCE_S = 60.0  # for one that does not answer, once it runs
MAX_TOLD = 5  # lines that are no requests
FINAL = ("completed", "failed", "expired", "cancelled")


def run_batch(url: str, source: str, out: Path | None, window: str, api_key: str | None) -> int:
    """Upload the file, wait for the answers, and write them next to it; or wait for a batch that is
    running. Returns the exit code. Raises StartupError.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(
        base_url=url, timeout=httpx.Timeout(30.0, write=None), trust_env=False, headers=headers
    ) as client:
        try:
            is_batch = source.startswith("batch_") and not Path(source).exists()
            out = out or Path(
                f"{source}.out.jsonl" if is_batch or not Path(source).name else Path(source).with_suffix(".out.jsonl")
            )
            if is_batch or Path(source).exists():
                check_out(out, Path(source))
            if is_batch:
                batch, sifted = insist(lambda: call(client, "GET", f"/v1/batches/{source}")), Sifted()
            else:
                batch, sifted = create(client, Path(source), window, errors_of(out))
            return collect(client, watch(client, batch), out, sifted)
        except httpx.HTTPError as error:
            raise StartupError(f"no gateway at {url}: is Penstock up? ({words_of(error)})") from None


def check_out(out: Path, source: Path) -> None:
    """Raises StartupError for a place that can't be written to, or that holds the questions: better
    now than when all is answered.
    """
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


def create(client: httpx.Client, source: Path, window: str, errors: Path) -> tuple[dict[str, Any], Sifted]:
    """A batch of the file's requests. The lines that are none have their answers at once."""
    try:
        with source.open("rb") as file, tempfile.TemporaryFile() as others:
            sifted = sift(source, file)
            file.seek(0)
            if sifted.refused:
                lines = lines_of(file, MAX_LINE_BYTES)
                others.writelines(line + b"\n" for number, line in lines if number not in sifted.refused)
                others.seek(0)
                errors.write_bytes(sifted.answers())
                tell_refused(sifted)
            part = {"file": (source.name, others if sifted.refused else file)}
            uploaded = insist(lambda: call(client, "POST", "/v1/files", files=part, data={"purpose": "batch"}))
    except OSError as error:
        raise StartupError(f"{error.filename or source}: {error.strerror}") from None
    asked = {"input_file_id": uploaded["id"], "endpoint": sifted.endpoint, "completion_window": window}
    # an answer of 502 or 503 may come after the batch was made: asked again, there would be two
    batch = insist(lambda: call(client, "POST", "/v1/batches", json=asked), httpx.ConnectError)
    print(f"{batch['id']}: {source.name}, {uploaded['bytes']} bytes, for {sifted.endpoint}", file=sys.stderr)
    return batch, sifted


def insist(ask: Callable[[], T], *absences: type[Exception], patience_s: float | None = None) -> T:
    """The answer of a gateway that may be away for a moment, as when it is restarted. absences: the errors
    that say so; by default those after which `ask` may be repeated. Raises what `ask` raises last."""
    patience_s = START_PATIENCE_S if patience_s is None else patience_s
    until, has_told, errors = time.monotonic() + patience_s, False, absences or (httpx.ConnectError, Away)
    while True:
        try:
            return ask()
        except errors as error:
            if time.monotonic() >= until:
                raise
            if not has_told:
                print(f"no gateway now ({words_of(error)}): trying for {patience_s:g} s", file=sys.stderr)
            has_told = True
            time.sleep(POLL_S)


def tell_refused(sifted: Sifted) -> None:
    for number, error in islice(sifted.refused.items(), MAX_TOLD):
        print(f"line {number}: {error}", file=sys.stderr)
    if (num_more := len(sifted.refused) - MAX_TOLD) > 0:
        print(f"and {num_more} more lines that are no requests", file=sys.stderr)


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


def collect(client: httpx.Client, batch: dict[str, Any], out: Path, sifted: Sifted) -> int:
    """Write what came of it, after the answers of the lines that were left out; say how it was. 0:
    every line has an answer."""
    counts, num_refused, written = batch["request_counts"], len(sifted.refused), []
    for field, path in (("output_file_id", out), ("error_file_id", errors_of(out))):
        if batch[field] is not None:
            download(client, batch[field], path, sifted.answers() if path != out else b"")
            written.append(str(path))
    for error in (batch["errors"] or {"data": []})["data"]:
        print(f"line {error['line']}: {error['message']}" if error["line"] else error["message"], file=sys.stderr)
    if num_refused and str(errors_of(out)) not in written:
        written.append(str(errors_of(out)))
    num_failed = counts["failed"] + num_refused
    words = f"{batch['status']}: {counts['completed']} of {counts['total'] + num_refused} answered, {num_failed} failed"
    print(f"{words}{'; written to ' + ' and '.join(written) if written else ''}", file=sys.stderr)
    return 0 if batch["status"] == "completed" and not num_failed else 1


def download(client: httpx.Client, file_id: str, path: Path, before: bytes = b"") -> None:
    """A file, whole or not at all, after what stands before it: a gateway that dies meanwhile is
    waited for."""
    unfinished = part_of(path)
    try:
        insist(lambda: fetch(client, file_id, unfinished, before), httpx.HTTPError, Unavailable, patience_s=PATIENCE_S)
        unfinished.replace(path)
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def fetch(client: httpx.Client, file_id: str, path: Path, before: bytes) -> None:
    with client.stream("GET", f"/v1/files/{file_id}/content") as response, path.open("wb") as file:
        if response.status_code != 200:
            response.read()
            raise failure_of(response)
        file.write(before)
        for piece in response.iter_bytes():
            file.write(piece)


class Unavailable(StartupError):
    """The gateway can't answer at the moment."""


class Away(Unavailable):
    """It has not taken the request: it begins or ends, or a proxy does not reach it."""


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
    return {429: Unavailable, 500: Unavailable, 502: Away, 503: Away}.get(response.status_code, StartupError)(message)
