"""Faults of clients: they go away, take streams over, make ids up, and send what no one should."""

import asyncio
import json
import random
import time
from typing import Any

from tests.chaos.arena import Arena
from tests.chaos.exchange import Exchange, Failed
from tests.chaos.http_client import Broken, Reply, ask
from tests.chaos.specs import CHAT, COMPLETIONS, RESPONSES
from tests.chaos.tally import Outcome

MAX_TRIES = 1000  # as with exchange.MAX_ATTEMPTS
LATE_S = 10.0
GOING_AWAY = 6
NUM_REFUSED, REFUSED_BYTES = 6, 7_800_000
MOST_KEPT = REFUSED_BYTES  # bytes that Redis may hold more afterwards: the load's own logs; less than one of them
FORGET_S = 5.0

NONSENSE_IDS = ("x", "-1", "1,2,3,4", "99999999999999999999999", "1.5", ",", "1e3", "100000", "%00", "1;DROP")
NONSENSE_RESPONSES = ("nope", "cmpl-0000", "..%2F..%2Fx", "chatcmpl-" + "f" * 32, "%F0%9F%92%A7")

OVERFLOWS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1e-38, "top_k": 1000, "temperature": 1},
    {"repetition_penalty": 1e-300, "temperature": 0},
    {"temperature": 1e-300, "top_p": 1e-300},
    {"temperature": 100, "top_p": 1e-9, "min_p": 1.0},
    {
        "logit_bias": {str(token): 100 for token in range(100)},
        "repetition_penalty": 1e-6,
        "presence_penalty": -2,
        "frequency_penalty": -2,
    },
    {"repetition_penalty": 100, "temperature": 1e-6, "logprobs": 5},
)

INVALID = (
    '{"model": MODEL, "prompt": "\\ud83d", "max_tokens": 5}',
    '{"model": MODEL, "prompt": "x", "stop": ["\\udc00"], "max_tokens": 5}',
    '{"model": MODEL, "messages": [{"role": "user", "content": "a\\ud83db"}]}',
    '{"model": MODEL, "messages": [{"role": "user", "name": "\\ud83d", "content": "x"}]}',
    '{"model": "\\ud83d", "prompt": "x"}',
    '{"model": MODEL, "prompt": "x", "temperature": "hot"}',
    '{"model": MODEL, "prompt": [1, "x", null]}',
    '{"model": MODEL, "prompt": [99999999999999999999]}',
    '{"model": MODEL, "prompt": "x", "n": -1}',
    '{"model": MODEL, "prompt": "x", "max_tokens": 1e400}',
    '{"model": MODEL, "prompt": "x", "seed": 1e30}',
    '{"model": MODEL, "prompt"',
    "[" * 5000,
    "null",
    "",
)


async def hang_up(arena: Arena, rng: random.Random) -> None:
    """Nothing is expected of these requests, but that nothing of them stays."""
    for _ in range(GOING_AWAY):
        exchange = arena.load.draw(rng, kind="hang-up")
        arena.load.start(exchange.asked, go_away(exchange, rng))


async def go_away(exchange: Exchange, rng: random.Random) -> Outcome | None:
    task = asyncio.create_task(exchange.run())
    await asyncio.wait({task}, timeout=rng.choice([0.0, rng.uniform(0, 0.3), rng.uniform(0, 3)]))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return exchange.asked.end("left")


async def resume_late(arena: Arena, rng: random.Random) -> None:
    arena.load.manners.late_until = time.monotonic() + LATE_S
    arena.cluster.kill(rng.choice(arena.cluster.of("gateway")))


async def resume_twice(arena: Arena, rng: random.Random) -> None:
    """The last to resume gets the rest of the text; the others' connections end."""
    for _ in range(2):
        arena.load.start(None, take_over(arena, arena.load.draw(rng, is_stream=True, kind="resume-twice"), rng))


async def take_over(arena: Arena, exchange: Exchange, rng: random.Random) -> None:
    """Read some, then resume on a second connection while the first is still open; its end is looked at, too."""
    running = arena.load.start(exchange.asked, exchange.run())
    while not running.done() and exchange.place.last_id is None:
        await asyncio.sleep(0.02)
    for _ in range(rng.choice([1, 2])):
        await asyncio.wait({running}, timeout=rng.uniform(0, 0.3))
        if running.done() or exchange.place.response_id is None:
            return
        exchange = arena.load.exchange(exchange.spec, is_stream=True, kind="resume-twice", before=exchange)
        running = arena.load.start(exchange.asked, exchange.run())


async def resume_nonsense(arena: Arena, rng: random.Random) -> None:
    """While a stream runs, others ask for it with ids that it does not have; it must not notice.
    Then for streams that never were.
    """
    exchange = arena.load.draw(rng, is_stream=True, kind="resume-nonsense")
    arena.load.start(None, pester(arena, exchange, rng))
    refused(
        arena,
        rng,
        "resume-nonsense",
        "a response that never was",
        "GET",
        f"/v1/streams/{rng.choice(NONSENSE_RESPONSES)}",
    )


async def pester(arena: Arena, exchange: Exchange, rng: random.Random) -> None:
    running = arena.load.start(exchange.asked, exchange.run())
    while not running.done() and exchange.place.response_id is None:
        await asyncio.sleep(0.02)
    path = f"/v1/streams/{exchange.place.response_id}"
    for event_id in rng.sample(NONSENSE_IDS, 3):
        if exchange.place.response_id is not None and event_id != "100000":
            await refused(
                arena, rng, "resume-nonsense", f"position {event_id}", "GET", path, None, {"Last-Event-ID": event_id}
            )
    outcome = await running
    if outcome is not None and outcome.kind == "answered":  # it is over: what lies beyond its end?
        beyond = {"Last-Event-ID": ",".join(["100000"] * exchange.spec.n)}
        await send_until_answered(arena, rng, "resume-nonsense", "beyond the end", "end", "GET", path, None, beyond)


async def poison_request(arena: Arena, rng: random.Random) -> None:
    """Each ends once, somehow, and not by an internal error; the others must not notice."""
    for parameters in rng.sample(OVERFLOWS, 3):
        body = {
            "model": arena.load.specs[0].body["model"],
            "prompt": "The",
            "max_tokens": 20,
            "stream": rng.random() < 0.5,
            **parameters,
        }
        name = f"poison {parameters}"[:120]
        send_until_answered(
            arena, rng, "poison-request", name, "clear end", "POST", COMPLETIONS, json.dumps(body).encode()
        )


async def invalid_body(arena: Arena, rng: random.Random) -> None:
    """Each is refused with a 4xx that says why."""
    for text in rng.sample(INVALID, 5):
        data = text.replace("MODEL", json.dumps(arena.load.specs[0].body["model"])).encode()
        refused(
            arena,
            rng,
            "invalid-body",
            f"invalid body {text[:80]}",
            "POST",
            CHAT if '"messages"' in text else COMPLETIONS,
            data,
        )


async def refused_bodies(arena: Arena, rng: random.Random) -> None:
    """Long bodies that are refused, one after another, and then the bytes of Redis: nothing that
    was refused may stay.
    """
    text = "water " * (REFUSED_BYTES // 6)
    data = json.dumps({"model": arena.load.specs[0].body["model"], "input": text, "max_output_tokens": 1}).encode()
    before = await bytes_in_redis(arena)
    for number in range(NUM_REFUSED):
        await refused(arena, rng, "refused-bodies", f"a long body {number}", "POST", RESPONSES, data)
    for _ in range(int(FORGET_S / 0.5)):  # what is forgotten may be freed a moment later
        if (kept := await bytes_in_redis(arena) - before) < MOST_KEPT:
            return
        await asyncio.sleep(0.5)
    arena.history.find(
        f"refused-bodies: Redis keeps {kept >> 20} MiB more after {NUM_REFUSED} bodies of {REFUSED_BYTES >> 20} MiB "
        "that were refused"
    )


async def bytes_in_redis(arena: Arena) -> int:
    async with arena.store.client() as client:
        return int((await client.info("memory"))["used_memory_dataset"])


def refused(
    arena: Arena,
    rng: random.Random,
    kind: str,
    name: str,
    method: str,
    path: str,
    data: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> "asyncio.Task[Outcome | None]":
    """Sends what no server should take: fine if refused as the client's fault."""
    return send_until_answered(arena, rng, kind, name, "refusal", method, path, data, headers)


def send_until_answered(
    arena: Arena,
    rng: random.Random,
    kind: str,
    name: str,
    expects: str,
    method: str,
    path: str,
    data: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> "asyncio.Task[Outcome | None]":
    """A request that is looked at for how it ends, and not for its text. The task ends with the judge's outcome."""
    asked = arena.history.ask(name, kind, path, None, is_stream=False, expects=expects)

    async def run() -> Outcome | None:
        for _ in range(MAX_TRIES):
            gateway = rng.choice(arena.cluster.of("gateway"))
            asked.note("send", to=gateway.name, after=None)
            try:
                words = await words_of(gateway.port, method, path, data, arena.load.headers | (headers or {}))
            except Broken as broken:
                asked.note("break", why=str(broken))
                await asyncio.sleep(0.3)
                continue
            if words[:3] not in ("429", "503"):
                return asked.end("ended", words)
            await asyncio.sleep(0.5)
        return asked.end("lost", f"no answer in {MAX_TRIES} attempts")

    return arena.load.start(asked, run())


async def words_of(port: int, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> str:
    """The last words of a gateway's answer. Raises Broken if it may be asked again."""
    reply = await ask(port, method, path, data, headers)
    try:
        return await last_words(reply)
    except Broken:
        if method == "GET":
            raise
        return "the connection broke"
    finally:
        reply.close()


async def last_words(reply: Reply) -> str:
    """A reply's status, and its error if it has one, in the body or in the stream."""
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        errors = [event.data async for event in reply.events() if event.data and event.data.startswith('{"error"')]
        return f"{reply.status} {json.loads(errors[0])['error']['message'] if errors else ''}".strip()
    try:
        error = (await reply.json()).get("error")
    except AttributeError:
        raise Failed("a body that is no object") from None
    return f"{reply.status} {error['message'] if error else ''}".strip()
