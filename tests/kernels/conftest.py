"""Every instruction set of this machine, in turn. Without the native library the tests fail rather
than skip: a build that broke must not look like a pass.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from services.compute.backends.backend import RowSearch
from services.compute.backends.choose import choose_backend
from services.compute.backends.cpu.build import INSTRUCTION_SETS
from services.compute.backends.cpu.library import VARIABLE, open_context
from services.compute.backends.torch.backend import TorchBackend
from shared.process.errors import StartupError

WITHOUT_KERNELS = "PENSTOCK_TEST_WITHOUT_KERNELS"  # 1: this machine can't build them, and that is known


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    """An engine takes all cores, for the whole process: every later test would, beside those of the other processes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=list(INSTRUCTION_SETS))
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Native code runs on this set during the test, wherever a backend is chosen."""
    if open_context() is None:
        if os.environ.get(WITHOUT_KERNELS) != "1":
            pytest.fail(
                "the native kernels are not built: install g++ and run penstock build-kernels, or set "
                f"{WITHOUT_KERNELS}=1"
            )
        pytest.skip("the native kernels are not built")
    monkeypatch.setenv(VARIABLE, request.param)
    try:
        open_context()
    except StartupError:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param


@pytest.fixture(params=["native", "torch"])
def search(request: pytest.FixtureRequest) -> RowSearch:
    """Through rows of logits: in native code where it is built, and without."""
    cpu = torch.device("cpu")
    return (
        choose_backend(torch.bfloat16, cpu).row_search
        if request.param == "native"
        else TorchBackend(torch.float32, cpu).row_search
    )
