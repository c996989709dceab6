"""A model whose layers keep states of its sequences, behind the real pipeline."""

from pathlib import Path

from tests.models.cases import CASES
from tests.models.served import serve


def test_a_recurrent_model_goes_on_after_a_crash_with_the_tokens_of_the_library(
    tmp_path: Path, redis_binary: Path | None
) -> None:
    _, blueprint = CASES["qwen3_5"]
    assert all(serve("qwen3_5", blueprint, tmp_path, redis_binary))
