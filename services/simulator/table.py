"""The hardware table: models on cards, in numbers that a buyer asks for."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tqdm import tqdm

from services.simulator.fleet import Fleet
from services.simulator.hardware import HARDWARE, KV_BYTES, LINKS, PRECISIONS, Precision
from services.simulator.machine import Cost
from services.simulator.models import MODELS, DecoderShape
from services.simulator.replica import Outcomes, ReplicaLimits, replicas_of
from services.simulator.report import latencies
from services.simulator.roofline import CardGroup, Roofline, Work, kv_tokens
from services.simulator.simulator import percentiles
from services.simulator.trace import TraceRequest, with_rate
from shared.process.errors import StartupError

TABLE_MODELS = ("llama-2-7b", "llama-3-8b", "llama-2-13b", "codellama-34b", "llama-3-70b", "mixtral-8x7b")
TABLE_HARDWARE = ("a100-80g", "h100-80g", "h200-141g", "l40s-48g", "rtx4090-24g")
TABLE_PRECISIONS = (("none", "auto"), ("w8a8", "int8"), ("w4", "int8"))
NUM_CARDS = (1, 2, 4, 8)
CALM, NUM_CALM = 0.7, 256  # of the requests/s at full load, at which latencies are taken, and of the first requests
HEADS = "card | cards | TP x PP | weights | KV | KV cache, tokens | tokens/s | requests/s | TTFT, ms | TPOT, ms"


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    hardware: str
    quantization: str
    kv_cache_dtype: str
    group: CardGroup
    price: float  # $ an hour, of a card

    @property
    def precision(self) -> Precision:
        return replace(PRECISIONS[self.quantization], kv_bytes=KV_BYTES[self.kv_cache_dtype])


@dataclass(frozen=True, slots=True)
class TableRow:
    case: Case
    kv_tokens: int
    output_tokens_s: float  # at full load, all requests there at once
    qps: float
    ttft_s: float  # the median, at CALM times these requests/s
    tpot_s: float

    @property
    def million_tokens_price(self) -> float:
        """$, of a million output tokens at full load."""
        return self.case.price * self.case.group.num_cards / 3600 / self.output_tokens_s * 1e6

    @property
    def cells(self) -> list[str]:
        case = self.case
        cells = [case.hardware, str(case.group.num_cards), f"{case.group.tensor} x {case.group.pipeline}"]
        cells += [
            {"none": "bf16"}.get(case.quantization, case.quantization),
            {"auto": "bf16"}.get(case.kv_cache_dtype, case.kv_cache_dtype),
        ]
        cells += [f"{self.kv_tokens:,}", f"{self.output_tokens_s:,.0f}", f"{self.qps:.1f}"]
        return [*cells, f"{self.ttft_s * 1000:,.0f}", f"{self.tpot_s * 1000:.1f}", f"{self.million_tokens_price:.2f}"]


def replay_alone(
    requests: list[TraceRequest], cost: Cost, num_tokens: int, limits: ReplicaLimits
) -> tuple[float, Outcomes]:
    """Seconds until the last token on one replica whose KV cache has room for num_tokens."""
    run = Fleet(requests, replicas_of(limits, cost, num_tokens), start_s=0.0).replay(1)
    return run.seconds, run.outcomes


def simulate_line(
    model: DecoderShape, case: Case, requests: list[TraceRequest], limits: ReplicaLimits
) -> TableRow | None:
    """None: the model does not fit, or a request that asks for as much as it may does not."""
    hardware = HARDWARE[case.hardware]
    try:
        num_tokens = kv_tokens(model, hardware, case.precision, case.group)
    except StartupError:
        return None
    if num_tokens // limits.block_size * limits.block_size < limits.max_total_tokens:
        return None
    cost = Roofline(model, hardware, case.precision, case.group)
    seconds, _ = replay_alone([replace(each, arrived_at=0.0) for each in requests], cost, num_tokens, limits)
    calm = with_rate(requests[:NUM_CALM], CALM * len(requests) / seconds)
    _, outcomes = replay_alone(calm, cost, num_tokens, limits)
    ttft_s, tpot_s = (percentiles(times)[0] for times in latencies(outcomes))
    output_tokens_s = sum(each.num_output_tokens for each in requests) / seconds
    return TableRow(case, num_tokens, output_tokens_s, len(requests) / seconds, ttft_s, tpot_s)


def best_group(
    model: DecoderShape, case: Case, num_cards: int, requests: list[TraceRequest], limits: ReplicaLimits
) -> CardGroup:
    """How to divide the model over so many cards: the most tokens/s in a usual step at full load."""
    count = len(requests)
    num_output = sum(each.num_output_tokens for each in requests) / count
    num_prompt = sum(each.num_prompt_tokens for each in requests) / count
    context = num_prompt + num_output / 2
    groups = [
        replace(case.group, tensor=num_cards // stages, pipeline=stages)
        for stages in NUM_CARDS
        if num_cards % stages == 0
    ]

    def tokens_s(group: CardGroup) -> float:
        try:
            room = kv_tokens(model, HARDWARE[case.hardware], case.precision, group)
        except StartupError:
            return 0.0
        rows = max(1.0, min(limits.max_num_seqs, room / context))
        work = Work(rows * (1 + num_prompt / num_output), rows * context, rows * context, rows)
        return rows / Roofline(model, HARDWARE[case.hardware], case.precision, group).seconds(work)

    return max(groups, key=tokens_s)


def lines_of(
    name: str, model: DecoderShape, cases: list[Case], requests: list[TraceRequest], limits: ReplicaLimits
) -> Iterator[str]:
    """A table in Markdown, line by line, as they are found. What is being simulated is told on
    standard error: a bar on a terminal, else a line for each case."""
    yield f"### {name}"
    yield ""
    yield f"| {HEADS} | $ a million tokens |"
    yield "|---|" + "--:|" * 10
    is_seen = sys.stderr.isatty()
    with tqdm(total=len(cases) * len(NUM_CARDS), desc=name, unit="line", leave=False, disable=not is_seen) as bar:
        for case in cases:
            if not is_seen:
                sys.stderr.write(f"simulating {name} on {case.hardware}, {case.quantization}\n")
            for num_cards in NUM_CARDS:
                bar.set_postfix_str(f"{num_cards} x {case.hardware}, {case.quantization}")
                group = best_group(model, case, num_cards, requests, limits)
                line = simulate_line(model, replace(case, group=group), requests, limits)
                bar.update()
                if line is not None:
                    yield f"| {' | '.join(line.cells)} |"


@dataclass(frozen=True, slots=True)
class Published:
    """Output tokens/s of sequences that begin and end together, as PPL.LLM's authors measured them:
    A100 40 GB, 16 bits, KV in int8 with a scale for 8 numbers, base clock, December 2023."""

    model: str
    batch: int
    tensor: int
    num_prompt_tokens: int
    num_output_tokens: int
    tokens_s: float


PUBLISHED_SOURCE = "https://github.com/openppl-public/ppl.nn/blob/master/docs/en/llm-cuda-overview.md#performance"
PUBLISHED_KV_BYTES = 1 + 2 / 8
PUBLISHED = (
    Published("llama-2-7b", 1, 1, 8, 256, 85.5),
    Published("llama-2-7b", 256, 1, 8, 256, 8933.3),
    Published("llama-2-7b", 1, 1, 1024, 1024, 82.4),
    Published("llama-2-7b", 32, 1, 1024, 1024, 1247.9),
    Published("llama-2-13b", 1, 2, 8, 256, 76.1),
    Published("llama-2-13b", 384, 2, 8, 256, 8393.0),
    Published("llama-2-13b", 1, 2, 1024, 1024, 73.8),
    Published("llama-2-13b", 32, 2, 1024, 1024, 1199.7),
    Published("llama-2-70b", 1, 8, 8, 256, 42.5),
    Published("llama-2-70b", 1024, 8, 8, 256, 6872.7),
    Published("llama-2-70b", 1, 8, 1024, 1024, 41.3),
    Published("llama-2-70b", 128, 8, 1024, 1024, 1930.7),
)


def simulate_published(case: Published) -> float:
    """Output tokens/s by the simulator. The whole batch fits, for it was measured; and that engine, in
    C++, is taken to launch its kernels faster than the card computes."""
    hardware = replace(HARDWARE["a100-40g"], launch_s=0.0)
    group = CardGroup(case.tensor, link=LINKS[hardware.link])
    cost = Roofline(MODELS[case.model], hardware, Precision(kv_bytes=PUBLISHED_KV_BYTES), group)
    length = case.num_prompt_tokens + case.num_output_tokens
    requests = [TraceRequest(case.num_prompt_tokens, case.num_output_tokens)] * case.batch
    limits = ReplicaLimits(case.batch, case.batch * case.num_prompt_tokens, 16, "reserve", length)
    seconds, _ = replay_alone(requests, cost, case.batch * (length + 16), limits)
    return case.batch * case.num_output_tokens / seconds


def published_lines() -> Iterator[str]:
    """The published figures and the simulator's, in Markdown."""
    yield "| model | batch | TP | in | out | published, tokens/s | simulated | ratio |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    logs = []
    for case in PUBLISHED:
        found = simulate_published(case)
        logs.append(math.log(found / case.tokens_s))
        sizes = f"{case.batch:,} | {case.tensor} | {case.num_prompt_tokens:,} | {case.num_output_tokens:,}"
        yield f"| {case.model} | {sizes} | {case.tokens_s:,.1f} | {found:,.1f} | {found / case.tokens_s:.2f} |"
    yield ""
    yield (
        f"Ratio: {math.exp(sum(logs) / len(logs)):.2f} in the geometric mean, {math.exp(min(logs)):.2f} to "
        f"{math.exp(max(logs)):.2f}."
    )
    yield f"Published by PPL.LLM's authors: <{PUBLISHED_SOURCE}>"
