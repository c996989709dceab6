"""`make verify SUITE=proxies`: gateways behind a real nginx and a real Caddy, by the configurations of
deploy/proxy. Not part of `make test`: it needs nginx and caddy (apt install nginx caddy; what is
missing is left out, and said) and openssl.

Shows that tokens are not held back, that a stream which waits stays open, that HTTPS, keys, limits
and errors come through, that bodies are bounded, and that clients see a gateway's death as they
would without a proxy: a stream is resumed, other requests are answered. Addresses, names of files
and the certificate's origin are replaced by the test's own; all else is run as it stands.
"""

import argparse
import asyncio
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson

from services.requests.store.tenants.api_keys import add_key
from tests.conftest import running_redis
from tests.deployment import MODEL, Deployment, free_port
from tests.waiting import wait_until

CONFIGURATIONS = Path(__file__).parent.parent.parent / "deploy/proxy"
PROXIES = ("nginx", "caddy")
NAME = "llm.example"
STAGES = ("sampler", "tokenizer", "compute")
GATEWAYS = ("gateway-1", "gateway-2")
BODY: dict[str, Any] = {"model": MODEL, "prompt": "The", "seed": 3, "temperature": 0.8, "ignore_eos": True}
NGINX = """
user {user};
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {site}
}}
"""
CADDY = """{{
	admin off
	auto_https disable_redirects
}}
{site}
"""
NUM_IDLE = 32  # connections that a proxy keeps to the gateways, and uses again after a while
NUM_TRIES = 5  # as a client does that is told to come again
PROXY_LOOKS_S = 1.0  # between Caddy's looks at /ready
IDLE_S = (5.0, 10.0)  # the while: uvicorn's own patience with an idle connection, and ours with headers


@dataclass(frozen=True, slots=True)
class Site:
    """A proxy that runs, and what is behind it."""

    proxy: str
    port: int
    folder: Path
    deployment: Deployment
    keys: dict[str, str]  # by tenant

    def client(self, tenant: str = "team", *, keep_alive: bool = True) -> httpx.AsyncClient:
        """A client of the site by its name, whose certificate it checks."""

        async def name_site(request: httpx.Request) -> None:
            request.extensions["sni_hostname"] = NAME

        headers = {"Host": NAME} | ({"Authorization": f"Bearer {self.keys[tenant]}"} if tenant else {})
        limits = httpx.Limits(max_keepalive_connections=None if keep_alive else 0)
        return httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{self.port}",
            headers=headers,
            verify=ssl.create_default_context(cafile=self.folder / "site.pem"),
            event_hooks={"request": [name_site]},
            trust_env=False,
            timeout=180,
            limits=limits,
        )

    def post(self, tenant: str, path: str, content: bytes) -> httpx.Response:
        """Posts by a client that still reads the answer when the other side hangs up on what it
        sends, as Caddy does half a second after a refusal.
        """

        def name_site(request: httpx.Request) -> None:
            request.extensions["sni_hostname"] = NAME

        headers = {"Host": NAME, "Content-Type": "multipart/form-data; boundary=x"} | (
            {"Authorization": f"Bearer {self.keys[tenant]}"} if tenant else {}
        )
        verify = ssl.create_default_context(cafile=self.folder / "site.pem")
        with httpx.Client(verify=verify, event_hooks={"request": [name_site]}, trust_env=False, timeout=180) as client:
            return client.post(f"https://127.0.0.1:{self.port}{path}", content=content, headers=headers)

    def say(self, what: str) -> None:
        print(f"ok: {self.proxy}: {what}", flush=True)


def configure(proxy: str, folder: Path, port: int, gateways: list[int]) -> list[str]:
    """Write the repository's configuration with the test's addresses and certificate. Returns the
    command that runs it.
    """
    site = (CONFIGURATIONS / ("nginx.conf" if proxy == "nginx" else "Caddyfile")).read_text()
    for number, gateway in enumerate(gateways):
        site = replaced(site, f"127.0.0.1:{8000 + number}", f"127.0.0.1:{gateway}")
    if proxy == "nginx":
        site = replaced(site, "listen 443 ", f"listen 127.0.0.1:{port} ")
        for suffix in ("pem", "key"):
            site = replaced(site, f"/etc/ssl/{NAME}.{suffix}", str(folder / f"site.{suffix}"))
        (folder / "nginx.conf").write_text(
            NGINX.format(user="root" if os.getuid() == 0 else "nobody", folder=folder, site=site)
        )
        return ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf"), "-g", "daemon off;"]
    site = replaced(site, f"\n{NAME} {{", f"\n{NAME}:{port} {{\n\ttls {folder}/site.pem {folder}/site.key")
    (folder / "Caddyfile").write_text(CADDY.format(site=site))
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


def replaced(text: str, old: str, new: str) -> str:
    assert old in text, f"the configuration has no {old!r}"
    return text.replace(old, new)


@contextmanager
def running(proxy: str, deployment: Deployment, keys: dict[str, str], gateways: list[str]) -> Iterator[Site]:
    """The proxy before these gateways, until the block ends. Its last words are printed if that is an error."""
    folder, port = deployment.folder / f"{proxy}-{free_port()}", free_port()
    folder.mkdir()
    subject = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        *subject,
    ]
    subprocess.run(
        [*make, "-keyout", folder / "site.key", "-out", folder / "site.pem"], check=True, capture_output=True
    )
    command = configure(proxy, folder, port, [deployment.ports[name] for name in gateways])
    environment = {**os.environ, "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "HOME": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    site = Site(proxy, port, folder, deployment, keys)
    try:
        wait_until(lambda: is_up(site), description=f"{proxy} answers", timeout_s=30)
        yield site
    except BaseException:
        print(f"--- {proxy}\n{(folder / 'log').read_text()[-4000:]}")
        raise
    finally:
        process.terminate()
        process.wait(20)


def is_up(site: Site) -> bool:
    async def ask() -> bool:
        async with site.client() as client:
            return (await client.get("/ready")).status_code == 200

    try:
        return asyncio.run(ask())
    except httpx.TransportError:
        return False


def is_ready(deployment: Deployment, gateway: str) -> bool:
    return deployment.get("/ready", gateway).status_code == 200


@asynccontextmanager
async def streaming(client: httpx.AsyncClient, max_tokens: int) -> AsyncIterator[httpx.Response]:
    body = BODY | {"max_tokens": max_tokens, "stream": True, "stream_options": {"include_position": True}}
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, (reply.status_code, await reply.aread())
        yield reply


def text_of(line: str) -> str:
    """Text that a line of a stream adds to the answer."""
    if not line.startswith("data: {"):
        return ""
    return "".join(choice["text"] for choice in orjson.loads(line.removeprefix("data: "))["choices"])


async def whole(client: httpx.AsyncClient, max_tokens: int) -> str:
    reply = await client.post("/v1/completions", json=BODY | {"max_tokens": max_tokens})
    assert reply.status_code == 200, (reply.status_code, reply.text)
    text: str = reply.json()["choices"][0]["text"]
    return text


async def tokens_come_as_they_are_made(site: Site) -> None:
    """Times of arrival: a proxy that collects sends a few large pieces, and the first one late."""
    async with site.client() as client:
        expected = await whole(client, 300)
        started, arrivals, text = time.monotonic(), [], ""
        async with streaming(client, 300) as reply:
            async for line in reply.aiter_lines():
                if piece := text_of(line):
                    arrivals.append(time.monotonic() - started)
                    text += piece
    assert text == expected
    distinct = sum(after - before > 0.001 for before, after in zip(arrivals, arrivals[1:], strict=False))
    assert distinct > 10 and arrivals[0] < arrivals[-1] / 2, (
        f"held back: first {arrivals[0]:.3f} s, last {arrivals[-1]:.3f} s, {distinct} pieces"
    )
    site.say(
        f"a stream's first token after {arrivals[0]:.3f} s, its last after {arrivals[-1]:.3f} s, in {distinct} pieces"
    )


async def a_silent_stream_stays_open(site: Site) -> None:
    """Compute stands still: comments come through, and then the rest."""
    compute = site.deployment.processes["compute-1"]
    async with site.client() as client:
        expected, text, num_comments = await whole(client, 100), "", 0
        async with streaming(client, 100) as reply:
            lines = reply.aiter_lines()
            text += text_of(await anext(lines))
            compute.send_signal(signal.SIGSTOP)
            try:
                async with asyncio.timeout(8):
                    async for line in lines:
                        text += text_of(line)
                        num_comments += line.startswith(":")
                        if num_comments == 3:
                            break
            finally:
                compute.send_signal(signal.SIGCONT)
            async for line in lines:
                text += text_of(line)
    assert num_comments == 3 and text == expected
    site.say("a stream that waits for compute gets its comments, and goes on")


async def a_slow_answer_is_waited_for(site: Site, seconds: float) -> None:
    """Longer than the timeouts that proxies have by themselves."""
    compute = site.deployment.processes["compute-1"]
    async with site.client() as client:
        client.timeout = httpx.Timeout(seconds + 180)
        compute.send_signal(signal.SIGSTOP)
        try:
            answering = asyncio.create_task(whole(client, 20))
            await asyncio.sleep(seconds)
            assert not answering.done(), "answered without compute"
        finally:
            compute.send_signal(signal.SIGCONT)
        assert await answering
    for gateway in GATEWAYS:  # compute answers before its next heartbeat says that it is back
        wait_until(partial(is_ready, site.deployment, gateway), description=f"{gateway} knows that compute is back")
    await asyncio.sleep(3 * PROXY_LOOKS_S)
    site.say(f"an answer that is not streamed may take {seconds:g} s")


async def keys_and_limits_come_through(site: Site) -> None:
    async with site.client("") as nobody, site.client("limited") as limited, site.client() as team:
        refused = await nobody.get("/v1/models")
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert (await team.get("/metrics")).status_code == 403
        replies = [await limited.post("/v1/completions", json=BODY | {"max_tokens": 1}) for _ in range(3)]
        assert [each.status_code for each in replies] == [200, 200, 429], replies
        assert (
            replies[0].headers["x-ratelimit-remaining-requests"] == "1" and int(replies[2].headers["retry-after"]) > 0
        )
        answered = await team.post("/v1/completions", json=BODY | {"max_tokens": 1}, headers={"X-Request-Id": "mine"})
        assert answered.status_code == 200 and answered.headers["x-request-id"] == "mine"
    site.say("401, 403, 429 with Retry-After and what is left; X-Request-Id")


async def bodies_are_bounded(site: Site) -> None:
    """Files are longer than other bodies may be; what is too long is refused in the API's shape."""
    async with site.client() as client:
        stored = await client.post(
            "/v1/files", files={"file": ("lines.jsonl", b"{}\n" * (20 << 18))}, data={"purpose": "batch"}
        )
        assert stored.status_code == 200, (stored.status_code, stored.text)
        await client.delete(f"/v1/files/{stored.json()['id']}")
    for tenant, path, num_mib, status in (
        ("team", "/v1/completions", 33, 413),
        ("team", "/v1/files", 220, 413),
        ("", "/v1/files", 20, 401),
    ):
        reply = await asyncio.to_thread(site.post, tenant, path, b"x" * (num_mib << 20))
        assert reply.status_code == status and reply.json()["error"]["message"], (
            path,
            num_mib,
            reply.status_code,
            reply.text[:300],
        )
    site.say("a file of 15 MB is taken; longer ones, and other bodies above 32 MiB, are refused in JSON")


async def who_leaves_is_cancelled(site: Site) -> None:
    async with site.client() as client, streaming(client, 900) as reply:
        await anext(reply.aiter_lines())
    with site.deployment.redis() as redis:
        wait_until(
            lambda: not redis.hlen(f"inflight:{MODEL}"),
            description="the request of a client that left is cancelled",
            timeout_s=20,
        )
    site.say("a client that leaves has its request cancelled")


async def kept_connections_are_not_stale(site: Site) -> None:
    """Requests on connections that were idle for as long as somebody may be about to close them: none may fail."""
    async with site.client() as client:

        async def ask() -> int:
            # Answered, not refused: Caddy 2.6 may drop an answer that is there before its client's body has ended
            return (await client.post("/v1/completions", json=BODY | {"max_tokens": 1})).status_code

        for idle_s in IDLE_S:
            for early_s in (0.02, 0.0, -0.02):
                await asyncio.gather(*(ask() for _ in range(NUM_IDLE)))
                await asyncio.sleep(idle_s - early_s)
                statuses = await asyncio.gather(*(ask() for _ in range(NUM_IDLE)))
                assert set(statuses) == {200}, f"after {idle_s - early_s:g} s: {sorted(statuses)}"
    site.say(
        f"{NUM_IDLE} requests at once on connections that were idle for "
        f"{' and '.join(f'{each:g}' for each in IDLE_S)} s: all answered"
    )


async def a_gateway_dies(site: Site) -> None:
    """Its stream is cut and goes on at the other one; whoever comes then notices nothing."""
    deployment = site.deployment
    async with site.client(keep_alive=False) as client:
        expected = await whole(client, 200)
        for _ in range(8):  # until a stream is at the gateway that is to die
            text, last_id, response_id = "", "", ""
            async with streaming(client, 200) as reply:
                async for line in reply.aiter_lines():
                    text += text_of(line)
                    last_id = line.removeprefix("id: ") if line.startswith("id: ") else last_id
                    if not response_id and line.startswith("data: {"):
                        response_id = line.partition('"id":"')[2].partition('"')[0]
                    if len(text) > 40:
                        break
                if f"response_id={response_id}" in (deployment.folder / "gateway-1.log").read_text():
                    deployment.kill("gateway-1")
                    break
        else:
            raise AssertionError("the proxy uses one gateway only")
        for _ in range(NUM_TRIES):
            async with client.stream("GET", f"/v1/streams/{response_id}", headers={"Last-Event-ID": last_id}) as rest:
                if rest.status_code == 200:
                    async for line in rest.aiter_lines():
                        text += text_of(line)
                    break
                assert rest.status_code == 503, (rest.status_code, await rest.aread())
                await asyncio.sleep(int(rest.headers["retry-after"]))
        assert text == expected
        statuses: list[int] = []
        while statuses[-20:] != [200] * 20:
            reply = await client.post("/v1/completions", json=BODY | {"max_tokens": 1})
            assert reply.status_code == 200 or (reply.status_code == 503 and "retry-after" in reply.headers), (
                reply.status_code,
                reply.text,
            )
            statuses.append(reply.status_code)
            assert len(statuses) < 60, statuses
    refused = f"{statuses.count(503)} got 503 before that was noticed"
    site.say(
        f"a gateway killed in the middle of a stream: resumed at the other, the same text; of {len(statuses)} "
        f"requests after it {refused}"
    )


async def all_gateways_are_dead(site: Site) -> None:
    site.deployment.kill("gateway-2")
    async with site.client() as client:
        reply = await client.post("/v1/completions", json=BODY | {"max_tokens": 1})
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) > 0, (reply.status_code, reply.text)
        assert reply.json()["error"]["type"] == "unavailable_error"
    site.say("without a gateway: 503 with Retry-After, in the API's shape")


async def without_keys_only_for_this_machine(site: Site) -> None:
    """A gateway without keys, on loopback, behind the proxy: the site's name gives it away."""
    async with site.client("") as client:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/metrics")):
            reply = await client.request(method, path, json=BODY)
            assert reply.status_code == 403 and reply.json()["error"]["code"] == "host_not_allowed", (
                reply.status_code,
                reply.text,
            )
    site.say("a gateway without keys answers nobody who comes by the proxy")


def check(proxy: str, deployment: Deployment, keys: dict[str, str], slow_s: float) -> None:
    """All of it with one proxy. The deployment has its gateways again afterwards."""
    for gateway in GATEWAYS:
        if gateway not in deployment.processes:
            deployment.start("gateway", gateway, keys_file=deployment.folder / "keys.json", ping_interval_s=1)
    deployment.wait_live(*GATEWAYS)
    for gateway in GATEWAYS:
        wait_until(partial(is_ready, deployment, gateway), description=f"{gateway} ready", timeout_s=60)
    steps: list[Callable[[Site], Any]] = [
        tokens_come_as_they_are_made,
        a_silent_stream_stays_open,
        keys_and_limits_come_through,
        bodies_are_bounded,
        who_leaves_is_cancelled,
        kept_connections_are_not_stale,
        partial(a_slow_answer_is_waited_for, seconds=slow_s),
        a_gateway_dies,
        all_gateways_are_dead,
    ]
    with running(proxy, deployment, keys, list(GATEWAYS)) as site:
        for step in steps:
            asyncio.run(step(site))
    with running(proxy, deployment, keys, ["keyless", "keyless"]) as site:
        asyncio.run(without_keys_only_for_this_machine(site))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.proxies", description="Gateways behind nginx and Caddy.")
    parser.add_argument(
        "--slow",
        type=float,
        default=65.0,
        metavar="SECONDS",
        help="for which an answer is awaited (default: %(default)g)",
    )
    parser.add_argument("--only", choices=PROXIES, help="with this one")
    args = parser.parse_args()
    wanted = [args.only] if args.only else PROXIES
    proxies = [name for name in wanted if shutil.which(name) is not None]
    for name in set(wanted) - set(proxies):
        print(f"left out: {name} is not installed (apt install {name})")
    if not proxies or shutil.which("openssl") is None:
        sys.exit("penstock: proxy-test needs nginx or caddy, and openssl: apt install nginx caddy openssl")
    with tempfile.TemporaryDirectory() as name, running_redis((folder := Path(name)) / "redis", None) as url:
        keys = {"team": add_key(folder / "keys.json", "team")}
        deployment = Deployment(url, folder, programs={})
        try:
            for stage in STAGES:
                deployment.start(stage, f"{stage}-1", dtype="float32")
            deployment.start("gateway", "keyless", keys_file=folder / "absent.json")
            for proxy in proxies:
                keys["limited"] = add_key(folder / "keys.json", f"limited-{proxy}", requests_per_minute=2)
                check(proxy, deployment, keys, args.slow)
        except BaseException:
            print(deployment.logs())
            raise
        finally:
            deployment.stop()
    print(f"proxy-test passed: {', '.join(proxies)}")


if __name__ == "__main__":
    main()
