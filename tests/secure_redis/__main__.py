"""`make verify SUITE=redis`: the pipeline on a Redis that speaks TLS only and knows a user for each
stage (deploy/redis/users.acl). Not part of `make test`: it needs a redis-server from 7.0 on that is
built with TLS (Debian's redis-server is), and openssl.

Shows that the pipeline works so, through the death of a stage, without one refused command; what
each user can't do; and that a wrong password, a certificate of nobody's, and a connection without
TLS are refused in one line.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import redis

from tests.deployment import MODEL, Deployment, free_port
from tests.redis_users import ACL, MAY, OWN_CONNECTION, risky_commands
from tests.waiting import wait_until

STAGES = ("sampler", "tokenizer", "compute", "gateway", "jobs")
USERS = (*MAY, "operator")
CERTIFICATE = [
    "req",
    "-x509",
    "-newkey",
    "ec",
    "-pkeyopt",
    "ec_paramgen_curve:prime256v1",
    "-nodes",
    "-days",
    "2",
    "-subj",
    "/CN=localhost",
    "-addext",
    "subjectAltName=DNS:localhost,IP:127.0.0.1",
]
# in place of NOPERM: as a script is told, and of what the server's configuration keeps from everybody
REFUSED = ("can't access at least one of the keys", "command not allowed")
# Keys, and ways to list them, that a stage has no business with, by its user
FORBIDDEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sampler", ("XRANGE", "requests:{model}", "-", "+")),
    ("sampler", ("XRANGE", "prompts:{model}", "-", "+")),
    ("sampler", ("GET", "stored:resp_x")),
    ("sampler", ("GET", "response:resp_x")),
    ("sampler", ("XADD", "requests:{model}", "*", "m", "x")),
    ("sampler", ("EVAL", "return redis.call('XRANGE', 'requests:{model}', '-', '+')", "0")),
    ("tokenizer", ("GET", "response:resp_x")),
    ("tokenizer", ("XADD", "decisions:c", "*", "m", "x")),
    ("compute", ("XRANGE", "requests:{model}", "-", "+")),
    ("compute", ("GET", "stored:resp_x")),
    ("compute", ("SET", "replica:gateway:g", "x")),
    ("gateway", ("XADD", "candidates:s", "*", "m", "x")),
    ("keda", ("XRANGE", "requests:{model}", "-", "+")),
    *((user, ("SCAN", "0")) for user in MAY if user != "jobs"),
    *((user, ("GET", "anything")) for user in MAY),
)


@contextmanager
def secure_redis(folder: Path) -> Iterator[int]:
    """A server that speaks TLS only, with the users of the repository; their passwords are
    `<user>-secret`. Yields its port.
    """
    for name in ("redis", "other"):
        subprocess.run(
            ["openssl", *CERTIFICATE, "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt"],
            check=True,
            capture_output=True,
        )
    users = ACL.read_text()
    for user in USERS:
        users = users.replace(f"{user.upper()}_PASSWORD", f"{user}-secret")
    (folder / "users.acl").write_text(users)
    port = free_port()
    options: dict[str, Any] = {
        "port": 0,
        "tls-port": port,
        "bind": "127.0.0.1",
        "tls-cert-file": folder / "redis.crt",
        "tls-key-file": folder / "redis.key",
        "tls-ca-cert-file": folder / "redis.crt",
        "tls-auth-clients": "no",
        "aclfile": folder / "users.acl",
        "dir": folder,
        "appendonly": "yes",
        "maxmemory-policy": "noeviction",
        "save": "",
    }
    command = [
        shutil.which("redis-server") or "redis-server",
        *(part for name, value in options.items() for part in (f"--{name}", str(value))),
    ]
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: is_up(folder, port), description="redis answers", timeout_s=30)
        yield port
    finally:
        process.kill()
        process.wait()


def url_of(folder: Path, port: int, user: str, *, password: str = "", authority: str = "redis") -> str:
    return f"rediss://{user}:{password or user + '-secret'}@127.0.0.1:{port}/0?ssl_ca_certs={folder / authority}.crt"


def is_up(folder: Path, port: int) -> bool:
    try:
        with redis.Redis.from_url(url_of(folder, port, "operator")) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def works(deployment: Deployment) -> None:
    """Streams, whole and stored answers, a cancel, and the death of a sampler in the middle of a text."""
    with deployment.client() as client:
        reply = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "What is Penstock?"}], temperature=0
        )
        answer = reply.choices[0].message.content
        assert answer and answer.startswith("Penstock is a server"), answer
        fields: dict[str, Any] = {
            "model": MODEL,
            "prompt": "The",
            "seed": 3,
            "temperature": 0.8,
            "max_tokens": 200,
            "extra_body": {"ignore_eos": True},
        }
        whole = client.completions.create(**fields).choices[0].text
        text = ""
        for number, chunk in enumerate(client.completions.create(**fields, stream=True)):
            text += chunk.choices[0].text if chunk.choices else ""
            if number == 20:
                deployment.kill("sampler-1")
                deployment.start("sampler", "sampler-9", redis_url=deployment.environment["PENSTOCK_SAMPLER_URL"])
        assert text == whole, "the text changed with the sampler's death"
        print("ok: chat, completions, and a sampler killed in the middle of a stream: the same text")
        first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=20, temperature=0)
        client.responses.create(
            model=MODEL, input="And?", previous_response_id=first.id, background=True, max_output_tokens=500
        )
        client.responses.cancel(
            client.responses.create(model=MODEL, input="x", background=True, max_output_tokens=900).id
        )
        client.responses.delete(first.id)
        stream = client.completions.create(**fields | {"max_tokens": 900}, stream=True)
        next(iter(stream))
        stream.close()
        print("ok: responses stored, gone on with, cancelled and deleted; a client that went away")
        line: dict[str, Any] = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": "The", "max_tokens": 5},
        }
        file = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", description="a batch", timeout_s=60)
        client.files.delete(file.id)
        long = line | {"body": line["body"] | {"max_tokens": 900, "ignore_eos": True}}
        file = client.files.create(file=("long.jsonl", json.dumps(long).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(
            lambda: deployment.redis().exists(f"inflight:{MODEL}"),
            description="its line is in the pipeline",
            timeout_s=60,
        )
        client.batches.cancel(batch.id)
        wait_until(
            lambda: client.batches.retrieve(batch.id).status == "cancelled",
            description="a batch is cancelled",
            timeout_s=60,
        )
        print("ok: a file, a batch of it, and one that is cancelled while it runs")
    with httpx.stream("GET", f"{deployment.url()}/live", timeout=10, trust_env=False) as live:
        assert any('"num_held_blocks"' in line for line in islice(live.iter_lines(), 40)), "compute shows nothing"
    for path in ("/health", "/ready", "/metrics"):
        assert deployment.get(path).status_code == 200, path
    assert deployment.post("/tokenize", {"prompt": "a b"}).json()["count"] > 0


def other_passwords(deployment: Deployment, folder: Path, port: int) -> None:
    """While the stages run, each gets another password: it says so and ends, for whoever watches it
    to start it with the new one.
    """
    with redis.Redis.from_url(url_of(folder, port, "operator")) as client:
        for name, process in deployment.processes.items():
            user = name.partition("-")[0]
            client.execute_command("ACL", "SETUSER", user, "resetpass", ">another")
            client.execute_command("CLIENT", "KILL", "USER", user)
            process.wait(60)
            said = (deployment.folder / f"{name}.log").read_text()
            assert process.returncode == 1 and "Redis refuses" in said and "Traceback" not in said, (
                name,
                process.returncode,
                said[-2000:],
            )
            client.execute_command("ACL", "SETUSER", user, "resetpass", f">{user}-secret")
    print("ok: a stage whose password is changed says so in a line, and ends")


def refusals(folder: Path, port: int) -> None:
    """Checks what each user can't do: of keys, some; of what could disturb others, all that the server knows."""
    with redis.Redis.from_url(url_of(folder, port, "operator")) as client:
        risky = risky_commands(client)
    asked = [(user, tuple(part.format(model=MODEL) for part in command)) for user, command in FORBIDDEN]
    asked += [
        (user, tuple(command))
        for user in MAY
        for name, command in risky.items()
        if name not in MAY[user] | OWN_CONNECTION
    ]
    for user, command in asked:
        with redis.Redis.from_url(url_of(folder, port, user)) as client:
            try:
                reply = client.execute_command(*command)
            except redis.exceptions.NoPermissionError:
                continue
            except redis.ResponseError as error:
                assert any(words in str(error) for words in REFUSED), (user, command, error)
                continue
            raise AssertionError(f"{user} may {command}: {reply!r}")
    print(f"ok: {len(asked)} commands that are no stage's business are refused, each by its own user's connection")
    with redis.Redis.from_url(url_of(folder, port, "keda")) as client:
        client.execute_command("CLIENT", "SETNAME", "keda")
        assert client.info("server")["redis_version"] and client.execute_command("XINFO", "GROUPS", f"prompts:{MODEL}")
        assert client.execute_command("XPENDING", f"prompts:{MODEL}", "compute")
    print("ok: keda is told the version, the lag and what is pending")


def bad_connections(folder: Path, port: int) -> None:
    """One line on standard error and exit code 2, or 'does not answer' where it might yet come."""
    urls = {
        "a wrong password": url_of(folder, port, "sampler", password="wrong"),
        "no user": f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={folder}/redis.crt",
        "a certificate of nobody's": url_of(folder, port, "sampler", authority="other"),
        "no TLS": f"redis://sampler:sampler-secret@127.0.0.1:{port}/0",
        "no file of authorities": url_of(folder, port, "sampler", authority="absent"),
    }
    for what, url in urls.items():
        command = [
            sys.executable,
            "-m",
            "services.sampler",
            "--model",
            "demo",
            "--redis-url",
            url,
            "--redis-timeout-s",
            "2",
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        said = ended.stderr.strip().splitlines()
        assert (
            ended.returncode == 2 and said and said[-1].startswith("penstock: ") and "Traceback" not in ended.stderr
        ), (what, ended)
        assert "-secret" not in ended.stderr, "a password in an error"
        print(f"ok: {what}: {said[-1][:140]}")


def main() -> None:
    if shutil.which("redis-server") is None or shutil.which("openssl") is None:
        sys.exit(
            "penstock: redis-test needs redis-server (7.0 or newer, built with TLS) and openssl: apt install "
            "redis-server openssl"
        )
    with tempfile.TemporaryDirectory() as name, secure_redis(folder := Path(name)) as port:
        deployment = Deployment(url_of(folder, port, "operator"), folder, programs={})
        deployment.environment["PENSTOCK_SAMPLER_URL"] = url_of(folder, port, "sampler")
        try:
            started = time.monotonic()
            for stage in STAGES:
                deployment.start(
                    stage,
                    f"{stage}-1",
                    redis_url=url_of(folder, port, stage),
                    dtype="float32",
                    files_url=str(folder / "files"),
                    wait_for_replicas_s=60,
                )
            deployment.wait_live(*(f"{stage}-1" for stage in STAGES))
            wait_until(lambda: deployment.get("/ready").status_code == 200, description="ready", timeout_s=60)
            print(f"ok: up over TLS, each stage as a user of its own, after {time.monotonic() - started:.1f} s")
            works(deployment)
            with redis.Redis.from_url(url_of(folder, port, "operator")) as client:
                refused = client.execute_command("ACL", "LOG")
                assert not refused, f"the stages were refused commands: {refused}"
            print("ok: no command of a stage was refused")
            other_passwords(deployment, folder, port)
        except BaseException:
            print(deployment.logs())
            raise
        finally:
            deployment.stop()
        refusals(folder, port)
        bad_connections(folder, port)
    print("redis-test passed")


if __name__ == "__main__":
    main()
