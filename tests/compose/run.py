"""`make verify SUITE=compose`: docker-compose.yml with real containers, from build to teardown. Not
part of `make test`.

Builds the images, brings the pipeline up, sends requests, scales tokenizers and samplers up and
down under load, kills the worker of a batch, and compares every text with the undisturbed run. Then
all of it once more with deploy/docker/secure.yml: HTTPS, API keys, and a Redis with a user for each
stage. The profiles whose images are not at hand are validated only. Needs a Docker engine, Compose
v2 and openssl; $COMPOSE names the program (default: docker compose). For a machine whose pip and
apt need help: the files PENSTOCK_TEST_PIP_CONF, PENSTOCK_TEST_APT_CONF and PENSTOCK_TEST_CA reach
the build as secrets, and never the images.
"""

import asyncio
import json
import os
import shlex
import ssl
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import openai

ROOT = Path(__file__).parent.parent.parent
MODEL = "penstock-demo"
PORT = os.environ.get("PENSTOCK_PORT", "18000")
NAME = "localhost"  # in the certificate
STAGES = ("gateway", "tokenizer", "compute", "sampler", "jobs")
NUM_LINES = 1000  # of the batch
NUM_BEFORE = 100  # answered, before its worker is killed
PATIENCE_S = 120.0  # without a further line of a batch


def override() -> dict[str, object]:
    """A compose file of the test's own with what the machine's pip and apt need."""
    found = {name: os.environ.get(f"PENSTOCK_TEST_{name.upper()}") for name in ("pip_conf", "apt_conf", "ca")}
    secrets = {name: path for name, path in found.items() if path}
    build: dict[str, object] = {"secrets": list(secrets)} if secrets else {}
    services = {service: {"build": build} for service in ("gateway", "compute")} if build else {}
    return {"services": services, "secrets": {name: {"file": path} for name, path in secrets.items()}}


class Compose:
    def __init__(self, folder: Path, *, is_secure: bool = False) -> None:
        (folder / "override.json").write_text(json.dumps(override()))
        files = [
            ROOT / "docker-compose.yml",
            *([ROOT / "deploy/docker/secure.yml"] if is_secure else []),
            folder / "override.json",
        ]
        program = shlex.split(os.environ.get("COMPOSE", "docker compose"))
        self.command = [*program, "-p", "penstock-test", *(part for file in files for part in ("-f", str(file)))]
        self.environment = {
            **os.environ,
            "PENSTOCK_PORT": PORT,
            "PENSTOCK_MODELS_DIR": str(folder),
            "PENSTOCK_DTYPE": "float32",
        }
        self.verify: ssl.SSLContext | bool = True
        self.url = f"http://{NAME}:{PORT}"
        self.key = "none"
        if is_secure:
            secrets = folder / "secrets"
            subprocess.run([ROOT / "deploy/docker/make-secrets", secrets, NAME], check=True)
            self.command += ["--env-file", str(secrets / "passwords.env")]
            self.environment["PENSTOCK_SECRETS_DIR"] = str(secrets)
            self.verify = ssl.create_default_context(cafile=secrets / "tls/tls.crt")
            self.url = f"https://{NAME}:{PORT}"

    def run(self, *arguments: str) -> None:
        print("+ compose", *arguments, flush=True)
        subprocess.run([*self.command, *arguments], env=self.environment, check=True)

    def read(self, *arguments: str) -> str:
        """The command's output."""
        return subprocess.run(
            [*self.command, *arguments], env=self.environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    async def scale(self, tokenizers: int, samplers: int) -> None:
        await asyncio.to_thread(
            self.run,
            "up",
            "-d",
            "--no-build",
            "--no-recreate",
            "--scale",
            f"tokenizer={tokenizers}",
            "--scale",
            f"sampler={samplers}",
        )

    def get(self, path: str, key: str = "") -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.get(self.url + path, headers=headers, verify=self.verify, trust_env=False, timeout=20)

    def client(self) -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(verify=self.verify, trust_env=False)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, timeout=180, max_retries=0, http_client=http
        )


async def texts(client: openai.AsyncOpenAI, count: int) -> list[str]:
    """`count` seeded streams at once."""

    async def one(number: int) -> str:
        text = ""
        stream = await client.completions.create(
            model=MODEL,
            prompt=f"Question {number}: the",
            temperature=0.9,
            seed=number,
            max_tokens=150,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            text += chunk.choices[0].text
        return text

    return await asyncio.gather(*(one(number) for number in range(count)))


async def check(compose: Compose) -> list[str]:
    """Requests, and scaling under load. Returns texts to compare with."""
    async with compose.client() as client:
        reply = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "What is Penstock?"}], temperature=0
        )
        answer = reply.choices[0].message.content or ""
        assert answer.startswith("Penstock is a server for large language models."), answer
        undisturbed = await texts(client, 16)
        for tokenizers, samplers in ((2, 2), (1, 1), (3, 2), (1, 1)):
            load = asyncio.create_task(texts(client, 16))
            await asyncio.sleep(0.3)
            await compose.scale(tokenizers, samplers)
            assert await load == undisturbed, (
                f"texts changed while scaling to {tokenizers} tokenizers and {samplers} samplers"
            )
            assert await texts(client, 16) == undisturbed
            print(f"ok: {tokenizers} tokenizers, {samplers} samplers", flush=True)
        return undisturbed


async def check_batch(compose: Compose) -> None:
    """A batch through the volume that gateway and worker share; its worker is killed in the middle."""
    bodies = {
        f"line-{number:04}": {"model": MODEL, "prompt": f"Part {number % 7}:", "max_tokens": 24, "seed": number % 7}
        for number in range(NUM_LINES)
    }
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})
        for name, body in bodies.items()
    ]
    async with compose.client() as client:
        known = [
            (await client.completions.create(**bodies[f"line-{number:04}"])).choices[0].text  # type: ignore[call-overload]
            for number in range(7)
        ]
        file = await client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        is_killed, num_completed, moved_at = False, 0, time.monotonic()
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            assert time.monotonic() < moved_at + PATIENCE_S, f"the batch does not move: {batch}"
            await asyncio.sleep(0.2)
            batch = await client.batches.retrieve(batch.id)
            if batch.request_counts is not None and batch.request_counts.completed > num_completed:
                num_completed, moved_at = batch.request_counts.completed, time.monotonic()
            if not is_killed and batch.request_counts is not None and batch.request_counts.completed >= NUM_BEFORE:
                is_killed = True
                assert batch.request_counts.completed < NUM_LINES, (
                    "the batch was over before its worker could be killed"
                )
                await asyncio.to_thread(compose.run, "kill", "jobs")
                await asyncio.to_thread(compose.run, "up", "-d", "--no-build", "--no-recreate", "jobs")
        assert is_killed and batch.status == "completed" and batch.output_file_id and not batch.errors, batch
        content = (await client.files.content(batch.output_file_id)).text
    answers = [json.loads(line) for line in content.splitlines()]
    assert [each["custom_id"] for each in answers] == sorted(bodies), "not every line once"
    assert all(
        each["response"]["body"]["choices"][0]["text"] == known[int(each["custom_id"][-4:]) % 7] for each in answers
    ), "another text"
    print(f"ok: a batch of {NUM_LINES} lines, its worker killed: every line once, with its own text", flush=True)


def check_confinement(compose: Compose) -> None:
    """Nobody is root, has a capability, or may write where he should not."""
    for service in STAGES:
        status = dict(
            line.split(":\t", 1)
            for line in compose.read("exec", "-T", service, "cat", "/proc/1/status").splitlines()
            if ":\t" in line
        )
        assert "0" not in status["Uid"].split() and int(status["CapEff"], 16) == 0 and status["NoNewPrivs"] == "1", (
            service,
            status,
        )
        written = subprocess.run(
            [*compose.command, "exec", "-T", service, "touch", "/app/x"],
            env=compose.environment,
            check=False,
            capture_output=True,
        )
        assert b"Read-only file system" in written.stderr, (service, written)
    print("ok: no stage is root, has capabilities or a root to write to", flush=True)


def check_rights(compose: Compose, key: str) -> None:
    """Checks refusals: without a key, without an administrator's, without Redis' password; and that
    no stage was refused a command of its own.
    """
    refused = compose.get("/v1/models")
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key", refused.text
    assert compose.get("/metrics", key).status_code == 403
    admin = compose.read("run", "--rm", "keys", "add", "ops", "--admin")
    until = time.monotonic() + 10
    while (found := compose.get("/metrics", admin)).status_code != 200:  # gateways look at the file once a second
        assert time.monotonic() < until, found.text
        time.sleep(0.2)
    assert "penstock_replicas" in found.text
    ask_redis = ("exec", "-T", "--env", "REDISCLI_AUTH=", "redis", "redis-cli")
    assert "NOAUTH" in compose.read(*ask_redis, "xlen", "dead-letter")
    log = compose.read(
        "exec", "-T", "redis", "redis-cli", "--user", "operator", "--no-auth-warning", "--json", "ACL", "LOG"
    )
    denied: list[dict[str, Any]] = [entry for entry in json.loads(log) if entry["username"] != "default"]
    assert not denied, f"the stages were refused commands: {denied}"
    print(
        "ok: 401 without a key, 403 without an administrator's, NOAUTH without Redis' password; no command of a stage "
        "was refused",
        flush=True,
    )


def run_plain(folder: Path) -> list[str]:
    compose = Compose(folder)
    try:
        compose.run("build")
        up(compose)
        undisturbed = asyncio.run(check(compose))
        asyncio.run(check_batch(compose))
        check_confinement(compose)
        return undisturbed
    except BaseException:
        show_logs(compose)
        raise
    finally:
        compose.run("down", "--volumes", "--timeout", "20")


def run_secure(folder: Path, undisturbed: list[str]) -> None:
    compose = Compose(folder, is_secure=True)
    try:
        for profile in ("observability", "cuda", "group"):
            compose.run("--profile", profile, "config", "--quiet")
        compose.key = compose.read("run", "--rm", "keys", "add", "team", "--rpm", "100000")
        up(compose)

        async def same() -> bool:
            async with compose.client() as client:
                return await texts(client, 16) == undisturbed

        assert asyncio.run(same()), "other texts than without keys"
        asyncio.run(check_batch(compose))
        check_rights(compose, compose.key)
    except BaseException:
        show_logs(compose)
        raise
    finally:
        compose.run("down", "--volumes", "--timeout", "20")


def up(compose: Compose) -> None:
    started = time.monotonic()
    compose.run("up", "-d", "--no-build", "--wait")
    print(f"up and healthy after {time.monotonic() - started:.1f} s", flush=True)
    ready = compose.get("/ready")
    assert ready.status_code == 200, ready.text


def show_logs(compose: Compose) -> None:
    subprocess.run([*compose.command, "logs", "--tail", "40"], env=compose.environment, check=False)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = run_plain(Path(folder))
        run_secure(Path(folder), undisturbed)
    print("compose-test passed", flush=True)


if __name__ == "__main__":
    main()
