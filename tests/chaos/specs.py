"""The requests of a run: every kind of sampling and of answer, each with its own undisturbed text."""

import random
from dataclasses import dataclass, replace
from typing import Any

from bench.images import picture

TOPICS = (
    "a river",
    "the queue",
    "Redis",
    "a lock gate",
    "memory",
    "the sampler",
    "a cache",
    "tokens",
    "water",
    "a pump",
    "streams",
    "batching",
)
PER_KIND = 7
# What the demo knows by heart, and the answer as a client expects it: somewhat wrong
PREDICTED = (
    (
        "What is Penstock?",
        "Penstock is a server for large models. It runs as a pipeline of separate programs, a gateway, a tokenizer, a "
        "compute stage and a sampler.",
    ),
    ("Tell me a joke.", "Why did the token cross the road? Because the sampler had already decided."),
    (
        "How big are you?",
        "I have about 4 million parameters in four layers. My weights fit in less than eight megabytes of memory.",
    ),
)

# That prompts are put together from. Of few words: the demo's context is short
MODULES = [
    *({"name": f"part{number}", "text": f"Part {number}: {', '.join(TOPICS[number:])}.\n"} for number in range(4)),
    {"union": [{"name": "short", "text": "Be short.\n"}, {"name": "long", "text": "Say all that you know.\n"}]},
    {"name": "named", "text": "You talk with {who}.\n", "parameters": {"who": 6}},
]

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["lock", "gate", "pump"]},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "kind", "sizes"],
}

# Each kind: its parameters. A list is a choice between several.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": [0.7, 1.0, 1.3]},
    "top-p": {"temperature": 0.9, "top_p": [0.5, 0.9]},
    "top-k": {"temperature": 1.0, "top_k": [5, 40], "min_p": [0.0, 0.02]},
    "n=2": {"temperature": [0.8, 1.0], "n": 2},
    "stop": {"temperature": [0, 0.9], "stop": [["."], [" the", "\n"], ["ing "]]},
    "logprobs": {"temperature": [0, 0.8]},
    "penalties": {
        "temperature": [0, 0.9],
        "repetition_penalty": [1.1, 1.4],
        "presence_penalty": 0.5,
        "frequency_penalty": [0.0, 0.7],
    },
    "schema": {
        "temperature": [0, 1.0],
        "max_tokens": 240,
        "response_format": {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA}},
    },
    "response": {"temperature": [0, 0.9]},
    "background": {"temperature": [0, 0.9], "background": True},
    "long": {"temperature": [0, 0.9], "max_tokens": [400, 600], "ignore_eos": True},
    "predicted": {"temperature": [0, 0.9], "ignore_eos": True},
    "modules": {"temperature": [0, 0.9], "ignore_eos": True},
}
IMAGES = {"images": {"temperature": [0, 0.9], "ignore_eos": True}}  # of a model that sees
NUM_PICTURES = 6  # that requests share


@dataclass(frozen=True, slots=True)
class Spec:
    """A request, without whether it is streamed."""

    name: str
    kind: str
    path: str
    body: dict[str, Any]

    @property
    def n(self) -> int:
        return int(self.body.get("n", 1))


def make_specs(model: str, seed: int, module_set: str, *, sees: bool) -> list[Spec]:
    """The requests of a seed. module_set: the id of MODULES; sees: whether the model does."""
    rng = random.Random(f"{seed}:specs")
    kinds = [*KINDS, *(IMAGES if sees else ())]
    specs = [make_spec(f"{kind}/{number}", kind, model, rng) for kind in kinds for number in range(PER_KIND)]
    return [
        replace(spec, body=spec.body | with_modules(module_set, rng)) if spec.kind == "modules" else spec
        for spec in specs
    ]


def with_modules(module_set: str, rng: random.Random) -> dict[str, Any]:
    """Some modules, in any order."""
    use: list[Any] = rng.sample(["part0", "part1", "part2", "part3"], rng.randint(1, 3))
    use += rng.choice([[], ["short"], ["long", {"name": "named", "arguments": {"who": rng.choice(["Ada", "Bo", ""])}}]])
    return {"prompt_modules": {"id": module_set, "use": use}, "cache_salt": rng.choice(["one", "two"])}


def make_spec(name: str, kind: str, model: str, rng: random.Random) -> Spec:
    parameters = {
        key: rng.choice(value) if isinstance(value, list) else value for key, value in (KINDS | IMAGES)[kind].items()
    }
    body: dict[str, Any] = {
        "model": model,
        "seed": rng.randrange(1 << 32),
        "max_tokens": rng.choice([10, 40, 80, 120, 240]),
        **parameters,
    }
    if kind in ("response", "background"):
        body |= {
            "max_output_tokens": body.pop("max_tokens"),
            "input": f"What is {rng.choice(TOPICS)}, and why {rng.randrange(1000)}?",
        }
        return Spec(name, kind, RESPONSES, body | {"ignore_eos": rng.random() < 0.7})
    topic, number = rng.choice(TOPICS), rng.randrange(1000)
    if kind == "predicted":
        question, content = rng.choice(PREDICTED)
        return Spec(
            name,
            kind,
            CHAT,
            body
            | {
                "messages": [{"role": "user", "content": question}],
                "prediction": {"type": "content", "content": content},
            },
        )
    if kind == "images":
        numbers = rng.sample(range(NUM_PICTURES), rng.randint(1, 2))
        parts = [{"type": "image_url", "image_url": {"url": picture(90 + 20 * each, 60, each)}} for each in numbers]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": f"What is {topic} here?"}]}]
        return Spec(name, kind, CHAT, body | {"messages": messages})
    if rng.random() < 0.5:
        if kind == "logprobs":
            body |= {"logprobs": True, "top_logprobs": 3}
        messages = [{"role": "user", "content": f"What is {topic}, and why {number}?"}]
        return Spec(name, kind, CHAT, body | {"messages": messages, "ignore_eos": rng.random() < 0.7 or kind == "long"})
    if kind == "logprobs":
        body["logprobs"] = 2
    return Spec(name, kind, COMPLETIONS, body | {"prompt": f"Question {number}: {topic} is", "ignore_eos": True})
