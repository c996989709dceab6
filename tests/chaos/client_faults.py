"""Faults of clients: they go away, take streams over, make ids up, and send what no one should."""

import asyncio
import json
import random
import time
from copy import deepcopy
from typing import Any

from tests.chaos.arena import Arena
from tests.chaos.exchange import Exchange, Failed
from tests.chaos.http_client import Broken, Reply, ask
from tests.chaos.specs import CHAT, COMPLETIONS
from tests.chaos.tally import Journal, Outcome

MAX_TRIES = 1000  # as with exchange.MAX_ATTEMPTS
LATE_S = 10.0
GOING_AWAY = 6

NONSENSE_IDS = ("x", "-1", "1,2,3,4", "99999999999999999999999", "1.5", ",", "1e3", "100000", "%00", "1;DROP")
NONSENSE_RESPONSES = ("nope", "cmpl-0000", "..%2F..%2Fx", "chatcmpl-" + "f" * 32, "%F0%9F%92%A7")

OVERFLOWS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1e-38, "top_k": 1000, "temperature": 1},
    {"repetition_penalty": 1e-300, "temperature": 0},
    {"temperature": 1e-300, "top_p": 1e-300},
    {"temperature": 100, "top_p": 1e-9, "min_p": 1.0},
    {"logit_bias": {str(token): 100 for token in range(100)}, "repetition_penalty": 1e-6, "presence_penalty": -2, "frequency_penalty": -2},
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
        exchange = arena.load.draw(rng)
        arena.load.start("hang-up", exchange.journal, lambda exchange=exchange: go_away(exchange, rng))  # type: ignore[misc]


async def go_away(exchange: Exchange, rng: random.Random) -> Outcome:
    task = asyncio.create_task(exchange.run())
    await asyncio.wait({task}, timeout=rng.choice([0.0, rng.uniform(0, 0.3), rng.uniform(0, 3)]))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return Outcome("left")


async def resume_late(arena: Arena, rng: random.Random) -> None:
    arena.load.manners.late_until = time.monotonic() + LATE_S
    arena.cluster.kill(rng.choice(arena.cluster.of("gateway")))


async def resume_twice(arena: Arena, rng: random.Random) -> None:
    """The last to resume gets the rest of the text; the others' connections end."""
    for _ in range(2):
        exchange = arena.load.draw(rng, is_stream=True)
        arena.load.start("resume-twice", exchange.journal, lambda exchange=exchange: take_over(arena, exchange, rng))  # type: ignore[misc]


async def take_over(arena: Arena, exchange: Exchange, rng: random.Random) -> Outcome:
    """Read some, then resume on a second connection while the first is still open; its end is looked at, too."""
    first = asyncio.create_task(arena.load.finish(exchange))
    while not first.done() and exchange.answer.last_id is None:
        await asyncio.sleep(0.02)
    for _ in range(rng.choice([1, 2])):
        await asyncio.wait({first}, timeout=rng.uniform(0, 0.3))
        if first.done() or exchange.answer.response_id is None:
            break
        second = arena.load.exchange(exchange.spec, is_stream=True, known=exchange.known)
        second.answer, second.journal, second.is_contended = deepcopy(exchange.answer), exchange.journal, True
        exchange.is_taken_over = True
        exchange.journal.note("another connection takes it over")
        before, first, exchange = first, asyncio.create_task(arena.load.finish(second)), second
        arena.load.start("taken-over", exchange.journal, lambda before=before: end_of_old(before))  # type: ignore[misc]
    return await first


async def end_of_old(before: "asyncio.Task[Outcome]") -> Outcome:
    """The connection that was taken over: told so, or complete."""
    outcome = await before
    if outcome.kind in ("error", "excused") and "resumed elsewhere" in outcome.message.lower():
        return Outcome("ended", "resumed elsewhere")
    return outcome


async def resume_nonsense(arena: Arena, rng: random.Random) -> None:
    """While a stream runs, others ask for it with ids that it does not have; it must not notice. Then for streams that never were."""
    exchange = arena.load.draw(rng, is_stream=True)
    arena.load.start("resume-nonsense", exchange.journal, lambda: pester(arena, exchange, rng))
    journal = Journal("a response that never was")
    path = f"/v1/streams/{rng.choice(NONSENSE_RESPONSES)}"
    arena.load.start("resume-nonsense", journal, lambda: refused(arena, journal, rng, "GET", path, None, {}))


async def pester(arena: Arena, exchange: Exchange, rng: random.Random) -> Outcome:
    running = asyncio.create_task(arena.load.finish(exchange))
    while not running.done() and exchange.answer.response_id is None:
        await asyncio.sleep(0.02)
    for event_id in rng.sample(NONSENSE_IDS, 3):
        if exchange.answer.response_id is not None and event_id != "100000":
            path = f"/v1/streams/{exchange.answer.response_id}"
            await refused(arena, exchange.journal, rng, "GET", path, None, {"Last-Event-ID": event_id})
    outcome = await running
    if outcome.kind == "answered":  # it is over: what lies beyond its end?
        path = f"/v1/streams/{exchange.answer.response_id}"
        beyond = ",".join(["100000"] * exchange.spec.n)
        await ended(arena, exchange.journal, rng, "GET", path, None, {"Last-Event-ID": beyond})
    return outcome


async def poison_request(arena: Arena, rng: random.Random) -> None:
    """Each ends once, somehow; the others must not notice."""
    for parameters in rng.sample(OVERFLOWS, 3):
        journal = Journal(f"poison {parameters}"[:120])
        body = {"model": arena.load.specs[0].body["model"], "prompt": "The", "max_tokens": 20, "stream": rng.random() < 0.5, **parameters}
        data = json.dumps(body).encode()
        arena.load.start("poison-request", journal, lambda journal=journal, data=data: poisoned(arena, journal, rng, data))  # type: ignore[misc]


async def poisoned(arena: Arena, journal: Journal, rng: random.Random, data: bytes) -> Outcome:
    outcome = await ended(arena, journal, rng, "POST", COMPLETIONS, data, {})
    return Outcome("error", "no clear error: internal error") if "internal error" in outcome.message else outcome


async def invalid_body(arena: Arena, rng: random.Random) -> None:
    """Each is refused with a 4xx that says why."""
    for text in rng.sample(INVALID, 5):
        journal = Journal(f"invalid body {text[:80]}")
        data = text.replace("MODEL", json.dumps(arena.load.specs[0].body["model"])).encode()
        path = CHAT if '"messages"' in text else COMPLETIONS
        arena.load.start("invalid-body", journal, lambda journal=journal, data=data, path=path: refused(arena, journal, rng, "POST", path, data, {}))  # type: ignore[misc]


async def refused(arena: Arena, journal: Journal, rng: random.Random, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> Outcome:
    """What no server should take: the outcome is fine if it was refused as the client's fault."""
    outcome = await ended(arena, journal, rng, method, path, data, headers)
    if outcome.message[:1] == "4":
        return outcome
    return Outcome("error", f"{method} {path[:60]} {headers or ''} gave {outcome.message}")


async def ended(arena: Arena, journal: Journal, rng: random.Random, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> Outcome:
    """Sent until a gateway answers; the outcome says with what."""
    for _ in range(MAX_TRIES):
        gateway = rng.choice(arena.cluster.of("gateway"))
        journal.note(f"{method} {path[:60]} {headers or ''} at {gateway.name}")
        try:
            reply = await ask(gateway.port, method, path, data, headers)
        except Broken as broken:
            journal.note(str(broken))
            await asyncio.sleep(0.3)
            continue
        try:
            words = await last_words(reply)
        except Broken as broken:
            journal.note(str(broken))
            if method == "GET":
                continue
            words = "the connection broke"
        finally:
            reply.close()
        journal.note(words)
        if words[:3] not in ("429", "503"):
            return Outcome("ended", words)
        await asyncio.sleep(0.5)
    return Outcome("lost", f"no answer in {MAX_TRIES} attempts")


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
