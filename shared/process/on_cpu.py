"""Settings that need a GPU."""

from shared.process.settings import EngineSettings


def refused_on_cpu(settings: EngineSettings) -> str:
    """Why a model with these settings can't run on a CPU; empty: it can."""
    if settings.quantization == "fp8":
        return "--quantization fp8 runs on a GPU only (--device cuda); a CPU takes w8a8, w4 and nf4"
    if settings.tensor_parallel_size > 1 and settings.dtype == "float32":
        return (
            f"--tensor-parallel-size {settings.tensor_parallel_size}: not with --dtype float32 on a CPU, where torch "
            "computes it: "
            "the bits of its products depend on how many columns are computed"
        )
    return ""
