"""How many examples a property test draws: all of them under `make verify SUITE=explore`, a quarter in `make test`."""

from typing import Any

from hypothesis import settings

DEFAULT = 100  # hypothesis' own, which the profile "explore" has; conftest.py gives "fixed" a quarter


def examples(number: int, **others: Any) -> settings:
    """settings for a property that needs another number of examples than DEFAULT; `others` are passed on."""
    return settings(max_examples=max(1, number * settings().max_examples // DEFAULT), **others)
