"""A pipeline under load, scraped by a real Prometheus: do the dashboard and the alerts have
something to show, and is what they show true?
"""

import asyncio
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from shared.wire.streams import prompts
from tests.deployment import MODEL, Deployment, free_port
from tests.telemetry import batches
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent / "deploy" / "observability"
LOAD_S = 45.0
NUM_CLIENTS = 6
WINDOW = "30s"  # Grafana's $__rate_interval: four scrapes at least
LEAST_SEEN = 0.9  # of what clients counted: a replica that is killed takes its last second's counts with it


class Prometheus:
    """Debian's, on a free loopback port, with the rules that are shipped; it scrapes every second."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        if (program := shutil.which("prometheus")) is None:
            raise SystemExit("there is no prometheus on this machine: apt-get install prometheus")
        self.url = f"http://127.0.0.1:{free_port()}"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "alerts.yml")],
            "scrape_configs": [{"job_name": "penstock", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        command = [
            program,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/tsdb",
            f"--web.listen-address={self.url[7:]}",
        ]
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(self, path: str, **params: str) -> Any:
        reply = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=30, trust_env=False).json()
        assert reply["status"] == "success", f"{params}: {reply}"
        return reply["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float:
        [one] = self.query(expression)
        return float(one["value"][1])

    def is_up(self) -> bool:
        try:
            return [float(each["value"][1]) for each in self.query("up")] == [1.0, 1.0]
        except (httpx.HTTPError, ValueError):  # it says in plain text that it is starting
            return False


class Client:
    """Asks of every kind, and counts what it gets."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.num_tokens = self.num_answers = self.num_refused = self.num_left = self.num_unavailable = 0

    async def ask_until(self, number: int, deadline: float) -> None:
        gateways = list(self.deployment.ports)
        while time.monotonic() < deadline:
            gateway = gateways[number % len(gateways)]
            async with self.deployment.async_client(gateway) as client:
                try:
                    await self.ask(client, number)
                except openai.InternalServerError as error:
                    assert error.status_code == 503, (
                        "a stage may be missing on a machine that is busy, for as long as its lease; nothing else"
                    )
                    self.num_unavailable += 1
                    await asyncio.sleep(1.0)
            number += 1

    async def ask(self, client: openai.AsyncOpenAI, number: int) -> None:
        kind = number % 8
        if kind == 0:
            await self.refused(client)
        elif kind == 1:
            await self.leave(client)
        elif kind == 2:
            await client.embeddings.create(model=MODEL, input=["one", "two"])
        else:
            await self.answered(client, number)

    async def answered(self, client: openai.AsyncOpenAI, number: int) -> None:
        reply = await client.completions.create(
            model=MODEL,
            prompt="The river " * (number % 5 * 20 + 1),
            max_tokens=40,
            n=1 + number % 2,
            seed=number,
            extra_body={"ignore_eos": True},
        )
        self.num_answers += 1 + number % 2
        self.num_tokens += reply.usage.completion_tokens if reply.usage else 0

    async def refused(self, client: openai.AsyncOpenAI) -> None:
        """A prompt that is too long, which the tokenizer finds; both sequences of the response are
        refused, and nothing is cancelled.
        """
        try:
            await client.completions.create(model=MODEL, prompt="The river " * 2000, n=2)
        except openai.BadRequestError:
            self.num_refused += 2

    async def leave(self, client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(
            model=MODEL, prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            self.num_tokens += 1
            break
        await stream.close()
        self.num_left += 1


def scrape(redis_url: str, folder: Path) -> None:
    deployment = Deployment(redis_url, folder, programs={})
    try:
        deployment.start_all(gateways=2, computes=2, kv_cache_memory="4MiB", max_num_seqs=8)
        with scraping(deployment, folder) as prometheus:
            client = asyncio.run(load(deployment, prometheus))
            time.sleep(3.0)  # the last scrape
            check_counts(prometheus, client)
            check_panels(prometheus)
            check_alerts(prometheus)
    except AssertionError:
        print(deployment.logs()[-6000:])
        raise
    finally:
        deployment.stop()


@contextmanager
def scraping(deployment: Deployment, folder: Path) -> Iterator[Prometheus]:
    prometheus = Prometheus(folder, [f"127.0.0.1:{port}" for port in deployment.ports.values()])
    try:
        wait_until(prometheus.is_up, description="Prometheus scrapes both gateways", timeout_s=60)
        time.sleep(2.0)  # every series has begun
        yield prometheus
    finally:
        prometheus.process.terminate()
        prometheus.process.wait(20)


async def load(deployment: Deployment, prometheus: Prometheus) -> Client:
    """Clients at both gateways, and a batch whose worker is killed; meanwhile one compute replica is,
    too, and comes back under the same name: its counters begin again."""
    client, deadline = Client(deployment), time.monotonic() + LOAD_S
    clients = [asyncio.create_task(client.ask_until(number, deadline)) for number in range(NUM_CLIENTS)]
    batch = asyncio.create_task(asyncio.to_thread(batches.run, deployment, lambda: check_nobody_works(prometheus)))
    await asyncio.sleep(LOAD_S / 3)
    victim = next(each for each in deployment.processes if each.startswith("compute"))
    await asyncio.to_thread(kill_at_work, deployment, victim)
    deployment.start("compute", victim, kv_cache_memory="4MiB", max_num_seqs=8)
    await asyncio.gather(*clients, batch)
    print(
        f"load: {client.num_answers} answers, {client.num_refused} refused, {client.num_left} left, "
        f"{client.num_tokens} tokens; {victim} killed",
        flush=True,
    )
    return client


def kill_at_work(deployment: Deployment, victim: str) -> None:
    """Kill a compute replica while it holds requests: others are to take them over."""
    process, client = deployment.processes[victim], deployment.redis()
    stream = prompts(MODEL)

    def holds_some() -> bool:
        process.send_signal(signal.SIGSTOP)  # what it holds now, it holds when it dies
        if client.xpending_range(stream.key, stream.group, "-", "+", 1, consumername=victim):
            return True
        process.send_signal(signal.SIGCONT)
        return False

    wait_until(holds_some, description=f"{victim} has work")
    deployment.kill(victim)


def check_nobody_works(prometheus: Prometheus) -> None:
    """While a batch waits and no worker is alive, an alert is about to say so."""
    alert = "PenstockNoBatchWorker"
    wait_until(
        lambda: alert in {each["labels"]["alertname"] for each in prometheus.ask("alerts")["alerts"]},
        description=f"{alert} is pending",
    )
    assert prometheus.value("min(penstock_batch_oldest_seconds)") > 0
    print(
        f"no worker: {prometheus.value('max(penstock_batches_running)'):g} batch waits, {alert} is pending", flush=True
    )


def check_counts(prometheus: Prometheus, client: Client) -> None:
    """Gateways' own counts add up to what clients saw; compute's, over replicas that died and came
    back, to as much as was computed.
    """
    ended = {
        each["metric"]["finished_reason"]: float(each["value"][1])
        for each in prometheus.query("sum by (finished_reason) (penstock_request_success_total)")
    }
    print(f"ended: {ended}", flush=True)
    assert ended["error"] == client.num_refused, "refused means refused"
    assert ended["cancelled"] == client.num_left, "cancelled means cancelled"
    assert ended["length"] == client.num_answers
    unavailable = prometheus.value('sum(penstock_requests_rejected_total{reason="stage_missing"})')
    assert unavailable == client.num_unavailable
    too_long = prometheus.value('sum(penstock_request_errors_total{code="context_length_exceeded",status="400"})')
    assert too_long == client.num_refused
    intervals = prometheus.value("sum(penstock_inter_token_latency_seconds_count)")
    tokens, firsts = (
        prometheus.value("sum(penstock_generation_tokens_total)"),
        prometheus.value("sum(penstock_time_to_first_token_seconds_count)"),
    )
    assert intervals == tokens - firsts, "intervals are between the tokens of one sequence"
    assert tokens >= client.num_tokens
    window = f"{int(LOAD_S) + 30}s"
    computed = prometheus.value(
        f"sum(max by (replica, model_name) (increase(penstock_computed_generation_tokens_total[{window}])))"
    )
    of_batch = prometheus.value("max(penstock_batch_generation_tokens_total)")
    print(
        f"tokens: {client.num_tokens} read by clients, {tokens:g} by gateways, {of_batch:g} in a batch; {computed:g} "
        "decided at compute, over a death",
        flush=True,
    )
    assert LEAST_SEEN * (client.num_tokens + of_batch) <= computed <= 1.25 * (tokens + of_batch)
    told = prometheus.query('penstock_batch_lines_total{outcome="completed"}')
    assert [float(each["value"][1]) for each in told] == [batches.NUM_LINES] * 2, (
        "each gateway tells every line once, though the worker was killed"
    )
    assert of_batch == batches.NUM_TOKENS
    assert (
        prometheus.value('max(penstock_batches_ended_total{status="completed"})') == 1
        and prometheus.value("max(penstock_batch_lines_waiting)") == 0
    )
    begun_anew = prometheus.query(f"max by (replica) (resets(penstock_steps_total[{window}])) > 0")
    assert len(begun_anew) == 1, "only the one that was killed counts from 0 again"
    names = [
        name
        for name in prometheus.ask("label/__name__/values")
        if name.startswith("penstock_") and name.endswith(("_total", "_count", "_bucket"))
    ]
    assert [name for name in names if prometheus.query(f'resets({name}{{replica=""}}[{window}]) > 0')] == [], (
        "what gateways count only grows"
    )


def check_panels(prometheus: Prometheus) -> None:
    """Every panel has something to show."""
    dashboard = json.loads((ROOT / "grafana" / "dashboards" / "penstock.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    for panel in panels:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", WINDOW).replace("$model", ".*")
            found = prometheus.query(expression)
            assert found, f"{panel['title']}: nothing for {expression}"
            shown = ", ".join(
                f"{'/'.join(each['metric'].values()) or '-'} {float(each['value'][1]):.4g}" for each in found[:4]
            )
            print(f"{panel['title']:<32} {target['legendFormat']:<24} {shown}", flush=True)
            assert all(float(each["value"][1]) >= 0 for each in found if each["value"][1] != "NaN"), expression
    print(f"ok: {len(panels)} panels", flush=True)


def check_rules(_: str, __: Path) -> None:
    """Some alerts fire when they should, by made-up series: Debian's prometheus brings promtool."""
    if (program := shutil.which("promtool")) is None:
        raise SystemExit("there is no promtool on this machine: apt-get install prometheus")
    subprocess.run([program, "test", "rules", str(Path(__file__).parent / "alerts.yml")], check=True)


def check_alerts(prometheus: Prometheus) -> None:
    """Every rule evaluates, and what happened is told: a replica was replaced."""
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    for rule in rules:
        print(f"{rule['name']:<32} {rule['health']} {rule['state']}", flush=True)
        assert rule["health"] == "ok", rule
    firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
    assert firing == {"PenstockComputeReplaced"}, firing
    print(f"ok: {len(rules)} alerts", flush=True)
