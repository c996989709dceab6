"""FP8 on the CUDA backend, in the interpreter: codes and products against the definition,
checkpoints that keep their form, and devices without it.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.gpu.kernels import LinearCase, check_linear
from bench.gpu.models import check_model
from services.compute.backends.backend import Backend
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.linear import CudaLinear, WeightForm
from services.compute.backends.cuda.row_math import quantize
from services.compute.backends.matrix import Dense, Float8, Matrix, concatenate
from services.compute.backends.torch import reference
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.torch.reference import quantize_float8, quantize_weight
from services.compute.loop.engine import build_engine
from services.compute.models.architectures import read_config
from services.compute.models.decoder import ModelWeights
from services.compute.weights.loader import load_weights
from shared.model.files import open_model
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from tests.kernels.backends import CPU, FLOAT32
from tests.kernels.cuda.test_cuda_models import CONFIG
from tests.kernels.families import reference_model
from tests.kernels.quantized import float8, layers_only, write_checkpoint

BFLOAT16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn


def randn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def no_float8() -> CudaBackend:
    backend = CudaBackend(BFLOAT16, CPU)
    backend.capability = (8, 0)
    return backend


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of infinity times 0
@pytest.mark.parametrize("group", [32, 150])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_codes_are_exactly_the_definitions(dtype: torch.dtype, group: int) -> None:
    """Rows of any size, values that e4m3 has in steps and ties between them, and rows that are no numbers."""
    x = randn(8, 150) * torch.logspace(-30, 9, 8)[:, None]
    x[3] = torch.arange(150) / 1024 - 0.05  # steps of 2^-10: every tie below 2^-6, where e4m3's own steps are 2^-9
    x[3, 0] = 448.0
    x[4], x[5, 7], x[6, 7] = 0.0, torch.nan, torch.inf
    found, (codes, scales) = quantize(x.to(dtype), group, E4M3), quantize_float8(x.to(dtype), group)
    assert torch.equal(found.codes.float().nan_to_num(1e9), codes.float().nan_to_num(1e9))
    assert torch.equal(found.scales.nan_to_num(1e9), scales.nan_to_num(1e9)) and found.sums is None


@pytest.mark.parametrize("form", ["fp8", "fp8 blocks"])
def test_many_rows_with_all_that_the_epilogue_adds(form: str) -> None:
    check = check_linear(
        CudaBackend(BFLOAT16, CPU), form, LinearCase(66, 24, 40, activation="silu", has_bias=True, has_residual=True)
    )
    assert check.holds, check


def test_each_block_has_its_scale_and_its_sum_is_added_in_float32() -> None:
    """Scales that differ by 2^20, the small ones last: all of them count."""
    matrix = Float8(torch.ones(16, 384).to(E4M3), torch.tensor([[1.0, 2.0**-20, 2.0**-20]]), 128, 16)
    layer = CudaLinear(matrix, None, torch.float32, is_gated=False, activation="silu", is_hopper=True)
    assert torch.equal(layer(torch.full((2, 384), 448.0)), torch.full((2, 16), 448 * (128 + 256 * 2.0**-20)))


@pytest.mark.more
def test_tokens_are_those_of_torch_in_float32(tmp_path: Path) -> None:
    reference_model("llama", tmp_path, config=CONFIG)
    check = check_model(
        tmp_path, CudaBackend(torch.float32, CPU), quantization="fp8", lengths=(9,), num_tokens=2, reference=FLOAT32
    )
    assert check.are_tokens_equal and check.are_bits_equal and check.error is not None and check.error < 1e-5


def loaded(folder: Path, shape: str, backend: Backend) -> ModelWeights:
    write_checkpoint(
        folder, layers_only(float8(shape, block=(32, 64))), {"quant_method": "fp8", "weight_block_size": [32, 64]}
    )
    return load_weights(folder, read_config(json.loads((folder / "config.json").read_text())), backend)


@pytest.mark.parametrize(
    ("shape", "form"), [("one", WeightForm.FLOAT8), ("channel", WeightForm.FLOAT8), ("block", WeightForm.FLOAT8_BLOCKS)]
)
def test_a_checkpoint_keeps_its_form(
    shape: str, form: WeightForm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = loaded(tmp_path, shape, CudaBackend(BFLOAT16, CPU))
    layer = weights.layers[0].qkv
    assert isinstance(layer, CudaLinear) and layer.form == form and layer.weight.dtype == E4M3
    assert "widened" not in caplog.text


def test_without_fp8_a_checkpoint_is_widened_and_quantizing_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = loaded(tmp_path, "channel", no_float8()).layers[0].qkv
    assert isinstance(layer, CudaLinear) and layer.form == WeightForm.DENSE
    assert "layers are widened to bfloat16" in caplog.text and "FP8 by column" in caplog.text
    with pytest.raises(
        StartupError,
        match=(
            r"^--quantization fp8 needs a GPU of compute capability 8.9 \(Ada\) or newer, this one has 8.0: w8a8 "
            r"takes as much"
        ),
    ):
        no_float8().make_linear(Dense(torch.eye(32)), quantization="fp8")
    with pytest.raises(
        StartupError, match=r"^--quantization fp8 runs on a GPU only \(--device cuda\); a CPU takes w8a8, w4 and nf4$"
    ):
        build_engine(ComputeSettings(model="demo", device="cpu", quantization="fp8"), open_model("demo"))


def test_what_no_kernel_reads_is_widened() -> None:
    """e5m2; groups of 48; and anything in float32."""
    codes = randn(8, 96)
    matrices: list[Matrix] = [
        Float8(codes.to(torch.float8_e5m2), torch.ones(8, 1), 96),
        Float8(codes.to(E4M3), torch.ones(8, 2), 48),
    ]
    assert not any(CudaBackend(BFLOAT16, CPU).is_kept(matrix) for matrix in matrices)
    kept = Float8(codes.to(E4M3), torch.ones(8, 1), 96)
    assert (
        CudaBackend(BFLOAT16, CPU).is_kept(kept)
        and not CudaBackend(torch.float32, CPU).is_kept(kept)
        and not no_float8().is_kept(kept)
    )


def test_joined_matrices_mean_what_they_meant() -> None:
    """Blocks that end with their matrix, blocks that would reach into the next one, and other groups."""
    one, other = (
        Float8(randn(64, 96).to(E4M3), randn(2, 3).abs(), 32, 32),
        Float8(randn(40, 96, seed=2).to(E4M3), randn(2, 3, seed=3).abs(), 32, 32),
    )
    for parts, height in (([one, other], 32), ([other, one], 1), ([one, Float8(other.codes, randn(40, 1), 96)], None)):
        joined = concatenate(parts, torch.float64)
        assert torch.equal(
            joined.dequantize(torch.float64), torch.cat([each.dequantize(torch.float64) for each in parts])
        )
        assert (joined.height if isinstance(joined, Float8) else None) == height


def test_a_nan_of_a_row_is_all_that_comes_of_it() -> None:
    backend = CudaBackend(BFLOAT16, CPU)
    x = torch.ones(3, 64).bfloat16()
    x[1, 40] = torch.nan
    found = backend.make_linear(Dense(randn(32, 64).bfloat16()), quantization="fp8")(x)
    assert found[1].isnan().all() and torch.isfinite(found[[0, 2]].float()).all()


def test_torch_computes_the_definition_on_a_cpu() -> None:
    """Within what rounding to e4m3 costs: half a step of 2^-3 in activations and weights, some 2.6%
    root mean square each.
    """
    weight, x = randn(64, 256), randn(9, 256, seed=2)
    exact = x.double() @ weight.double().T
    found = TorchBackend(torch.float32, CPU).make_linear(Dense(weight), quantization="fp8")(x)
    assert 0.02 < float((found - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("quantization", ["w8a8", "w4", "nf4", "fp8"])
def test_weights_are_quantized_some_rows_at_a_time(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 a large layer would take several times its own memory."""
    weight = randn(50, 96).bfloat16()
    whole = quantize_weight(weight, quantization, 32)
    sizes: list[int] = []

    def noting(quantize: Callable[..., object]) -> Callable[..., object]:
        return lambda part, *more: sizes.append(part.numel()) or quantize(part, *more)  # type: ignore[func-returns-value]

    for name in ("quantize_rows", "quantize_int4", "quantize_nf4", "quantize_float8"):
        monkeypatch.setattr(reference, name, noting(getattr(reference, name)))
    monkeypatch.setattr(reference, "SLICE", 7 * 96 + 5)
    in_parts = quantize_weight(weight, quantization, 32)
    assert len(sizes) >= 8 and max(sizes) == 7 * 96
    assert type(in_parts) is type(whole) and torch.equal(
        in_parts.dequantize(torch.float64), whole.dequantize(torch.float64)
    )
