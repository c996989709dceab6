"""`make compose-test`: docker-compose.yml with real containers, from build to teardown. Not part of `make test`.

Builds the images, brings the pipeline up, sends requests, scales tokenizers and samplers up and down under load, and compares every
text with the undisturbed run. Needs a Docker engine and Compose v2; $COMPOSE names the program (default: docker compose). For a
machine whose pip and apt need help: the files PENSTOCK_TEST_PIP_CONF, PENSTOCK_TEST_APT_CONF and PENSTOCK_TEST_CA reach the build as
secrets, and never the images.
"""

import asyncio
import json
import os
import shlex
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
import openai

ROOT = Path(__file__).parent.parent.parent
MODEL = "penstock-demo"
PORT = os.environ.get("PENSTOCK_PORT", "18000")
URL = f"http://127.0.0.1:{PORT}"


def override() -> dict[str, object]:
    """What the machine's pip and apt need, as a compose file of the test's own."""
    found = {name: os.environ.get(f"PENSTOCK_TEST_{name.upper()}") for name in ("pip_conf", "apt_conf", "ca")}
    secrets = {name: path for name, path in found.items() if path}
    build: dict[str, object] = {"secrets": list(secrets)} if secrets else {}
    services = {service: {"build": build} for service in ("gateway", "compute")} if build else {}
    return {"services": services, "secrets": {name: {"file": path} for name, path in secrets.items()}}


class Compose:
    def __init__(self, folder: Path) -> None:
        (folder / "override.json").write_text(json.dumps(override()))
        program = shlex.split(os.environ.get("COMPOSE", "docker compose"))
        self.command = [*program, "-p", "penstock-test", "-f", str(ROOT / "docker-compose.yml"), "-f", str(folder / "override.json")]
        self.environment = {**os.environ, "PENSTOCK_PORT": PORT, "PENSTOCK_MODELS_DIR": str(folder), "PENSTOCK_DTYPE": "float32"}

    def run(self, *arguments: str) -> None:
        print("+ compose", *arguments, flush=True)
        subprocess.run([*self.command, *arguments], env=self.environment, check=True)

    async def scale(self, tokenizers: int, samplers: int) -> None:
        await asyncio.to_thread(self.run, "up", "-d", "--no-build", "--no-recreate", "--scale", f"tokenizer={tokenizers}", "--scale", f"sampler={samplers}")


async def texts(client: openai.AsyncOpenAI, count: int) -> list[str]:
    """`count` seeded streams at once."""

    async def one(number: int) -> str:
        text = ""
        stream = await client.completions.create(
            model=MODEL, prompt=f"Question {number}: the", temperature=0.9, seed=number, max_tokens=150, stream=True, extra_body={"ignore_eos": True}
        )  # fmt: skip
        async for chunk in stream:
            text += chunk.choices[0].text
        return text

    return await asyncio.gather(*(one(number) for number in range(count)))


async def check(compose: Compose) -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", timeout=180, max_retries=0) as client:
        reply = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "What is Penstock?"}], temperature=0)
        answer = reply.choices[0].message.content or ""
        assert answer.startswith("Penstock is a server for large language models."), answer
        undisturbed = await texts(client, 16)
        for tokenizers, samplers in ((2, 2), (1, 1), (3, 2), (1, 1)):
            load = asyncio.create_task(texts(client, 16))
            await asyncio.sleep(0.3)
            await compose.scale(tokenizers, samplers)
            assert await load == undisturbed, f"texts changed while scaling to {tokenizers} tokenizers and {samplers} samplers"
            assert await texts(client, 16) == undisturbed
            print(f"ok: {tokenizers} tokenizers, {samplers} samplers", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        compose = Compose(Path(folder))
        try:
            compose.run("build")
            started = time.monotonic()
            compose.run("up", "-d", "--no-build", "--wait")
            print(f"up and healthy after {time.monotonic() - started:.1f} s", flush=True)
            ready = httpx.get(f"{URL}/ready", trust_env=False)
            assert ready.status_code == 200, ready.text
            asyncio.run(check(compose))
            print("compose-test passed", flush=True)
        except BaseException:
            subprocess.run([*compose.command, "logs", "--tail", "40"], env=compose.environment, check=False)
            raise
        finally:
            compose.run("down", "--volumes", "--timeout", "20")


if __name__ == "__main__":
    main()
