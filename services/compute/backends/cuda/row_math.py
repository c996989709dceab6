"""Rows between the products: what launches kernels/rows.py."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from services.compute.backends.backend import RouterConfig
from services.compute.backends.cuda.kernels import experts as expert_kernels
from services.compute.backends.cuda.kernels import rows as kernels

FINISHED_AT_ONCE = 1024  # logits of a program
ADDED_AT_ONCE = 1024  # columns of a program


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows in int8 or e4m3, with a scale for each group of inputs."""

    codes: Tensor  # [T, k] int8 or float8_e4m3fn
    scales: Tensor  # [T, groups] float32
    sums: Tensor | None  # [T, groups] int32: of the codes in int8


def prepare(
    h: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    x: Tensor | None = None,
    multiplier: float = 1.0,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """scale * (x + multiplier * norm(h)). h, x: [T, k], h perhaps columns of a wider tensor; out: of h's
    strides, a new tensor by default, or h itself."""
    out = torch.empty_like(h, memory_format=torch.contiguous_format) if out is None else out
    assert h.stride() == out.stride() and h.stride(1) == 1
    k = h.shape[1]
    block = triton.next_power_of_2(k)
    kernels.prepare_rows[(len(h),)](
        h,
        x,
        norm,
        out,
        None,
        None,
        None,
        h.stride(0),
        k,
        eps,
        multiplier,
        scale,
        0,
        GROUP=0,
        BLOCK=block,
        num_warps=warps_of(block),
        enable_fp_fusion=True,
    )
    return out


def quantize(
    h: Tensor, group: int, dtype: torch.dtype, *, norm: Tensor | None = None, eps: float = 0.0
) -> QuantizedRows:
    """norm(h) in dtype, int8 or float8_e4m3fn: by groups of so many inputs, a power of two, or as
    many as a row has."""
    num_rows, k = h.shape
    num_groups, block = -(-k // group), triton.next_power_of_2(k)
    codes = torch.empty((num_rows, k), dtype=dtype, device=h.device)
    scales = torch.empty((num_rows, num_groups), dtype=torch.float32, device=h.device)
    sums = torch.empty((num_rows, num_groups), dtype=torch.int32, device=h.device) if dtype == torch.int8 else None
    block = max(block, group) if num_groups > 1 else block
    kernels.prepare_rows[(num_rows,)](
        h,
        None,
        norm,
        None,
        codes,
        scales,
        sums,
        h.stride(0),
        k,
        eps,
        1.0,
        1.0,
        num_groups,
        GROUP=group if num_groups > 1 else block,
        BLOCK=block,
        num_warps=warps_of(block),
        enable_fp_fusion=True,
    )
    return QuantizedRows(codes, scales, sums)


def warps_of(block: int) -> int:
    """Warps of a program that holds a row of so many numbers: some 32 a thread."""
    return min(max(block // 1024, 1), 16)


class CudaRowMath:
    """TorchRowMath on a GPU; a sum is rounded once."""

    def norm(self, x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
        return prepare(x, norm=weight, eps=eps)

    def add(
        self, x: Tensor, h: Tensor, *, norm: Tensor | None, eps: float, multiplier: float = 1.0, scale: float = 1.0
    ) -> Tensor:
        return prepare(h, norm=norm, eps=eps, x=x, multiplier=multiplier, scale=scale)

    def choose_experts(
        self, logits: Tensor, router: RouterConfig, correction: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        (num_rows, num_experts), num_active = logits.shape, router.num_active
        chosen = torch.empty((num_rows, num_active), dtype=torch.int64, device=logits.device)
        weights = torch.empty((num_rows, num_active), dtype=torch.float32, device=logits.device)
        block = triton.next_power_of_2(num_experts)
        if num_rows:
            expert_kernels.choose_experts[(num_rows,)](
                logits,
                correction,
                chosen,
                weights,
                num_experts,
                num_active,
                router.num_active_groups,
                router.scaling,
                HAS_SIGMOID_SCORES=router.has_sigmoid_scores,
                NUM_GROUPS=router.num_groups,
                IS_NORMALIZED=router.has_normalized_weights,
                BLOCK=block,
                GROUPS=triton.next_power_of_2(router.num_groups),
                KEPT=triton.next_power_of_2(num_active),
                num_warps=warps_of(block),
                enable_fp_fusion=False,
            )
        return chosen, weights

    def add_experts(
        self,
        x: Tensor,
        results: Tensor,
        weights: Tensor,
        *,
        shared: tuple[Tensor, Tensor | None] | None,
        has_residual: bool,
    ) -> Tensor:
        num_rows, hidden = x.shape
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if num_rows:
            expert_kernels.add_experts[(num_rows, triton.cdiv(hidden, ADDED_AT_ONCE))](
                x.contiguous(),
                results.contiguous(),
                weights.contiguous(),
                *(shared or (None, None)),
                out,
                weights.shape[1],
                hidden,
                HAS_RESIDUAL=has_residual,
                BLOCK=ADDED_AT_ONCE,
                enable_fp_fusion=False,
            )
        return out

    def finish_logits(self, logits: Tensor, *, multiplier: float, cap: float) -> Tensor:
        size = logits.numel()
        kernels.finish_logits[(triton.cdiv(size, FINISHED_AT_ONCE),)](
            logits, size, multiplier, cap, HAS_CAP=cap != 0.0, BLOCK=FINISHED_AT_ONCE, enable_fp_fusion=True
        )
        return logits
