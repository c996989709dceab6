"""Several steps in a model's stages at once: what happens to sequences meanwhile changes no log,
and an error on the way is one.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from services.compute.ranks.parallel.distributed import DistributedRanks
from shared.wire.messages import GenerateRequest, SchedulingParams, encode
from shared.wire.token_log import parse_log
from tests.conftest import running_redis
from tests.deployment import free_port
from tests.stages.line_of_stages import LineOfStages, ask, crowd, hurried
from tests.stages.test_ranks_in_line import grouped_line
from tests.stages.test_speculation import REQUESTS


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("stages"), redis_binary) as url, hurried():
        yield url


def answers(line: LineOfStages, *asked: GenerateRequest) -> dict[str, list[Any]]:
    logs = line.answer(*asked, timeout_s=60).items()
    found = {
        name: [encode(structs.replace(event, num_cached_tokens=0)) for event in parse_log(log)] for name, log in logs
    }
    line.forget_logs()
    return found


@pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.more)])
def test_who_is_preempted_in_the_stages_loses_nothing(
    redis_url: str, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do the other choices of a prompt begin before its logprobs are there. One process
    computes all stages here: the loop does not know.
    """
    one = structs.replace(
        ask("pair.0", "A river and a mountain of trees", max_tokens=3, seed=5, prompt_logprobs=1),
        scheduling=SchedulingParams(group_id="scored"),
    )
    choices = [
        structs.replace(one, request_id=f"scored.{number}", params=structs.replace(one.params, seed=6 + number))
        for number in range(3)
    ]
    line = LineOfStages(redis_url)
    with line.running():
        expected = answers(line, *REQUESTS), answers(line, *choices)
        line.compute.base_policy = replace(line.compute.base_policy, num_stages=num_stages)
        assert answers(line, *choices) == expected[1]
        crowd(line, monkeypatch, share=0.4, seed=11)
        assert answers(line, *REQUESTS) == expected[0]


@pytest.mark.more
def test_an_error_in_a_gather_ends_the_group(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room to copy")

    with (
        pytest.raises(AssertionError, match="wait"),
        grouped_line(
            redis_url, tensor_parallel_size=2, master=f"127.0.0.1:{free_port()}", rank=0, speculate="off"
        ) as line,
    ):
        monkeypatch.setattr(DistributedRanks, "_exchange", fail)
        line.answer(ask("a.0", "A river", max_tokens=2), timeout_s=30)
