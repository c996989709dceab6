"""Whatever happens to any one round trip of any stage, the logs come out byte for byte as if nothing had.

In bf16 on the native kernels: there a sequence's numbers are the same bits in any company, so that
logprobs can be compared as well. PENSTOCK_TEST_EVERY_WRITE=1 disturbs every write with every fault,
in minutes; by default some of them, each time the same.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from services.operator.redis_server import socket_path
from shared.model.sampling_params import ChainParams, DryParams
from shared.wire.messages import TokenEvent
from shared.wire.streams import inflight_key, requests
from shared.wire.token_log import parse_log
from tests.conftest import running_redis
from tests.faulty_redis import FAULTS, FaultyRedis
from tests.stages.line_of_stages import MODEL, LineOfStages, ask, hurried
from tests.waiting import wait_until

STAGES = ("tokenizer", "compute", "sampler")
REQUESTS = (
    ask("greedy.0", "The quick brown fox", max_tokens=10, temperature=0.0, ignore_eos=True),
    ask(
        "seeded.0",
        "Once on a time",
        max_tokens=8,
        seed=7,
        logprobs=2,
        ignore_eos=True,
        returns_prompt_token_ids=True,
        dry=DryParams(1.0, allowed_length=1),
        chain=ChainParams(typical_p=0.95, xtc_probability=0.5, dynatemp_range=0.5),
    ),
    ask("stopped.0", "Tell me about the weather", max_tokens=12, temperature=0.0, stop=("er owns",), ignore_eos=True),
    ask(
        "scored.0", "The sampler decides each token", max_tokens=2, temperature=0.0, prompt_logprobs=3, ignore_eos=True
    ),
    replace(
        ask("echoed.0", "Compute owns what needs the whole vocabulary", max_tokens=0, prompt_logprobs=1), echo=True
    ),
    replace(ask("tokens.0", "Once on a time"), task="tokenize"),
)
STRIDES = {"cut": 5, "lost": 5, "silent": 19, "late": 9}  # of the other faults every 11th write
# of a stage, undisturbed; a machine that is so slow that there are more, of reads that time out,
# disturbs fewer of them
MOST_WRITES = 60


@dataclass
class Disturbed:
    """The stages, each behind a proxy of its own; what they log undisturbed, and with how many writes."""

    line: LineOfStages
    proxies: dict[str, FaultyRedis]
    logs: dict[str, Any]
    num_writes: dict[str, int]


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Disturbed]:
    folder = tmp_path_factory.mktemp("faults")
    with running_redis(folder, redis_binary) as url, hurried():
        proxies = {name: FaultyRedis(socket_path(folder), folder / f"{name}.sock") for name in STAGES}
        with proxies["tokenizer"], proxies["compute"], proxies["sampler"]:
            line = LineOfStages(url, {name: proxy.url for name, proxy in proxies.items()})
            with line.running():
                line.answer(*REQUESTS)
                line.forget_logs()
                for proxy in proxies.values():
                    proxy.arm()
                logs = line.answer(*REQUESTS)
                yield Disturbed(line, proxies, logs, {name: proxy.num_writes for name, proxy in proxies.items()})
                line.forget_logs()
                line.answer(*REQUESTS)  # who still tries again after the last fault would leave with an error
            kept = (b"log:", b"events:", b"attempts:", b"requests:", b"prompts:", b"control")
            assert [key for key in line.client.keys("*") if not key.startswith(kept)] == [], (
                "who leaves takes its streams along"
            )


def test_the_requests_are_what_the_other_tests_need(disturbed: Disturbed) -> None:
    """One ends by its length, one with its logprobs, one by a stop string that lies across tokens, one
    begins with its prompt's logprobs, one is no more, and one is tokens."""
    greedy, seeded, stopped, scored, echoed, tokens = (parse_log(disturbed.logs[each.request_id]) for each in REQUESTS)
    assert len(greedy) == 10 and greedy[-1].finish_reason == "length"
    assert [len(event.logprobs or ()) for event in seeded] == [1] * 8 and len({event.token_id for event in seeded}) > 4
    [answer] = tokens
    assert [event.prompt_token_ids is not None for event in seeded] == [True] + [False] * 7
    assert json.loads(answer.text)["tokens"] == seeded[0].prompt_token_ids.tolist() and answer.finish_reason == "stop"
    assert 2 < len(stopped) < 12 and stopped[-1].stop_reason == "er owns", "".join(event.text for event in stopped)
    assert "er owns" not in "".join(event.text for event in stopped)
    assert [event.prompt_logprobs is not None for event in scored] == [True, False]
    assert scored[0].prompt_logprobs.num_top == 3 and "".join(spelled(scored[0])) == "The sampler decides each token"
    [end] = echoed
    assert (end.position, end.token_id, end.finish_reason) == (0, None, "length") and disturbed.logs["echoed.0"][0][
        0
    ] == b"0-1"
    assert end.text == "".join(spelled(end)) == "Compute owns what needs the whole vocabulary"


def spelled(event: TokenEvent) -> list[str]:
    """The prompt's tokens."""
    prompt = event.prompt_logprobs
    return [
        dict(zip(prompt.spelled_token_ids.tolist(), prompt.texts, strict=True))[token_id]
        for token_id in prompt.token_ids.tolist()
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_round_trip_changes_no_byte_of_any_log(stage: str, fault: str, disturbed: Disturbed) -> None:
    line, proxy = disturbed.line, disturbed.proxies[stage]
    stride = (
        1
        if os.environ.get("PENSTOCK_TEST_EVERY_WRITE") == "1"
        else STRIDES.get(fault, 11) * (1 + disturbed.num_writes[stage] // MOST_WRITES)
    )
    for at in range(1 + FAULTS.index(fault) % stride, disturbed.num_writes[stage] + 1, stride):
        line.forget_logs()
        proxy.arm(at, fault)
        assert line.answer(*REQUESTS) == disturbed.logs, (at, proxy.disturbed)
        wait_until(lambda: proxy.disturbed and proxy.is_over and line.is_at_rest(), description=f"write {at} has come")
        assert {request_id: line.log(request_id) for request_id in disturbed.logs} == disturbed.logs, (
            at,
            proxy.disturbed,
        )
        assert line.client.exists(inflight_key(MODEL)) == 0
        assert line.pending() == 0


def test_a_tokenizer_that_leaves_loses_no_request_whose_delivery_it_never_saw(redis_url: str, tmp_path: Path) -> None:
    """Redis forgets what is pending with a consumer whose name is removed."""
    with (
        FaultyRedis(socket_path(Path(redis_url.removeprefix("unix://")).parent), tmp_path / "proxy.sock") as proxy,
        hurried(),
    ):
        line = LineOfStages(redis_url, {"tokenizer": proxy.url})
        leaving = line.tokenizer
        leaving.reader.ensure_group()
        leaving.stage.transport.run(lambda pipe: pipe.ping())
        line.submit(REQUESTS[0])
        proxy.arm(1, "lost")
        deliveries, _ = leaving.reader.read(count=8, block_ms=1)  # the first try is lost, the second finds nothing new
        assert deliveries == [] and line.client.xpending(requests(MODEL).key, "tokenizer")["pending"] == 1
        leaving.stage.stopping.set()
        leaving.run()
        leaving.stage.stopping.clear()
        with line.running():
            wait_until(lambda: line.has_ended("greedy.0"), description="another has answered it")
