"""Files and batches, through real workers: every line is answered once, whatever becomes of whoever answers it."""

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from services.operator.batch import run_batch
from tests.deployment import MODEL, Deployment
from tests.pipeline.streams import compute_load, num_in_flight
from tests.waiting import wait_until

Json = dict[str, Any]

CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
LONG = {"max_tokens": 600, "ignore_eos": True}
BODIES: dict[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": "What is a stage?"}], "temperature": 0, "max_tokens": 12},
    COMPLETIONS: {"prompt": ["The gateway", "A token log"], "temperature": 0, "max_tokens": 8, "n": 2},
    EMBEDDINGS: {"input": ["one", "two"], "encoding_format": "float"},
    RESPONSES: {"input": "What is the sampler?", "temperature": 0, "max_output_tokens": 12, "store": False},
}


@pytest.fixture(scope="module")
def served(demo: Deployment) -> Iterator[Deployment]:
    """The demo, with a worker."""
    demo.wait_live(demo.start("jobs", batch_requests=8, busy_batch_requests=8))
    yield demo
    for worker in [name for name in demo.processes if name.startswith("jobs")]:
        assert demo.terminate(worker) == 0


@pytest.fixture
def client(served: Deployment) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def line(number: int, url: str, **body: Any) -> Json:
    return {"custom_id": f"line-{number:04}", "method": "POST", "url": url, "body": {"model": MODEL, **body}}


def start(client: openai.OpenAI, url: str, lines: list[Json], window: str = "24h") -> Batch:
    content = "\r\n".join(
        json.dumps(each, separators=(",\r", ": ")) for each in lines
    ).encode()  # as JSON may be written
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window=window)


def ended(client: openai.OpenAI, batch_id: str, timeout_s: float = 180.0) -> Batch:
    def found() -> Batch | None:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None

    return wait_until(found, description="the batch has ended", timeout_s=timeout_s)  # type: ignore[return-value]


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[Json]:
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()] if file_id else []


def texts_of(url: str, body: Json, *, is_expected: bool = False) -> Any:
    """The part of an answer that the request decides."""
    if url == EMBEDDINGS:
        return [
            pytest.approx(each["embedding"], abs=1e-4) if is_expected else each["embedding"] for each in body["data"]
        ]  # torch rounds by the batch
    if url == RESPONSES:
        return [part["text"] for item in body["output"] for part in item["content"]]
    return [
        (choice["message"]["content"] if url == CHAT else choice["text"], choice["finish_reason"])
        for choice in body["choices"]
    ]


@pytest.mark.parametrize("url", BODIES)
def test_a_batch_answers_as_its_endpoint_does(url: str, served: Deployment, client: openai.OpenAI) -> None:
    lines = [line(number, url, **BODIES[url]) for number in (3, 1, 2)]
    wrong = line(0, url, **BODIES[url] | {"priority": "soon"})
    batch = ended(client, start(client, url, [*lines, wrong]).id)
    assert batch.status == "completed" and batch.request_counts is not None and batch.usage is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (4, 3, 1)
    answers = lines_of(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == ["line-0001", "line-0002", "line-0003"]
    direct = served.post(url, lines[0]["body"]).json()
    for each in answers:
        assert each["error"] is None and each["response"]["status_code"] == 200
        assert texts_of(url, each["response"]["body"]) == texts_of(url, direct, is_expected=True)
    assert batch.usage.input_tokens == 3 * direct["usage"].get("prompt_tokens", direct["usage"].get("input_tokens"))
    [refused] = lines_of(client, batch.error_file_id)
    assert refused["custom_id"] == "line-0000" and refused["response"]["status_code"] == 400
    assert refused["response"]["body"] == served.post(url, wrong["body"]).json()


def test_a_file_that_is_not_requests_fails_the_batch_line_by_line(client: openai.OpenAI) -> None:
    good = line(1, CHAT, **BODIES[CHAT])
    lines = [
        "{",
        json.dumps(good),
        json.dumps(good),
        json.dumps(good | {"custom_id": "x", "url": COMPLETIONS}),
        json.dumps(good | {"custom_id": 5}),
        "[]",
    ]
    file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id)
    assert batch.status == "failed" and batch.errors is not None and batch.output_file_id is None
    found = [(each.line, each.code) for each in batch.errors.data or ()]
    assert found == [
        (1, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_endpoint"),
        (5, "invalid_custom_id"),
        (6, "invalid_json_line"),
    ]


@pytest.mark.parametrize("wrong", [True, False])
def test_of_penstock_batch_a_broken_line_is_an_answer_and_the_others_are_answered(
    served: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: bool
) -> None:
    good = [line(number, CHAT, **BODIES[CHAT]) for number in range(3)]
    bodies = [json.dumps(each) for each in good[:2]] + (['{"custom_id": "cut', json.dumps(good[0])] if wrong else [])
    refused = line(2, CHAT, messages=[], temperature=0)
    source = tmp_path / "asked.jsonl"
    source.write_text("\n".join([*bodies, json.dumps(refused)]))
    assert run_batch(served.url(), str(source), None, "24h", None) == 1
    answers = [json.loads(each) for each in (tmp_path / "asked.out.jsonl").read_text().splitlines()]
    assert [(each["custom_id"], each["response"]["status_code"]) for each in answers] == [
        ("line-0000", 200),
        ("line-0001", 200),
    ]
    errors = [json.loads(each) for each in (tmp_path / "asked.out.errors.jsonl").read_text().splitlines()]
    broken = [(3, "invalid_json_line"), (4, "duplicate_custom_id")] if wrong else []
    assert [(each["error"]["line"], each["error"]["code"]) for each in errors[:-1]] == broken
    assert (errors[-1]["custom_id"], errors[-1]["response"]["status_code"]) == ("line-0002", 400)
    told = capsys.readouterr().err
    assert (
        f"completed: 2 of {5 if wrong else 3} answered, {3 if wrong else 1} failed" in told
        and ("line 3: the line is not JSON" in told) == wrong
    )


def test_a_cancelled_batch_keeps_what_it_has_and_answers_every_line_once(
    served: Deployment, client: openai.OpenAI
) -> None:
    quick = [line(number, COMPLETIONS, prompt="A", max_tokens=1) for number in range(4)]
    counted = counts_of_batches(served)
    batch = start(
        client, COMPLETIONS, quick + [line(number, COMPLETIONS, prompt="Pipes", **LONG) for number in range(4, 300)]
    )
    wait_until(
        lambda: client.batches.retrieve(batch.id).request_counts.completed >= 4, description="some lines are answered"
    )
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert batch.status == "cancelled" and batch.request_counts is not None
    answers, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert sorted(each["custom_id"] for each in answers + errors) == [f"line-{number:04}" for number in range(300)]
    assert len(answers) == batch.request_counts.completed >= 4 and {each["error"]["code"] for each in errors} == {
        "batch_cancelled"
    }
    found = {
        name: value - counted[name]
        for name, value in counts_of_batches(served).items()
        if "lines" in name or "ended" in name
    }
    assert found['penstock_batch_lines_total{outcome="completed"}'] == len(answers)
    assert (
        found['penstock_batch_lines_total{outcome="not_executed"}'] == len(errors)
        and found['penstock_batch_lines_total{outcome="failed"}'] == 0
    )
    assert found['penstock_batches_ended_total{status="cancelled"}'] == 1
    wait_until(lambda: num_in_flight(served) == 0, description="nothing of it is in the pipeline any more")
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_what_was_answered_stays_though_the_batch_is_cancelled_while_nobody_has_it(
    served: Deployment, client: openai.OpenAI
) -> None:
    lines = [line(number, COMPLETIONS, prompt="A", max_tokens=1) for number in range(4)]
    lines += [
        line(4, COMPLETIONS, prompt="A", n=200),
        *(line(number, COMPLETIONS, prompt="Pipes", **LONG) for number in range(5, 40)),
    ]
    counted = counts_of_batches(served)
    batch = start(client, COMPLETIONS, lines)
    wait_until(
        lambda: client.batches.retrieve(batch.id).request_counts.completed >= 4, description="some lines are answered"
    )
    assert served.terminate(next(name for name in served.processes if name.startswith("jobs"))) == 0
    client.batches.cancel(batch.id)
    served.start("jobs", "jobs-later", batch_requests=8, busy_batch_requests=8)
    batch = ended(client, batch.id)
    wait_until(lambda: num_in_flight(served) == 0, description="what was in the pipeline is cancelled", timeout_s=20)
    answers, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert [each["custom_id"] for each in answers][:4] == [f"line-{number:04}" for number in range(4)], (
        "they were counted as completed"
    )
    assert sorted(each["custom_id"] for each in answers + errors) == [f"line-{number:04}" for number in range(40)]
    assert errors[0]["response"]["status_code"] == 400 and {each["error"]["code"] for each in errors[1:]} == {
        "batch_cancelled"
    }
    assert batch.request_counts is not None and (batch.request_counts.completed, batch.request_counts.failed) == (
        len(answers),
        len(errors),
    )
    found = {name: value - counted[name] for name, value in counts_of_batches(served).items()}
    assert found['penstock_batch_lines_total{outcome="failed"}'] == 1, "its own fault, though the batch was closing"
    assert found['penstock_batch_lines_total{outcome="not_executed"}'] == len(errors) - 1


def test_what_is_not_done_in_the_window_expires(client: openai.OpenAI) -> None:
    batch = ended(
        client,
        start(
            client, COMPLETIONS, [line(number, COMPLETIONS, prompt="Pipes", **LONG) for number in range(200)], "2s"
        ).id,
    )
    assert batch.status == "expired" and batch.expired_at is not None
    lines = lines_of(client, batch.output_file_id) + lines_of(client, batch.error_file_id)
    assert sorted(each["custom_id"] for each in lines) == [f"line-{number:04}" for number in range(200)]
    assert "batch_expired" in {each["error"]["code"] for each in lines if each["error"]}


def computed_at_rest(served: Deployment) -> float:
    """Tokens that compute has announced, once it says for three seconds that nothing runs and none
    is added: it announces every second, or later under load.
    """
    seen: list[tuple[float, float]] = []

    def at_rest() -> bool:
        load = compute_load(served)
        seen.append(((load.running or 0) + (load.waiting or 0), load.output_tokens or 0))
        time.sleep(0.5)
        return len(seen) > 6 and set(seen[-6:]) == {(0, seen[-1][1])}

    wait_until(at_rest, description="compute is at rest")
    return seen[-1][1]


def counts_of_batches(served: Deployment) -> dict[str, float]:
    lines = served.get("/metrics").text.splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines)
        if name.startswith("penstock_batch") and "_total" in name
    }


def test_a_killed_worker_loses_no_line_and_computes_none_twice(served: Deployment, client: openai.OpenAI) -> None:
    before, counted = computed_at_rest(served), counts_of_batches(served)
    batch = start(
        client,
        COMPLETIONS,
        [line(number, COMPLETIONS, prompt=f"Stage {number}", max_tokens=20, ignore_eos=True) for number in range(80)],
    )
    wait_until(
        lambda: client.batches.retrieve(batch.id).request_counts.completed >= 8, description="the batch is under way"
    )
    served.kill(next(name for name in served.processes if name.startswith("jobs")))
    served.start("jobs", "jobs-again", batch_requests=8, busy_batch_requests=8)
    batch = ended(client, batch.id)
    assert batch.status == "completed" and batch.usage is not None
    answers = lines_of(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"line-{number:04}" for number in range(80)]
    assert (
        batch.usage.output_tokens
        == 80 * 20
        == sum(each["response"]["body"]["usage"]["completion_tokens"] for each in answers)
    )
    assert computed_at_rest(served) - before == 80 * 20
    found = {name: value - counted[name] for name, value in counts_of_batches(served).items() if value != counted[name]}
    assert found == {
        'penstock_batch_lines_total{outcome="completed"}': 80,
        "penstock_batch_generation_tokens_total": 80 * 20,
        "penstock_batch_prompt_tokens_total": batch.usage.input_tokens,
        'penstock_batches_ended_total{status="completed"}': 1,
    }


def test_files_are_kept_listed_and_deleted(served: Deployment, client: openai.OpenAI) -> None:
    content = b'{"custom_id": "\xc3\xbc"}\n' * 10
    file = client.files.create(
        file=("naïve.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.filename, file.bytes, file.purpose, file.expires_at) == (
        "naïve.jsonl",
        len(content),
        "batch",
        file.created_at + 3600,
    )
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    assert [each.id for each in client.files.list(limit=1)][0] == file.id
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    with pytest.raises(openai.BadRequestError, match="purpose must be one of batch, vision, user_data"):
        client.files.create(file=("a", b"a"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="No such File"):
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"Content-Type": "application/json"}, b"{}", 400),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x\r\nnothing of the kind", 400),
        ({"Content-Type": "multipart/form-data"}, b"--x--", 400),
    ],
)
def test_what_is_no_upload_is_refused(served: Deployment, headers: dict[str, str], content: bytes, status: int) -> None:
    reply = httpx.post(served.url() + "/v1/files", content=content, headers=headers, timeout=20, trust_env=False)
    assert reply.status_code == status and reply.json()["error"]["type"] == "invalid_request_error"


def test_a_file_beyond_the_bound_is_refused_before_it_is_sent(served: Deployment) -> None:
    with socket.create_connection(("127.0.0.1", next(iter(served.ports.values()))), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; "
            b"boundary=x\r\nContent-Length: 999999999\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@contextmanager
def full_disk(served: Deployment, stage: str, num_bytes: int) -> Iterator[None]:
    """No file of the stage's processes grows beyond this: what a full disk does, without one."""
    processes = [process.pid for name, process in served.processes.items() if name.startswith(stage)]
    before = [resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY)) for pid in processes]
    try:
        yield
    finally:
        for pid, limits in zip(processes, before, strict=True):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_said_and_waited_for(served: Deployment, client: openai.OpenAI) -> None:
    with (
        full_disk(served, "gateway", 1 << 20),
        pytest.raises(openai.InternalServerError, match="files can't be stored here") as refused,
    ):
        client.files.create(file=("long.jsonl", b"{}\n" * (1 << 20)), purpose="batch")
    assert refused.value.status_code == 503 and int(refused.value.response.headers["Retry-After"]) > 0
    long_lines = {"max_tokens": 1, "metadata": {str(number): "x" * 200 for number in range(16)}}
    long_answers = {"max_tokens": 10, "logprobs": 20, "ignore_eos": True}
    with full_disk(served, "jobs", 1 << 16):
        batches = [
            start(client, COMPLETIONS, [line(number, COMPLETIONS, prompt="A", **each) for number in range(30)])
            for each in (long_lines, long_answers)
        ]
        for batch, status in zip(batches, ("validating", "in_progress"), strict=True):
            wait_until(
                lambda batch=batch: f"left for later batch_id={batch.id}" in log_of_workers(served),
                description="the worker says so",
                timeout_s=120,
            )
            assert client.batches.retrieve(batch.id).status == status
    for each in batches:
        batch = ended(client, each.id)
        assert batch.request_counts is not None and (batch.status, batch.request_counts.completed) == ("completed", 30)
        assert len(lines_of(client, batch.output_file_id)) == 30
    assert "Traceback" not in log_of_workers(served)


def log_of_workers(served: Deployment) -> str:
    return "".join((served.folder / f"{name}.log").read_text() for name in served.processes if name.startswith("jobs"))


def test_the_command_writes_the_answers_beside_the_file(served: Deployment, tmp_path: Path) -> None:
    source = tmp_path / "questions.jsonl"
    source.write_text("\n".join(json.dumps(line(number, CHAT, **BODIES[CHAT])) for number in range(5)))
    command = [sys.executable, "-m", "services.operator.cli", "batch", str(source), "--url", served.url()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "completed: 5 of 5 answered" in done.stderr
    assert len((tmp_path / "questions.out.jsonl").read_text().splitlines()) == 5
    missing = subprocess.run(
        [*command[:-3], str(tmp_path / "none"), *command[-2:]], capture_output=True, text=True, timeout=120
    )
    assert (missing.returncode, len(missing.stderr.splitlines())) == (2, 1)
