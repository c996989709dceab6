"""Whole pipelines that draft, and die amid it: compute twice, and the sampler. Their logs are byte for
byte those of a pipeline that drafts nothing and that nobody disturbs."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from shared.model.constraint import Constraint
from shared.model.sampling_params import ChainParams, DryParams
from shared.wire.entries import append_to_group
from shared.wire.messages import GenerateRequest, SchedulingParams, TokenEvent, decode, encode
from shared.wire.streams import inflight_key, log_key, prompts, requests
from shared.wire.token_log import parse_log
from tests.conftest import running_redis
from tests.deployment import Deployment
from tests.heads import write_heads
from tests.stages.line_of_stages import FILES, MODEL, ask
from tests.stages.test_deaths import leases_end_with_processes, start_fragile
from tests.waiting import wait_until

SCHEMA = (
    '{"type":"object","properties":{"a_long_name":{"type":"boolean"},"another_name":{"enum":["red","green"]},"text":{"type":"string","maxLength":40}},'
    '"required":["a_long_name","another_name","text"],"additionalProperties":false}'
)
REGEX = r"([a-z]{1,5} ){10,20}end"
STEP_S = 0.008  # a step's, so that a process can be killed amid an answer
NUM_CHOICES = 3
MAX_ROUNDS = 3


def choices(request: GenerateRequest) -> list[GenerateRequest]:
    """As a gateway makes them of n."""
    name = request.request_id.removesuffix(".0")
    return [
        replace(
            request,
            request_id=f"{name}.{number}",
            params=replace(request.params, seed=request.params.seed + number),
            scheduling=SchedulingParams(group_id=name, tenant_id="one"),
        )
        for number in range(NUM_CHOICES)
    ]


REQUESTS = (
    ask("greedy.0", "The quick brown fox", max_tokens=70, temperature=0.0, ignore_eos=True),
    ask(
        "repeats.0",
        "one two three four one two three four one two three",
        max_tokens=70,
        temperature=0.0,
        ignore_eos=True,
    ),
    *choices(ask("choices.0", "A river and a mountain", max_tokens=70, seed=5, logprobs=2, ignore_eos=True)),
    *choices(ask("predicted.0", "A river", max_tokens=70, seed=3, temperature=0.5, ignore_eos=True)),
    ask(
        "penalized.0",
        "Once on a time",
        max_tokens=60,
        seed=7,
        frequency_penalty=1.0,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        ignore_eos=True,
    ),
    ask(
        "chained.0",
        "Once on a time",
        max_tokens=70,
        seed=7,
        dry=DryParams(0.8, allowed_length=2),
        chain=ChainParams(typical_p=0.95, dynatemp_range=0.5),
    ),
    ask(
        "stopped.0",
        "Tell me about the weather",
        max_tokens=70,
        seed=9,
        temperature=0.7,
        stop=("zz", " of the", "ing a"),
        ignore_eos=True,
    ),
    ask(
        "stopped-late.0",
        "The sampler decides",
        max_tokens=70,
        temperature=0.0,
        stop=("qqq",),
        stop_token_ids=(1999,),
        logprobs=0,
        min_tokens=12,
    ),
    ask(
        "scored.0",
        "The sampler decides each token",
        max_tokens=60,
        top_k=5,
        prompt_logprobs=3,
        logprobs=4,
        seed=1,
        ignore_eos=True,
    ),
    replace(ask("schema.0", "Say it", max_tokens=90, seed=2), constraint=Constraint("json_schema", SCHEMA)),
    replace(ask("regex.0", "Say it", max_tokens=90, seed=1, temperature=1.2), constraint=Constraint("regex", REGEX)),
    ask(
        "biased.0",
        "Say it",
        max_tokens=60,
        seed=1,
        logit_bias={40: 3.0, 41: -2.0},
        bad_words=("x",),
        top_p=0.9,
        ignore_eos=True,
    ),
)


@dataclass
class Pipeline:
    """A tokenizer, a sampler, and the logs of a compute that drafted nothing."""

    stages: Deployment
    heads: Path
    asked: tuple[GenerateRequest, ...]
    expected: dict[str, Any]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("drafting")
    with running_redis(folder / "redis", redis_binary) as url:
        stages = Deployment(url, folder)
        try:
            names = [
                stages.start("tokenizer", "tokenizer-1"),
                stages.start("sampler", "sampler-0"),
                start(stages, "compute-off", "off", step_s=0.0),
            ]
            stages.wait_live(*names)
            [predicted] = answer(
                stages, "first-", tuple(each for each in REQUESTS if each.request_id == "predicted.1")
            ).values()
            text = "".join(event.text for event in events(predicted))
            # a prediction is a part of the request, and of its last event
            asked = tuple(
                replace(each, prediction=f"{text[:60]} and {text[70:]}")
                if each.request_id.startswith("predicted")
                else each
                for each in REQUESTS
            )
            expected = answer(stages, "off-", asked)
            stages.kill("compute-off")
            yield Pipeline(stages, write_heads(folder / "heads", FILES.config["hidden_size"]), asked, expected)
        finally:
            for name in list(stages.processes):
                stages.kill(name)
            stages.stop()


def start(stages: Deployment, name: str, speculate: str, *, step_s: float = STEP_S, **settings: str) -> str:
    own = {
        f"PENSTOCK_{key.upper()}": value
        for key, value in {"speculate": speculate, "dtype": "bfloat16", "max_num_seqs": "8"}.items()
    }
    return start_fragile(stages, name, **own, FRAGILE_STEP_S=str(step_s), **settings)


def submit(stages: Deployment, asked: list[GenerateRequest]) -> None:
    with stages.redis().pipeline(transaction=True) as pipe:
        for each in asked:
            pipe.hset(inflight_key(MODEL), each.request_id, "1")
            pipe.hincrby(inflight_key(MODEL), "", 1)
            append_to_group(pipe, requests(MODEL), each)
        pipe.execute()


def renamed(prefix: str, asked: tuple[GenerateRequest, ...]) -> list[GenerateRequest]:
    """The same requests under other names: a log is there but once."""
    groups = [each.scheduling.group_id and prefix + each.scheduling.group_id for each in asked]
    return [
        replace(each, request_id=prefix + each.request_id, scheduling=replace(each.scheduling, group_id=group))
        for each, group in zip(asked, groups, strict=True)
    ]


def answer(stages: Deployment, prefix: str, asked: tuple[GenerateRequest, ...]) -> dict[str, Any]:
    copies = renamed(prefix, asked)
    submit(stages, copies)
    wait_for_all(stages, copies)
    return logs(stages, prefix, asked)


def wait_for_all(stages: Deployment, asked: list[GenerateRequest]) -> None:
    client = stages.redis()

    def has_ended(each: GenerateRequest) -> bool:
        last: Any = client.xrevrange(log_key(each.request_id), count=1)
        return bool(last) and b"e" in last[0][1]

    try:
        wait_until(lambda: all(has_ended(each) for each in asked), description="all have ended", timeout_s=150)
        wait_until(
            lambda: not client.xlen(prompts(MODEL).key) and not client.exists(inflight_key(MODEL)),
            description="nothing is left",
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{stages.logs()}") from None


def logs(stages: Deployment, prefix: str, asked: tuple[GenerateRequest, ...]) -> dict[str, Any]:
    """Entries' ids and events by request, but for its name and for how much of its prompt was found
    computed, which is a matter of when it came.
    """
    client, found = stages.redis(), {}
    for each in asked:
        log: Any = client.xrange(log_key(prefix + each.request_id))
        bare = [replace(event, request_id="", num_cached_tokens=0) for event in parse_log(log)]
        found[each.request_id] = [(entry_id, encode(event)) for (entry_id, _), event in zip(log, bare, strict=True)]
    return found


def events(log: list[tuple[bytes, bytes]]) -> list[TokenEvent]:
    return [decode(TokenEvent, data) for _, data in log]


def num_tokens(stages: Deployment, asked: list[GenerateRequest]) -> int:
    with stages.redis() as client:
        return sum(int(client.xlen(log_key(each.request_id))) for each in asked)


def note_drafts(stages: Deployment, stood: dict[str, float]) -> None:
    """How many drafts stood on each replica that lives now."""
    for each in stages.registry().replicas:
        stood[each.replica_id] = each.load.spec_decode_accepted_tokens or 0.0


def test_the_requests_end_in_all_ways(pipeline: Pipeline) -> None:
    ends = {name: events(log)[-1] for name, log in pipeline.expected.items()}
    assert {each.finish_reason for each in ends.values()} == {"length", "stop"}
    assert ends["stopped.0"].stop_reason in (" of the", "ing a") and json.loads(
        "".join(each.text for each in events(pipeline.expected["schema.0"]))
    )
    assert re.fullmatch(REGEX, "".join(each.text for each in events(pipeline.expected["regex.0"])))
    assert ends["predicted.1"].prediction_tokens[0] > 10


@pytest.mark.sampled(3)
@pytest.mark.parametrize("speculate", ["auto", "self", "draft,medusa"])
def test_logs_are_those_without_drafts_when_processes_die(pipeline: Pipeline, speculate: str) -> None:
    rounds = (
        answer_amid_deaths(pipeline, speculate, f"{speculate.replace(',', '-')}-{number}-")
        for number in range(MAX_ROUNDS)
    )
    assert any(rounds), "they were always over before they could be disturbed"


def answer_amid_deaths(pipeline: Pipeline, speculate: str, prefix: str) -> bool:
    """Check the logs. Returns whether the processes died amid them: this one may be held up for
    longer than the answers take.
    """
    stages = pipeline.stages
    settings = {"PENSTOCK_HEADS": str(pipeline.heads), "PENSTOCK_DRAFT_MODEL": "demo"} if "draft" in speculate else {}
    first, second, last = (start(stages, f"{prefix}{number}", speculate, **settings) for number in range(3))
    sampler = stages.start("sampler", f"sampler-{prefix}1")
    stages.wait_live(first, second, sampler)
    copies = renamed(prefix, pipeline.asked)
    stood: dict[str, float] = {}
    total, is_amid = sum(map(len, pipeline.expected.values())), True
    with leases_end_with_processes(stages):
        submit(stages, copies)
        for share, victim in ((0.15, first), (0.3, sampler), (0.5, second)):
            wait_until(
                lambda share=share: num_tokens(stages, copies) > share * total,
                description=f"{share} of their tokens are there",
            )
            note_drafts(stages, stood)
            is_amid &= num_tokens(stages, copies) < 0.9 * total
            stages.kill(victim)
        wait_for_all(stages, copies)
        note_drafts(stages, stood)
        stages.kill(last)
    assert logs(stages, prefix, pipeline.asked) == pipeline.expected
    assert sum(stood.values()) > 5
    told = "".join((stages.folder / f"{name}.log").read_text() for name in (first, second, last))
    assert "differs from the predicted one" not in told, "a sampler had to put right what compute foresaw"
    return is_amid
