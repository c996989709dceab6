"""Triton's kernels run in its interpreter here, on the CPU. It has to be said before the first of them is loaded."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here they run one after the other, also those that find nothing to do."""
    from services.compute.backends.cuda import attention

    monkeypatch.setattr(attention, "SPLITS", 2)
