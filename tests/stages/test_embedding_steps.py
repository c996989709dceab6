"""Embeddings in steps of their own and beside others."""

from collections.abc import Container, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from services.compute.sequence import RowKey
from services.compute.sequence.batch import ScheduledBatch
from shared.wire.messages import EmbeddingParams
from shared.wire.token_log import parse_log
from tests.conftest import running_redis
from tests.stages.line_of_stages import LineOfStages, ask, hurried


@pytest.fixture
def line(tmp_path: Path) -> Iterator[LineOfStages]:
    with running_redis(tmp_path / "redis", None) as url, hurried():
        yield LineOfStages(url)


def reason(line: LineOfStages, request_id: str) -> str:
    return str(parse_log(line.log(request_id))[-1].finish_reason)


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_an_embedding_of_several_steps_ends(pooling: str, line: LineOfStages) -> None:
    line.compute.scheduler.max_batched_tokens = 64
    with line.running():
        line.answer(
            replace(ask("vector.0", "A river runs to the sea. " * 20, max_tokens=0), embedding=EmbeddingParams(pooling))
        )
        assert reason(line, "vector.0") == "stop"


def test_a_row_that_fails_beside_an_embedding_fails_alone(line: LineOfStages) -> None:
    real = line.compute.executor.logits

    def logits(batch: ScheduledBatch, hidden: torch.Tensor, keys: Container[RowKey] | None = None) -> torch.Tensor:
        found = real(batch, hidden, keys)
        if batch.embedded and len(found):
            with torch.inference_mode():
                found[0] = torch.nan
        return found

    line.compute.executor.logits = logits  # type: ignore[method-assign]
    with line.running():
        line.answer(
            ask("text.0", "The quick brown fox", max_tokens=24, temperature=0.0, ignore_eos=True),
            replace(ask("vector.0", "A river", max_tokens=0), embedding=EmbeddingParams("mean")),
        )
        assert (reason(line, "text.0"), reason(line, "vector.0")) == ("error", "stop")
