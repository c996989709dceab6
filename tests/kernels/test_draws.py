"""Native code decides what shared/model/decision.py does, to the last bit of the noise, on every instruction set."""

import dataclasses

import numpy as np
import torch

from services.compute.backends.choose import choose_backend
from services.compute.backends.cpu.row_math import NativeRowSearch
from shared.model.decision import Draws, decide
from tests.close_draws import close_draws


def native(instruction_set: str) -> NativeRowSearch:
    search = choose_backend(torch.bfloat16, torch.device("cpu")).row_search
    assert isinstance(search, NativeRowSearch) and search.context.instruction_set == instruction_set
    return search


def test_native_draws_are_those_of_numpy(instruction_set: str) -> None:
    """Lists of all lengths, with and without tails; peaked and flat ones; at the least and the highest temperature."""
    rng = np.random.default_rng(1)
    num_rows, width = 4_000, 80
    num_kept = rng.integers(1, width + 1, num_rows).astype(np.int32)
    logits = -np.sort(
        -rng.normal(size=(num_rows, width)).astype(np.float32)
        * rng.choice([0.01, 1.0, 30.0], num_rows)[:, None].astype(np.float32),
        axis=1,
    )
    logits[np.arange(width) >= num_kept[:, None]] = -np.inf
    some = Draws(
        logits,
        rng.integers(0, 1 << 31, (num_rows, width)).astype(np.int32),
        num_kept,
        np.where(rng.random(num_rows) < 0.5, rng.uniform(0, 9, num_rows), 0.0),
        rng.choice([1e-3, 0.7, 1.0, 100.0], num_rows),
        rng.integers(0, 1 << 64, num_rows, dtype=np.uint64),
        rng.integers(1, 1 << 31, num_rows).astype(np.int32),
    )
    columns = native(instruction_set).decide(some)
    assert columns.tolist() == decide(some).tolist()
    assert (columns == num_kept).any() and (columns > 20).any() and (columns == 0).any()


def test_native_draws_that_the_last_bits_decide(instruction_set: str) -> None:
    close = close_draws(50_000)
    columns = native(instruction_set).decide(close)
    assert columns.tolist() == decide(close).tolist()
    other = decide(
        dataclasses.replace(
            close, temperatures=np.nextafter(close.temperatures, 0.0), tail_mass=np.nextafter(close.tail_mass, 0.0)
        )
    )
    assert (columns != other).mean() > 0.05, "one unit in the last place would not have been noticed"
