"""Models that draft, in the pipeline: the logs are byte for byte those without drafts, and what was
drafted stands about as often as the models agree.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from services.compute.execution.model_runner import ModelRunner
from services.compute.models.decoder import Decoder
from services.compute.ranks.place import ALONE
from services.compute.speculation.chains import ChainProposer
from services.compute.speculation.draft_kv import TargetKV
from services.compute.speculation.draft_models import (
    DraftModel,
    load_draft_models,
    make_chain_proposer,
    make_draft_runner,
)
from shared.process.settings import ComputeSettings
from shared.wire.messages import GenerateRequest, encode
from shared.wire.token_log import parse_log
from tests.conftest import running_redis
from tests.stages.line_of_stages import FILES, LineOfStages, crowd, hurried
from tests.stages.test_speculation import REQUESTS, speculate

SETTINGS = ComputeSettings(speculate="self,draft", draft_model="demo", max_batched_tokens=64)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[LineOfStages]:
    with running_redis(tmp_path_factory.mktemp("drafts"), redis_binary) as url, hurried():
        line = LineOfStages(url)
        with line.running():
            yield line


def answers(line: LineOfStages, *asked: GenerateRequest) -> dict[str, list[Any]]:
    """The logs' events; how much of its prompt a choice found computed depends on when the one before it came."""
    return {
        name: [encode(structs.replace(event, num_cached_tokens=0)) for event in parse_log(log)]
        for name, log in line.answer(*asked, timeout_s=300).items()
    }


@pytest.fixture(scope="module")
def expected(line: LineOfStages) -> dict[str, Any]:
    """The logs without drafts."""
    speculate(line)
    return answers(line, *REQUESTS)


@pytest.fixture(scope="module")
def models(line: LineOfStages) -> dict[str, DraftModel]:
    """The demo in four bits, and the demo as it is, with a cache of its own."""
    return {
        each.name: each
        for each in load_draft_models(("self", "draft"), SETTINGS, FILES, line.compute.executor.model, None)
    }


def proposer_of(line: LineOfStages, model: DraftModel) -> ChainProposer:
    executor = line.compute.executor
    return make_chain_proposer(model, executor, 64, 1024, make_draft_runner(model, 1, executor, SETTINGS, ALONE))


@pytest.mark.parametrize("is_crowded", [False, True])
@pytest.mark.parametrize("name", ["self", "draft"])
def test_logs_are_the_same(
    line: LineOfStages,
    expected: dict[str, Any],
    models: dict[str, DraftModel],
    name: str,
    is_crowded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_crowded:
        crowd(line, monkeypatch)
    proposer = proposer_of(line, models[name])
    speculation = speculate(line, proposer)
    assert answers(line, *REQUESTS) == expected
    total = speculation.total
    assert total.num_accepted_tokens > 30
    assert not proposer._levels, "who has ended is forgotten"


def test_a_draft_model_that_is_the_target_is_right(
    line: LineOfStages, expected: dict[str, Any], models: dict[str, DraftModel]
) -> None:
    """Its cache holds what the target's holds, so it draws the same: greedy or not, with penalties and
    llama.cpp's samplers, and in batches. Where a grammar or a stop string decides, it can't know."""
    speculation = speculate(line, proposer_of(line, models["draft"]))
    asked = [each for each in REQUESTS if each.constraint is None and not each.params.stop]
    assert answers(line, *asked) == {each.request_id: expected[each.request_id] for each in asked}
    assert speculation.total.num_accepted_tokens == speculation.total.num_draft_tokens > 50


def test_what_is_written_into_the_targets_cache_is_written_again(
    line: LineOfStages, expected: dict[str, Any], models: dict[str, DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that drafts nonsense leaves the keys and values of nonsense in every slot that it may."""
    drafting = models["self"].model
    weights = replace(drafting.weights, embedding=drafting.weights.embedding.flip(0).contiguous())
    runner = ModelRunner(Decoder(drafting.config, weights, drafting.backend), line.compute.executor.kv_cache)
    proposer = ChainProposer(
        "self", runner, TargetKV(), max_batched_tokens=64, max_model_len=1024, vocab_size=runner.vocab_size
    )
    monkeypatch.setattr(proposer.margins, "chance", lambda _: 1.0)
    speculation = speculate(line, proposer)
    assert answers(line, *REQUESTS) == expected
    assert speculation.total.num_draft_tokens > 300 > 10 * speculation.total.num_accepted_tokens
