"""Every instruction set of this machine, in turn."""

from collections.abc import Iterator

import pytest

from services.compute.backends.cpu.library import load_library


@pytest.fixture(params=["amx", "avx512", "avx2"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """What native code runs on during the test."""
    library = load_library()
    if library is None:
        pytest.skip("the native kernels are not built")
    if library.penstock_choose(request.param.encode()) is None:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    library.penstock_choose(b"auto")
