"""Degenerate numbers of rope in a config.json: one line at the start, and no model that writes nonsense."""

from typing import Any

import pytest

from services.compute.models.rope import read_rope
from shared.process.errors import StartupError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "8", True])
@pytest.mark.parametrize(
    ("rope", "name"),
    [
        (YARN, "factor"),
        (LLAMA3, "factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_type": "dynamic"}, "alpha"),
    ],
)
def test_a_number_of_rope_that_is_not_positive_is_refused(rope: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(StartupError, match=f"the config's {name} of rope must be a positive number"):
        read_rope({"rope_scaling": rope | {name: value}, "max_position_embeddings": 8192}, 64, 4096)
    with pytest.raises(StartupError, match="rope_theta"):
        read_rope({"rope_theta": value}, 64, 4096)


@pytest.mark.parametrize(
    "rope", [YARN, LLAMA3, {"rope_type": "linear", "factor": 2}, {"rope_type": "default", "factor": None}]
)
def test_numbers_of_real_models_are_taken(rope: dict[str, Any]) -> None:
    found = read_rope({"rope_scaling": rope, "rope_theta": 500000, "max_position_embeddings": 16384}, 64, 4096)
    assert bool((found.inv_freq > 0).all())
