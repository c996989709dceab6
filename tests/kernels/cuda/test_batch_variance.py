"""--allow-batch-variance: the vendor's products give what the kernels give, only where they are
asked for, and the fingerprint says so.
"""

import pytest
import torch

from bench.gpu.kernels import LinearCase, check_linear
from services.compute.backends.choose import choose_backend
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.linear import FEW_ROWS, CudaLinear
from services.compute.backends.matrix import Dense
from services.compute.weights.fingerprint import BATCH_VARIANT, fingerprint
from shared.model.files import open_model
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from tests.kernels.backends import CPU

BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize("form", ["none", "w8a8", "fp8"])
def test_the_vendors_products_are_what_the_definition_says(form: str) -> None:
    backend = CudaBackend(BFLOAT16, CPU)
    for case in (
        LinearCase(17, 48, 32, has_bias=True, has_residual=True),
        LinearCase(18, 64, 48, activation="silu", has_bias=True),
    ):
        check = check_linear(backend, form, case, is_vendors=True)
        assert check.holds and check.is_same_alone is None, check


@pytest.mark.parametrize("quantization", ["none", "w8a8", "fp8", "w4"])
def test_they_are_used_for_many_rows_and_only_where_it_is_allowed(
    quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = Dense(torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).bfloat16())
    strict, variant = (
        CudaBackend(BFLOAT16, CPU, allow_batch_variance=allowed).make_linear(weight, quantization=quantization)
        for allowed in (False, True)
    )
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(CudaLinear, "prepare", lambda _self, x, *_: x)
    monkeypatch.setattr(CudaLinear, "multiply", lambda _self, x, *_: calls.append(("ours", len(x))))
    monkeypatch.setattr(CudaLinear, "multiply_by_vendor", lambda _self, x, *_: calls.append(("vendor's", len(x))))
    many = FEW_ROWS + 1
    for layer in (strict, variant):
        for rows in (1, FEW_ROWS, many):
            layer(torch.ones(rows, 32).bfloat16())
        layer.logits(torch.ones(many, 32).bfloat16())
    expected = "ours" if quantization == "w4" else "vendor's"  # of groups there is no product but ours
    assert calls == [
        ("ours", 1),
        ("ours", FEW_ROWS),
        ("ours", many),
        ("ours", many),
        ("ours", 1),
        ("ours", FEW_ROWS),
        (expected, many),
        ("ours", many),
    ]


def test_sizes_that_the_vendor_does_not_take_are_ours() -> None:
    backend = CudaBackend(BFLOAT16, CPU, allow_batch_variance=True)
    for quantization, k in (("w8a8", 36), ("fp8", 40)):
        assert backend.make_linear(Dense(torch.ones(48, k).bfloat16()), quantization=quantization).vendor_from is None


def test_on_a_cpu_there_is_nothing_to_allow() -> None:
    with pytest.raises(
        StartupError,
        match=(
            "^--allow-batch-variance: only a GPU has other products than those whose bits are the same in any batch, "
            "not cpu$"
        ),
    ):
        choose_backend(BFLOAT16, CPU, allow_batch_variance=True)


def test_the_fingerprint_says_that_bits_are_not_promised() -> None:
    settings, files = ComputeSettings(model="demo"), open_model("demo")
    backend = CudaBackend(BFLOAT16, CPU)
    strict, variant = (
        fingerprint(each, files, backend).name
        for each in (settings, settings.model_copy(update={"allow_batch_variance": True}))
    )
    assert variant == strict + BATCH_VARIANT and not strict.endswith(BATCH_VARIANT)
