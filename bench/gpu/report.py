"""What was found as one page of Markdown."""

from collections import defaultdict
from typing import Any

from bench.gpu.kernels import Check
from bench.gpu.models import FlightCheck, ModelCheck
from bench.gpu.speed import Ceilings, KernelTime, StepTime


def errors_by_type(checks: list[Check]) -> list[str]:
    """A line for each kernel and type: the largest error of its cases, and how many of them hold."""
    groups: dict[tuple[str, str], list[Check]] = defaultdict(list)
    for check in checks:
        groups[check.kernel, check.types].append(check)
    lines = ["| kernel | types | cases | largest error | bound | bits alone |", "|---|---|---|---|---|---|"]
    for (kernel, types), found in groups.items():
        worst, bound = max(check.error for check in found), max(check.bound for check in found)
        same = "not promised" if found[0].is_same_alone is None else "equal" if all(check.is_same_alone for check in found) else "DIFFER"
        verdict = "" if all(check.error <= check.bound for check in found) else " TOO LARGE"
        lines.append(f"| {kernel} | {types} | {len(found)} | {worst:.1e}{verdict} | {bound:.0e} | {same} |")
    return lines


def model_lines(checks: list[ModelCheck]) -> list[str]:
    lines = ["| model | tokens as torch's | logits' error | bits alone, in company, in chunks |", "|---|---|---|---|"]
    for check in checks:
        tokens = {None: "", True: "equal", False: "DIFFER"}[check.are_tokens_equal]
        error = "" if check.error is None else f"{check.error:.1e}"
        lines.append(f"| {check.mode} | {tokens} | {error} | {'equal' if check.are_bits_equal else 'DIFFER'} |")
    return lines


def speed_lines(
    ceilings: Ceilings, kernels: list[KernelTime], steps: list[StepTime], served: dict[str, dict[str, float]], pipeline: dict[str, dict[str, float]]
) -> list[str]:
    """served: a trace's figures by shape; pipeline: bench.pipeline's by streams."""
    lines = [
        f"Ceilings: {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s copied, {ceilings.bf16_flop_per_s / 1e12:.0f} TFLOP/s in bf16, "
        f"{ceilings.int8_op_per_s / 1e12:.0f} TOP/s in int8"
        + ("." if ceilings.fp8_flop_per_s is None else f", {ceilings.fp8_flop_per_s / 1e12:.0f} TFLOP/s in FP8."),
        "",
        "| step | batch | tokens | device, ms | floor, ms | floor / device | wall, ms, read before the next is launched | host's share | wall, ms, after it "
        "(TPOT) | host's share |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for step in steps:
        lines.append(
            f"| {step.shape}, {step.mode} | {step.batch} | {step.num_tokens} | {step.device_ms:.2f} | {step.floor_ms:.2f} "
            f"| {step.floor_ms / step.device_ms:.0%} | {step.wall_ms:.2f} | {step.host_share(step.wall_ms):.1%} "
            + ("| | |" if step.ahead_ms is None else f"| {step.ahead_ms:.2f} | {step.host_share(step.ahead_ms):.1%} |")
        )
    lines += ["", "| kernel | shape | case | us | GB/s | of the bandwidth | TFLOP/s |", "|---|---|---|---|---|---|---|"]
    for each in kernels:
        lines.append(
            f"| {each.kernel} | {each.shape} | {each.case} | {each.microseconds:.1f} | {each.gigabytes_per_s:,.0f} | {each.share_of_bandwidth(ceilings):.0%} "
            f"| {each.teraflop_per_s:.1f} |"
        )
    for name, summary in served.items():
        lines += ["", f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in summary.items())]
    if pipeline:
        lines += ["", "| over HTTP | tokens/s | of the loop's | TTFT, ms | a step, ms | of the loop |", "|---|---|---|---|---|---|"]
    for name, each in pipeline.items():
        lines.append(
            f"| {name} | {each['served_tokens_per_s']:,.0f} | {each['ratio']:.1%} | {each['ttft_ms']:.0f} | {each['step_ms']:.2f} "
            f"| {each['loop_step_ms']:.2f} |"
        )
    return lines


def flight_lines(checks: list[FlightCheck]) -> list[str]:
    lines = ["| a step in flight | tokens as without | tokens | rows computed for nothing |", "|---|---|---|---|"]
    lines += [f"| {each.mode} | {'equal' if each.are_tokens_equal else 'DIFFER'} | {each.num_tokens} | {each.num_surplus} |" for each in checks]
    return lines


def page(device: str, checks: list[Check], models: list[ModelCheck], flights: list[FlightCheck], speed: list[str]) -> str:
    parts = [[f"# {device}"], ["## Kernels against their definition", "", *errors_by_type(checks)]]
    parts.append(["## Whole models", "", *model_lines(models), "", *flight_lines(flights)])
    if speed:
        parts.append(["## Speed", "", *speed])
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def found_in_all(checks: list[Check], models: list[ModelCheck], flights: list[FlightCheck]) -> dict[str, Any]:
    """For the JSON."""
    return {
        "kernels": [{"kernel": each.kernel, "types": each.types, "case": each.case, "error": each.error, "holds": each.holds} for each in checks],
        "models": [{"mode": each.mode, "error": each.error, "holds": each.holds} for each in models],
        "flights": [{"mode": each.mode, "tokens": each.num_tokens, "surplus": each.num_surplus, "holds": each.holds} for each in flights],
    }
