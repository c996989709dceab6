"""A mixture's experts in few launches: beside expert by expert, and how long they take."""

from collections.abc import Iterator

import torch

from bench.gpu.check import Check, name_of, randn
from bench.gpu.kernels import make_matrix, moved
from bench.gpu.speed import KernelTime, median_us, random_linear
from services.compute.backends.backend import RouterConfig
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.models.moe import Expert, run_experts

# Qwen3-30B-A3B's
EXPERTS, ACTIVE, HIDDEN, INTER = 128, 8, 2048, 768


def check_experts(backend: CudaBackend, form: str, num_rows: int, num_experts: int) -> Check:
    """One expert is every row's, so that some get many rows and some none. The error is the share of
    numbers that are not exactly those of expert by expert; also by two ranges."""
    n, k, device = 96, 160, backend.device

    def make(seed: int, *shape: int, is_gated: bool = False) -> object:
        return backend.make_linear(
            moved(make_matrix(randn(*shape, seed=seed, scale=0.1).to(backend.dtype), form, 32), device),
            is_gated=is_gated,
        )

    experts = [Expert(make(2 * seed, 2 * n, k, is_gated=True), make(2 * seed + 1, k, n)) for seed in range(num_experts)]  # type: ignore[arg-type]
    x, logits = (
        randn(num_rows, k, seed=98).to(backend.dtype).to(device),
        randn(num_rows, num_experts, seed=99).to(device),
    )
    logits[:, 0] += 4.0
    chosen, _ = backend.row_math.choose_experts(logits, RouterConfig(3, has_normalized_weights=True))
    is_chosen = torch.equal(chosen.cpu(), logits.cpu().sort(dim=-1, descending=True, stable=True).indices[:, :3])
    expected, pairs, half = (
        run_experts(experts, x, chosen),
        [(each.gate_up, each.down) for each in experts],
        num_experts // 2,
    )
    alone = torch.empty_like(expected)
    for first, last in ((0, half), (half, num_experts)):
        grouped = backend.group_experts(pairs[first:last], num_experts, first)
        assert grouped is not None
        is_held = (chosen >= first) & (chosen < last)
        alone[is_held] = grouped.run(x, chosen)[is_held]
    whole = backend.group_experts(pairs, num_experts)
    assert whole is not None
    found = whole.run(x, chosen)
    error = float((found != expected).double().mean()) if is_chosen else 1.0
    return Check(
        f"experts, {form}",
        name_of(backend.dtype),
        f"{num_rows} rows, {num_experts} experts",
        error,
        0.0,
        torch.equal(found, alone),
    )


def measure_experts(backend: CudaBackend, mode: str, rows: list[int]) -> Iterator[KernelTime]:
    """The experts of a layer, chosen at random, by all at once and expert by expert."""
    pairs = [
        (
            random_linear(backend, 2 * INTER, HIDDEN, mode, is_gated=True),
            random_linear(backend, HIDDEN, INTER, mode, is_gated=False),
        )
        for _ in range(EXPERTS)
    ]
    experts = [Expert(*each) for each in pairs]
    grouped = backend.group_experts(pairs, EXPERTS)
    assert grouped is not None
    bytes_each = sum(each.num_bytes for each in pairs[0])
    for count in rows:
        x = torch.randn(count, HIDDEN, device=backend.device).to(backend.dtype)
        chosen, _ = backend.row_math.choose_experts(
            torch.randn(count, EXPERTS, device=backend.device), RouterConfig(ACTIVE, has_normalized_weights=True)
        )
        moved_bytes = len(set(chosen.flatten().tolist())) * bytes_each + (1 + ACTIVE) * x.nbytes
        operations = 2.0 * count * ACTIVE * 3 * HIDDEN * INTER
        for name, run in (
            ("all at once", lambda x, chosen: grouped.run(x, chosen)),
            ("one by one", lambda x, chosen: run_experts(experts, x, chosen)),
        ):
            taken = median_us(lambda x=x, chosen=chosen, run=run: run(x, chosen))  # type: ignore[misc]
            yield KernelTime(
                f"experts, {mode}, {name}", "qwen3-30b-a3b", f"{count} rows", taken, moved_bytes, operations
            )
