"""Every instruction set of this machine, in turn. Without the native library the tests fail rather than skip: a build that broke must not look like a pass."""

import os
from collections.abc import Iterator

import pytest

from services.compute.backends.cpu.library import load_library

WITHOUT_KERNELS = "PENSTOCK_TEST_WITHOUT_KERNELS"  # 1: this machine can't build them, and that is known


@pytest.fixture(params=["amx", "avx512", "avx2"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """What native code runs on during the test."""
    library = load_library()
    if library is None:
        if os.environ.get(WITHOUT_KERNELS) != "1":
            pytest.fail(f"the native kernels are not built: install g++ and run penstock build-kernels, or set {WITHOUT_KERNELS}=1")
        pytest.skip("the native kernels are not built")
    if library.penstock_choose(request.param.encode()) is None:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    library.penstock_choose(b"auto")
