"""Values nested 200 to 2,000 levels deep, endless numbers and what is no JSON, in each place of
each API's bodies where a value or a text of JSON may stand.

No process may end of them: neither a stage, nor a gateway's helper, nor the worker that renders templates.
"""

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from tests.hostile.cases import MODEL, Case

if TYPE_CHECKING:
    from tests.hostile.__main__ import Attack

DEPTHS = (200, 2000)
LIMITS = (
    128,
    144,
    254,
    255,
    256,
    329,
    492,
    985,
    986,
    988,
    990,
    994,
    998,
    1000,
    1020,
    1023,
    1024,
    1025,
)  # of this server, orjson, Python, and near them
LEVELS = (
    ('{"a":', "}"),
    ("[", "]"),
    ('{"a":[', "]}"),
    ('{"type":"object","properties":{"a":', "}}"),
    ('{"type":"array","items":', "}"),
    ('{"not":', "}"),
)
LEAVES = (
    "1",
    '"x"',
    "{}",
    "[]",
    "null",
    '"<|im_end|>"',
    '"\\u003c|im_end|>"',
    "9" * 4301,
    "9" * 70_000,
    "-" + "9" * 400,
    "1e999",
    "-1e999",
    "1." + "0" * 5000,
    "NaN",
    "Infinity",
    "-Infinity",
    '"\\ud800"',
    '"\\ud83d\\ud83d"',
    '"\\u0000"',
    "0x" + "f" * 5000,
    "",
    "'",
    "tru",
)
HERE = "its place"  # of the value, in a body
AS_TEXT = "its place, as a text"
CHAT_HEAD: dict[str, Any] = {"model": MODEL, "max_tokens": 1}
USER = {"role": "user", "content": "x"}


def called(arguments: str) -> list[Any]:
    return [
        USER,
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}],
        },
    ]


def tool(parameters: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def of_chats() -> Iterator[dict[str, Any]]:
    for place in (HERE, AS_TEXT):
        yield {"messages": called(place)}
        yield {
            "messages": [*called(place), {"role": "tool", "tool_call_id": "c", "content": "1"}, USER],
            "tools": [tool("{}")],
        }
        yield {"messages": [USER, {"role": "assistant", "function_call": {"name": "f", "arguments": place}}]}
        yield {"messages": [{"role": "user", "content": place}]}
        yield {"messages": [USER], "chat_template_kwargs": {"a": place}}
        yield {"messages": [USER], "structured_outputs": {"json": place}}
        yield {"messages": [USER], "structured_outputs": {"structural_tag": place}}
        yield {"messages": [USER], "guided_json": place}
        yield {"messages": [USER], "unknown": place}
        yield {"messages": place}
    yield {
        "messages": [
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": AS_TEXT}}],
            }
        ]
    }
    yield {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": HERE}]}]}
    yield {"messages": [USER], "documents": [{"a": HERE}]}
    yield {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": HERE}}}
    yield {"messages": [USER], "response_format": {"type": "structural_tag", "format": HERE}}
    yield {"messages": [USER], "tools": [tool(HERE)], "tool_choice": "required"}
    yield {"messages": [USER], "tools": [tool(HERE)]}
    yield {"messages": [USER], "metadata": HERE, "logit_bias": HERE, "tool_choice": HERE}


def of_blocks() -> Iterator[dict[str, Any]]:
    for place in (HERE, AS_TEXT):
        yield {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": place}}]},
            ]
        }
        yield {"messages": [USER], "system": [{"type": "text", "text": "x", "cache_control": place}]}
        yield {
            "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": place}]}]
        }
    yield {
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": HERE}]},
        ]
    }
    yield {"messages": [USER], "tools": [{"name": "f", "input_schema": HERE}], "tool_choice": {"type": "any"}}
    yield {"messages": [USER], "output_config": {"format": {"type": "json_schema", "schema": HERE}}}
    yield {"messages": [USER], "unknown": HERE}


def of_ollama() -> Iterator[dict[str, Any]]:
    for place in (HERE, AS_TEXT):
        yield {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": {"a": place}}}],
                },
            ]
        }
        yield {"messages": [USER], "format": place}
    yield {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": HERE}}]},
        ]
    }
    yield {"messages": [USER], "tools": [tool(HERE)]}
    yield {"messages": [USER], "options": {"stop": HERE, "temperature": HERE}}


def of_items() -> Iterator[dict[str, Any]]:
    for place in (HERE, AS_TEXT):
        yield {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": place},
                {"type": "message", **USER},
            ]
        }
        yield {"input": [{"type": "function_call_output", "call_id": "c", "output": place}]}
    yield {"input": [{"type": "local_shell_call", "call_id": "c", "action": HERE}]}
    yield {"input": [{"type": "web_search_call", "id": "w", "action": HERE}, {"type": "message", **USER}]}
    yield {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": AS_TEXT}]}
    yield {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": HERE}]}
    yield {
        "input": "x",
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": HERE}]}],
    }
    yield {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": HERE}}}
    yield {"input": "x", "metadata": HERE, "tool_choice": HERE}


def places() -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies, each with a place for one value."""
    head, ollama = CHAT_HEAD, {"model": MODEL, "stream": False, "options": {"num_predict": 1}}
    found = [("/v1/chat/completions", head | body) for body in of_chats()]
    found += [(path, head | body) for body in of_blocks() for path in ("/v1/messages", "/v1/messages/count_tokens")]
    found += [
        ("/v1/messages/batches", {"requests": [{"custom_id": "a", "params": head | body}]}) for body in of_blocks()
    ]
    found += [("/api/chat", ollama | body) for body in of_ollama()]
    found += [("/v1/responses", {"model": MODEL, "max_output_tokens": 16} | body) for body in of_items()]
    for path in ("/tokenize", "/v1/embeddings"):
        found += [
            (path, {"model": MODEL, "messages": called(place)} | more)
            for place in (HERE, AS_TEXT)
            for more in ({}, {"chat_template_kwargs": {"a": HERE}})
        ]
    for place in (HERE, AS_TEXT):
        found += [
            ("/v1/completions", head | {"prompt": place}),
            ("/v1/completions", head | {"prompt": "x", "guided_json": place}),
        ]
        found += [
            ("/completion", {"prompt": place, "n_predict": 1}),
            ("/completion", {"prompt": "x", "n_predict": 1, "json_schema": place}),
        ]
        found += [
            ("/infill", {"input_prefix": "x", "input_suffix": "y", "input_extra": place}),
            ("/v1/embeddings", {"model": MODEL, "input": place}),
        ]
        found += [
            ("/api/generate", ollama | {"prompt": "x", "format": place, "raw": True}),
            ("/api/embed", {"model": MODEL, "input": place}),
        ]
        found += [
            ("/v1/prompt_modules", {"modules": [{"name": "a", "text": "x", "parameters": place}]}),
            ("/detokenize", {"tokens": place}),
        ]
        found += [
            ("/rerank", {"query": "x", "documents": place}),
            ("/score", {"text_1": "x", "text_2": place}),
            ("/classify", {"input": place}),
        ]
        found += [
            (
                "/v1/batches",
                {
                    "input_file_id": "x",
                    "endpoint": "/v1/completions",
                    "completion_window": "24h",
                    "metadata": {"a": place},
                },
            )
        ]
    return found


def nested(rng: random.Random, depth: int, leaf: str | None = None) -> str:
    """A text of so many levels; with some leaves it is no JSON."""
    levels = [rng.choice(LEVELS)] * depth if rng.random() < 0.7 else [rng.choice(LEVELS) for _ in range(depth)]
    inner = rng.choice(LEAVES) if leaf is None else leaf
    closing = levels[::-1] if rng.random() < 0.9 else ()  # or it is broken off
    return "".join(begin for begin, _ in levels) + inner + "".join(end for _, end in closing)


def content_of(body: dict[str, Any], value: str) -> bytes:
    """The body with the value in its place."""
    return json.dumps(body).replace(json.dumps(HERE), value).replace(json.dumps(AS_TEXT), json.dumps(value)).encode()


def deep_cases(seed: int) -> Iterator[Case]:
    """One in twenty is so long that a helper parses it."""
    rng, all_places = random.Random(seed), places()
    for number in itertools.count():
        path, body = all_places[number % len(all_places)]
        depth = rng.choice(LIMITS) if rng.random() < 0.3 else rng.randint(*DEPTHS)
        content = content_of(body, nested(rng, max(DEPTHS[0], depth), "1" if rng.random() < 0.5 else None))
        yield Case(f"{depth} levels", "POST", path, content + b" " * (rng.random() < 0.05) * 70_000)


def children(attack: "Attack") -> dict[int, str]:
    """The processes that the stages have started, helpers and workers, by pid."""
    stages = [psutil.Process(process.pid) for process in attack.deployment.processes.values()]
    return {child.pid: " ".join(child.cmdline()[-2:]) for stage in stages for child in stage.children(recursive=True)}


async def send_deep(attack: "Attack", count: int, seed: int, concurrency: int) -> Counter[str]:
    """Send so many. Returns how many processes have ended, by their names; what else is wrong is
    among the attack's faults.
    """
    ended, before, cases = Counter[str](), children(attack), deep_cases(seed)
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for _ in range(0, count, 500):
            queue = iter(list(itertools.islice(cases, min(500, count))))
            await asyncio.gather(*(attack.send_all(client, queue) for _ in range(concurrency)))
            now = children(attack)
            ended.update(name for pid, name in before.items() if pid not in now)
            before = now
    ended.update(name for name, process in attack.deployment.processes.items() if process.poll() is not None)
    return ended
