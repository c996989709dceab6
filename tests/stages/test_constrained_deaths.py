"""Answers that are held to a grammar, computed ahead of their log, in a crowd, by processes that
die: they are the bytes that they are alone.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shared.model.constraint import Constraint
from shared.model.files import open_model
from shared.model.sampling_params import SamplingParams
from shared.wire.messages import TokenizedRequest
from tests.conftest import running_redis
from tests.deployment import MODEL, Deployment
from tests.grammars.schemas import keeps_to
from tests.stages.test_deaths import (
    answers,
    events,
    leases_end_with_processes,
    num_tokens,
    start_fragile,
    submit,
    wait_for_all,
)
from tests.waiting import wait_until

EOS = open_model("demo").eos_token_ids
MAX_TOKENS = 70
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 8}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "minItems": 2,
    "maxItems": 3,
}
CONSTRAINTS = [
    Constraint("json_schema", json.dumps(SCHEMA)),
    Constraint("regex", r"([a-z]{1,5} ){10,20}end"),
    Constraint("lark", 'start: "(" expr ")"\nexpr: NUMBER | expr ("+" | "*") NUMBER\nNUMBER: /[0-9]{1,3}/\n'),
    Constraint("json_object", ""),
]


@pytest.fixture
def stages(tmp_path: Path, redis_binary: Path | None) -> Iterator[Deployment]:
    with running_redis(tmp_path / "redis", redis_binary) as url:
        deployment = Deployment(url, tmp_path)
        try:
            yield deployment
        finally:
            for process in deployment.processes.values():
                process.kill()
                process.wait()


def request(number: int, constraint: Constraint | None) -> TokenizedRequest:
    stop = ("7",) if number % 4 == 2 else ()  # seen by the sampler only: what was computed on it is taken back
    params = SamplingParams(
        max_tokens=MAX_TOKENS,
        seed=number,
        temperature=0.0 if number == 3 else 1.2,
        stop=stop,
        frequency_penalty=0.3 * (number % 3),
    )
    prompt = np.array([30 + number, 40, 50 + number % 7], np.int32)
    return TokenizedRequest(f"r{number}.0", None, MODEL, params, prompt, EOS, constraint=constraint)


@pytest.mark.more
def test_constrained_answers_are_the_same_bytes_alone_and_when_processes_die(stages: Deployment) -> None:
    stages.start("sampler", "sampler-1")
    start_fragile(stages, "compute-1", PENSTOCK_RUN_AHEAD="0", FRAGILE_STEP_S="0")
    stages.wait_live("sampler-1", "compute-1")
    client = stages.redis()
    asked = [request(number, CONSTRAINTS[number % 4]) for number in range(8)]
    for each in asked:
        submit(client, [each])
        wait_for_all(stages, [each])
    alone = answers(client, asked)
    assert stages.terminate("compute-1") == 0

    stages.start("sampler", "sampler-2")
    names = [start_fragile(stages, f"compute-{number}", FRAGILE_STEP_S="0.02") for number in (2, 3)]
    stages.wait_live("sampler-2", *names)
    copies = [replace(each, request_id=f"again{each.request_id}") for each in asked]
    crowd = [request(100 + number, None) for number in range(12)]
    submit(client, [one for pair in zip(copies, crowd, strict=False) for one in pair] + crowd[len(copies) :])
    with leases_end_with_processes(stages):
        wait_until(lambda: num_tokens(client, copies) > 60, description="they are under way")
        stages.kill("sampler-1")
        wait_until(lambda: num_tokens(client, copies) > 160, description="they go on")
        stages.kill("compute-2")
        wait_for_all(stages, [*copies, *crowd])
    assert answers(client, copies) == alone

    finished = [
        (text_of(client, each), each.constraint)
        for each in copies
        if events(client, each)[-1].finish_reason == "stop" and not each.params.stop
    ]
    assert finished
    for text, constraint in finished:
        if constraint is CONSTRAINTS[0]:
            assert keeps_to(text, SCHEMA)
        elif constraint is CONSTRAINTS[3]:
            assert isinstance(json.loads(text), dict)


def text_of(client: Any, each: TokenizedRequest) -> str:
    return "".join(event.text for event in events(client, each))
