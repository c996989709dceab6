"""`make verify SUITE=hostile`: malformed, hostile and deep requests, to every route of a real pipeline with keys.

Not part of `make test`. Each must get a clear answer: a 4xx whose body says why, in the shape of the
route's API, or a 2xx where the request is good after all; never a 5xx. The gateway's memory must
stay flat, and /health fine. Then hostile messages go into every stream of Redis and into the queue
of batch jobs, and no stage may die of them. Wrong keys are compared by the time of their refusal.
Before all that, another tenant is asked how long he waits beside replays and slow checks.
Loopback only.
"""

import argparse
import asyncio
import itertools
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import psutil

from services.requests.store.tenants.api_keys import add_key
from shared.wire.streams import DEAD_LETTER
from tests.deployment import MODEL, Deployment
from tests.hostile.cases import BROKEN, Case, make_cases
from tests.hostile.cast import running
from tests.hostile.checks import checks
from tests.hostile.depths import send_deep
from tests.hostile.jobs import CHEWING_S, Outside, batch_is_answered, forge_files, inject_jobs
from tests.hostile.replays import replays
from tests.hostile.streams import inject
from tests.hostile.timing import tell_apart
from tests.waiting import wait_until

WARM_UP = 1000  # requests, after which memory is to be flat
MAX_GROWTH_MB = 32
CONCURRENCY = 8
OPEN = ("/", "/health", "/v1/health", "/ready")


def judge(case: Case, reply: httpx.Response) -> str:
    """The problem with the answer; empty: none."""
    path = case.path.partition("?")[0]
    if not case.has_key and path not in OPEN and reply.status_code != 401:
        return "answered without a key"
    if reply.status_code == 504 and b"deadline_s" in case.content:
        return ""  # a slow machine may well not keep the deadline that it sets
    if (
        reply.status_code >= 500 and reply.status_code != 501
    ):  # 501 is said on purpose: what llama.cpp's routes do and we do not
        return f"status {reply.status_code}"
    if reply.status_code < 400 or case.method == "HEAD":
        return ""
    if len(reply.content) > 20_000 or "Traceback" in reply.text or "x-injected" in reply.headers:
        return "an answer that says too much"
    try:
        error = reply.json()["error"]
        message = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError):
        return f"an error without its shape: {reply.text[:80]}"
    return "" if message else "an error without words"


class Attack:
    def __init__(self, deployment: Deployment, key: str) -> None:
        self.deployment = deployment
        self.key = key
        self.statuses: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.gateway = psutil.Process(deployment.processes["gateway-1"].pid)

    def memory_mb(self) -> float:
        """Memory of the gateway and its helpers."""
        return (
            sum(float(each.memory_info().rss) for each in (self.gateway, *self.gateway.children(recursive=True))) / 1e6
        )

    async def send(self, client: httpx.AsyncClient, case: Case) -> None:
        headers = ({"Authorization": f"Bearer {self.key}"} if case.has_key else {}) | case.headers
        try:
            async with client.stream(
                case.method, self.deployment.url() + case.path, content=case.content, headers=headers
            ) as reply:
                if reply.status_code < 400 and "event-stream" in reply.headers.get("content-type", ""):
                    self.statuses["2xx"] += 1
                    return  # and go: its requests are cancelled
                await reply.aread()
        except (httpx.InvalidURL, httpx.LocalProtocolError, ValueError):
            self.statuses["not to be sent"] += 1  # our own client refuses
            return
        except httpx.HTTPError as error:
            self.faults[f"{case.why}: {case.method} {case.path[:60]}: {error!r}"] += 1
            return
        self.statuses[str(reply.status_code) if reply.status_code >= 300 else "2xx"] += 1
        if found := judge(case, reply):
            self.faults[f"{case.why}: {case.method} {case.path[:60]} {case.content[:120]!r}: {found}"] += 1

    async def send_all(self, client: httpx.AsyncClient, queue: Iterator[Case]) -> None:
        for case in queue:
            await self.send(client, case)

    def break_connections(self) -> None:
        """Broken HTTP is answered with 400, or hung up on."""
        headers = f"Host: x\r\nAuthorization: Bearer {self.key}\r\n".encode()
        for content in BROKEN:
            with socket.create_connection(("127.0.0.1", self.deployment.ports["gateway-1"]), timeout=5) as sock:
                sock.settimeout(1.0)
                try:
                    sock.sendall(content.replace(b"%s", headers))
                    sock.shutdown(socket.SHUT_WR)
                    answer = sock.recv(65536)
                except OSError:  # the gateway has hung up, or says nothing
                    answer = b""
            self.statuses["broken HTTP"] += 1
            if b" 500 " in answer.partition(b"\r\n")[0] or b"penstock_" in answer:
                self.faults[f"broken HTTP {content[:60]!r}: {answer[:80]!r}"] += 1

    async def run(self, count: int, seed: int) -> float:
        """Send so many. Returns the gateway's growth in MB after the warm-up."""
        limits = httpx.Limits(max_connections=CONCURRENCY)
        async with httpx.AsyncClient(trust_env=False, timeout=60, limits=limits) as client:
            api = (await client.get(self.deployment.url() + "/openapi.json")).json()
            cases, begun = make_cases(api, seed), time.monotonic()
            before, sent = 0.0, 0
            while sent < count:
                batch = list(itertools.islice(cases, min(500, count - sent)))
                queue = iter(batch)
                await asyncio.gather(*(self.send_all(client, queue) for _ in range(CONCURRENCY)))
                self.break_connections()
                sent += len(batch)
                if sent <= WARM_UP:
                    before = self.memory_mb()
                health = await client.get(self.deployment.url() + "/health")
                print(
                    f"{sent:>6} sent, {time.monotonic() - begun:.0f} s, {self.memory_mb():.0f} MB, /health "
                    f"{health.status_code}",
                    flush=True,
                )
                if health.status_code != 200:
                    self.faults[f"/health: {health.text[:200]}"] += 1
        return self.memory_mb() - before


def attack_redis(attack: Attack, num_messages: int, seed: int) -> None:
    """Hostile messages in every stream, in the queue of jobs and in the records of files; then all
    must still work.
    """
    deployment, outside = attack.deployment, Outside(attack.deployment.folder)
    with deployment.redis() as client:
        inject(client, num_messages, seed)
        num_jobs = inject_jobs(deployment.redis_url, seed)
        print(f"{num_messages} hostile messages in Redis' streams, {num_jobs} in the queue of jobs", flush=True)
        time.sleep(CHEWING_S)  # and a lease, and a claim: whoever was going to die of them has
        print(f"dead letters: {client.xlen(DEAD_LETTER)}", flush=True)
    for found in forge_files(deployment, attack.key):
        attack.faults[f"a forged record of a file: {found}"] += 1
    for path in outside.gone():
        attack.faults[f"outside of the files folder, {path} is gone or another"] += 1
    if not batch_is_answered(deployment, attack.key):
        attack.faults["a good batch afterwards is not answered"] += 1
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What is Penstock?"}], "temperature": 0}
    answer = deployment.post("/v1/chat/completions", body, Authorization=f"Bearer {attack.key}").json()
    if not ("choices" in answer and answer["choices"][0]["message"]["content"].startswith("Penstock is a server")):
        attack.faults[f"a good request afterwards: {answer}"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument(
        "--deep", type=int, default=2000, help="requests beside these with values nested 200 to 2,000 levels deep"
    )
    parser.add_argument(
        "--messages", type=int, default=2000, help="that are written into the pipeline's streams afterwards"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with running() as deployment:
        key = add_key(deployment.folder / "keys.json", "attacker")
        attack = Attack(deployment, key)
        wait_until(
            lambda: httpx.get(f"{deployment.url()}/v1/models", headers={"x-api-key": key}, trust_env=False).is_success,
            description="the key is known",
        )
        for fault in (*replays(deployment), *checks(deployment)):
            attack.faults[fault] += 1
        if difference := asyncio.run(tell_apart(deployment.url(), key)):
            attack.faults[difference] += 1
        growth_mb = asyncio.run(attack.run(args.requests, args.seed))
        ended = asyncio.run(send_deep(attack, args.deep, args.seed, CONCURRENCY))
        print(f"{args.deep} deep bodies sent; processes that ended: {sum(ended.values())} {dict(ended)}", flush=True)
        attack_redis(attack, args.messages, args.seed)
        deaths = [each for each, process in deployment.processes.items() if process.poll() is not None]
        logs = deployment.logs() if deaths else ""
    print(logs, end="")
    print("answers:", ", ".join(f"{status}: {count}" for status, count in sorted(attack.statuses.items())))
    print(f"the gateway grew by {growth_mb:.1f} MB after the first {WARM_UP}; processes that died: {deaths or 'none'}")
    for fault, count in attack.faults.most_common(30):
        print(f"FAULT {count} x {fault}")
    passed = not attack.faults and not deaths and not ended and growth_mb < MAX_GROWTH_MB
    print("hostile passed" if passed else "hostile FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
