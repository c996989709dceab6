"""Forged messages in Celery's queue, forged batch ids, and forged records of files.

Somebody who can write to Redis can send them. No worker may die of them, nothing outside the files
folder may be read or removed, and a good batch must be answered afterwards.
"""

import base64
import gzip
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx
import msgpack
import redis

from shared.wire.job_queue import RUN_BATCH, make_queue
from shared.wire.streams import CELERY_PREFIX, JOB_QUEUE, batch_queued_key, file_key
from tests.deployment import MODEL, Deployment

SECRET = "what lies outside of the files folder"
ANSWER_S = 120.0  # for the good batch
CHEWING_S = 15.0  # for the worker to have met every forged message: Celery waits some seconds after some
UNPACKED = 64 << 20  # bytes of a body that is a few kilobytes when it is sent
IDS = ("../../victim", "/etc", "..", "", "\x00", "a" * 100_000, "batch_" + "é" * 40, "*", "batch_1\n")


def genuine(url: str) -> dict[str, Any]:
    """A message as Celery itself writes it, taken out of a queue that nobody reads."""
    app = make_queue(url)
    app.send_task(RUN_BATCH, args=["batch_x"], queue="forge")
    app.close()
    with redis.Redis.from_url(url) as client:
        message: dict[str, Any] = json.loads(client.lpop(f"{CELERY_PREFIX}forge"))
    return message


def body_of(*args: Any) -> str:
    return base64.b64encode(
        json.dumps([list(args), {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]).encode()
    ).decode()


# Fields of a message, and what Celery never writes there
WRONG: dict[str, list[Any]] = {
    "content-type": ["application/data", "application/x-python-serialize", "application/x-yaml", "", None, 7],
    "content-encoding": ["binary", "utf-7", "no-such", None, []],
    "body": ["", "!!", base64.b64encode(b"{").decode(), base64.b64encode(b"\xff\xfe").decode(), None, 7, {}],
    "headers": [None, {}, [], "x", {"task": RUN_BATCH}],
    "properties": [None, {}, []],
}
WRONG_HEADERS: dict[str, list[Any]] = {
    "task": ["no.such.task", "celery.backend_cleanup", "celery.chord_unlock", None, 7, ""],
    "compression": ["no-such", 7],
    **{name: [[], "x", -1, {}] for name in ("id", "eta", "expires", "retries", "timelimit", "lang")},
}
WRONG_PROPERTIES: dict[str, list[Any]] = {"delivery_info": [None, {}, 7], "delivery_tag": [None, "x" * 10_000, []]}
WRONG_ARGUMENTS: list[tuple[Any, ...]] = [(), (None,), (7,), ({},), ([],), ("x", "y"), ("batch_x",) * 50]
NO_MESSAGES: list[Any] = [{}, [], None, "x", 7]


def forged(good: dict[str, Any], rng: random.Random) -> list[bytes]:
    """Messages that are wrong in one way each, in an order of their own."""
    headers, properties = good["headers"], good["properties"]
    bomb = base64.b64encode(gzip.compress(b" " * UNPACKED)).decode()
    wrong: list[Any] = [good | {name: value} for name, values in WRONG.items() for value in values]
    wrong += [good | {"headers": headers | {name: value}} for name, values in WRONG_HEADERS.items() for value in values]
    wrong += [
        good | {"properties": properties | {name: value}}
        for name, values in WRONG_PROPERTIES.items()
        for value in values
    ]
    wrong += [good | {"body": body_of(*arguments)} for arguments in WRONG_ARGUMENTS]
    wrong += [good | {"headers": headers | {"compression": "application/x-gzip"}, "body": bomb}, *NO_MESSAGES]
    messages = [json.dumps(each).encode() for each in wrong]
    messages += [b"", b"{", b"\xff\xfe\x00", b"[" * 10_000, rng.randbytes(200), json.dumps(good).encode()[:-20]]
    rng.shuffle(messages)
    return messages


def inject_jobs(url: str, seed: int) -> int:
    """Put them all into the queue, and tasks for batches that are no batches. Returns how many."""
    good = genuine(url)
    messages = forged(good, random.Random(seed))
    with redis.Redis.from_url(url) as client:
        for message in messages:
            client.lpush(JOB_QUEUE, message)
        for batch_id in IDS:
            client.set(batch_queued_key(batch_id), "1", ex=60)
            client.lpush(JOB_QUEUE, json.dumps(good | {"body": body_of(batch_id)}))
    return len(messages) + len(IDS)


class Outside:
    """Folders and files beside the files folder, which only forged names lead to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = [folder / "victim" / "kept.txt", folder / "secret.txt"]
        for path in self.paths:
            path.parent.mkdir(exist_ok=True)
            path.write_text(SECRET)

    def gone(self) -> list[str]:
        return [
            str(path.relative_to(self.folder)) for path in self.paths if not path.exists() or path.read_text() != SECRET
        ]


def forge_files(deployment: Deployment, key: str) -> list[str]:
    """Records of files whose names lead outside; what of it the API gave away, in words."""
    headers, found = {"Authorization": f"Bearer {key}"}, []
    with (
        httpx.Client(base_url=deployment.url(), headers=headers, trust_env=False, timeout=60) as client,
        deployment.redis() as store,
    ):
        good = client.post("/v1/files", files={"file": ("lines.jsonl", b"{}")}, data={"purpose": "batch"}).json()["id"]
        record = msgpack.unpackb(store.get(file_key(good)))
        ways: list[dict[str, Any]] = [
            {"file_id": "../../secret", "expires_at": "txt"},
            {"file_id": "../../victim/kept", "expires_at": "txt"},
        ]
        ways += [
            {"file_id": f"{deployment.folder}/secret", "expires_at": "txt"},
            {"owner": 7},
            {"num_bytes": "many"},
            {"filename": "\r\nX-Injected: yes"},
            {},
        ]
        for number, way in enumerate(ways):
            forged_id = f"file-forged{number}"
            store.set(file_key(forged_id), msgpack.packb(record | {"file_id": forged_id} | way), ex=600)
        store.set(file_key("file-garbage"), b"\xc1", ex=600)
        for path in (*(f"/v1/files/file-forged{number}" for number in range(len(ways))), "/v1/files/file-garbage"):
            for method, end in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                try:
                    reply = client.request(method, path + end)
                except httpx.RemoteProtocolError:  # a record without its content: the answer breaks off
                    continue
                except httpx.HTTPError as error:
                    found.append(
                        f"{method} {path}{end}, {ways[int(path[-1])] if path[-1].isdigit() else 'garbage'}: {error!r}"
                    )
                    continue
                if SECRET in reply.text or "x-injected" in reply.headers:
                    found.append(f"{method} {path}{end} gives away what lies outside")
                if reply.status_code >= 500 and "Traceback" in reply.text:
                    found.append(f"{method} {path}{end}: {reply.text[:80]}")
    return found


def batch_is_answered(deployment: Deployment, key: str) -> bool:
    """Whether a good batch is, after all that."""
    headers = {"Authorization": f"Bearer {key}"}
    line = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": MODEL, "prompt": "Water", "max_tokens": 2},
    }
    with httpx.Client(base_url=deployment.url(), headers=headers, trust_env=False, timeout=60) as client:
        file = client.post(
            "/v1/files", files={"file": ("lines.jsonl", json.dumps(line).encode())}, data={"purpose": "batch"}
        ).json()
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=wanted).json()
        until = time.monotonic() + ANSWER_S
        while time.monotonic() < until:
            if client.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed":
                return True
            time.sleep(0.5)
    return False
