"""The report: one page of Markdown."""

from collections import defaultdict

from bench.gpu.check import Check
from bench.gpu.journal import Entry, Journal
from bench.gpu.models import FlightCheck, ModelCheck
from bench.gpu.recordings import RecordingCheck
from bench.gpu.speed import Ceilings, KernelTime, Served, StepTime


def errors_by_type(checks: list[Check]) -> list[str]:
    """A line for each kernel and type: the largest error of its cases, and how many of them hold."""
    groups: dict[tuple[str, str], list[Check]] = defaultdict(list)
    for check in checks:
        groups[check.kernel, check.types].append(check)
    lines = ["| kernel | types | cases | largest error | bound | bits alone |", "|---|---|---|---|---|---|"]
    for (kernel, types), found in groups.items():
        worst, bound = max(check.error for check in found), max(check.bound for check in found)
        same = (
            "not promised"
            if found[0].is_same_alone is None
            else "equal"
            if all(check.is_same_alone for check in found)
            else "DIFFER"
        )
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


def ceiling_lines(ceilings: Ceilings) -> list[str]:
    return [
        f"Ceilings: {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s copied, {ceilings.bf16_flop_per_s / 1e12:.0f} TFLOP/s "
        "in bf16, "
        f"{ceilings.int8_op_per_s / 1e12:.0f} TOP/s in int8"
        + ("." if ceilings.fp8_flop_per_s is None else f", {ceilings.fp8_flop_per_s / 1e12:.0f} TFLOP/s in FP8.")
    ]


def step_lines(steps: list[StepTime]) -> list[str]:
    lines = [
        "| step | batch | tokens | device, ms | floor, ms | floor / device | wall, ms, read before the next is "
        "launched | host's share | wall, ms, after it "
        "(TPOT) | host's share |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for step in steps:
        lines.append(
            f"| {step.shape}, {step.mode} | {step.batch} | {step.num_tokens} | {step.device_ms:.2f} | "
            f"{step.floor_ms:.2f} "
            f"| {step.floor_ms / step.device_ms:.0%} | {step.wall_ms:.2f} | {step.host_share(step.wall_ms):.1%} "
            + ("| | |" if step.ahead_ms is None else f"| {step.ahead_ms:.2f} | {step.host_share(step.ahead_ms):.1%} |")
        )
    return lines


def time_lines(kernels: list[KernelTime], ceilings: Ceilings | None) -> list[str]:
    lines = ["| kernel | shape | case | us | GB/s | of the bandwidth | TFLOP/s |", "|---|---|---|---|---|---|---|"]
    for each in kernels:
        share = "" if ceilings is None else f"{each.share_of_bandwidth(ceilings):.0%}"
        lines.append(
            f"| {each.kernel} | {each.shape} | {each.case} | {each.microseconds:.1f} | {each.gigabytes_per_s:,.0f} | "
            f"{share} | {each.teraflop_per_s:.1f} |"
        )
    return lines


def served_lines(served: list[Served]) -> list[str]:
    return [
        f"- {each.name}: " + ", ".join(f"{key} {value:.4g}" for key, value in each.figures.items()) for each in served
    ]


def flight_lines(checks: list[FlightCheck]) -> list[str]:
    lines = ["| a step in flight | tokens as without | tokens | rows computed for nothing |", "|---|---|---|---|"]
    lines += [
        f"| {each.mode} | {'equal' if each.are_tokens_equal else 'DIFFER'} | {each.num_tokens} | {each.num_surplus} |"
        for each in checks
    ]
    return lines


def recording_lines(checks: list[RecordingCheck]) -> list[str]:
    lines = [
        "| recordings | how many | s | MiB set aside | MiB taken | made while serving | a buffer moved | bits as "
        "launched |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in checks:
        moved, bits = "YES" if each.has_moved else "no", "equal" if each.are_bits_equal else "DIFFER"
        lines.append(
            f"| {each.mode} | {each.num_recordings} | {each.seconds:.1f} | {each.reserved_mib:.0f} | "
            f"{each.taken_mib:.0f} | {each.num_late} | {moved} "
            f"| {bits} |"
        )
    return lines


def failure_lines(entries: list[Entry]) -> list[str]:
    return [f"- {each.name}: {each.error or 'does not hold'}" for each in entries]


def page(journal: Journal) -> str:
    """All cases that are there, the failed ones first."""
    entries = list(journal.entries.values())
    failed = [each for each in entries if not each.holds]
    held = (
        f"{len(entries) - len(failed)} of {len(entries)} cases hold; they took "
        f"{sum(each.seconds for each in entries):,.0f} s."
    )
    ceilings = next(journal.of_kind(Ceilings), None)
    parts = [[f"# {journal.on['device']}", "", f"{journal.on['torch']}, {journal.on['triton']}. {held}"]]
    sections = (
        ("What does not hold", failure_lines(failed) if failed else []),
        (
            "Kernels against their definition",
            errors_by_type(checks) if (checks := list(journal.of_kind(Check))) else [],
        ),
        ("Whole models", model_lines(models) if (models := list(journal.of_kind(ModelCheck))) else []),
        ("A step in flight", flight_lines(flights) if (flights := list(journal.of_kind(FlightCheck))) else []),
        ("Recordings", recording_lines(made) if (made := list(journal.of_kind(RecordingCheck))) else []),
        ("Speed", ceiling_lines(ceilings) if ceilings is not None else []),
        ("Steps", step_lines(steps) if (steps := list(journal.of_kind(StepTime))) else []),
        ("Layers", time_lines(times, ceilings) if (times := list(journal.of_kind(KernelTime))) else []),
        ("Requests", served_lines(served) if (served := list(journal.of_kind(Served))) else []),
    )
    parts += [[f"## {title}", "", *lines] for title, lines in sections if lines]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"
