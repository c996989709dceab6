"""Blocks of another size: the same answers, and one line where the kernels can't."""

import pytest

from services.compute.loop.engine import load_engine
from shared.model.files import DEMO_MODEL, open_model
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from tests.kernels.backends import native_backend
from tests.kernels.families import Engine
from tests.kernels.test_models import prompts


def test_a_block_may_hold_one_token_where_attention_is_torchs() -> None:
    folder, some = DEMO_MODEL, prompts(5, 512)
    expected = Engine(folder).generate(some, 20)
    assert [Engine(folder, block_size=size, num_blocks=256 * 16 // size).generate(some, 20) for size in (1, 7)] == [
        expected
    ] * 2


def test_the_kernels_take_multiples_of_sixteen() -> None:
    native_backend()
    settings = ComputeSettings(dtype="bfloat16", block_size=24, kv_cache_memory="64MiB", num_threads=1)
    with pytest.raises(StartupError, match="--block-size 24: the kernels take a multiple of 16 tokens"):
        load_engine(settings, open_model("demo"))
    small = ComputeSettings(dtype="float32", block_size=1, kv_cache_memory="64MiB", num_threads=1)
    assert load_engine(small, open_model("demo")).scheduler.block_manager.block_size == 1
