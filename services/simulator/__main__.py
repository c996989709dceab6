"""`penstock simulate`: predicts the speed of a model on other hardware."""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import replace

from tqdm import tqdm

from services.compute.scheduling.admission import STRATEGIES
from services.compute.scheduling.scheduler import Scheduler
from services.simulator.fleet import Fleet
from services.simulator.hardware import HARDWARE, KV_BYTES, LINKS, PRECISIONS, Link
from services.simulator.machine import Machine, find_machine
from services.simulator.models import MODELS, find_model
from services.simulator.policy import Policy, read_policy
from services.simulator.replica import ReplicaLimits, replicas_of
from services.simulator.report import Limits, plot, table
from services.simulator.roofline import CardGroup, Work
from services.simulator.simulator import PERCENTILES, ReplayResult, check_lengths, percentiles, replay
from services.simulator.table import TABLE_HARDWARE, TABLE_MODELS, TABLE_PRECISIONS, Case, lines_of, published_lines
from services.simulator.trace import TraceRequest, load_trace, with_rate, with_speed
from shared.process.arguments import CommandLineParser, positive_number, whole_number
from shared.process.errors import StartupError

EXAMPLES = """examples:
  penstock simulate                                              chat-like requests, Llama 3 8B, one A100
  penstock simulate --rate 12 --target-itl-ms 40                 requests arrive one by one, prompts in smaller chunks
  penstock simulate --trace chats.json --admission reserve       the lengths of a ShareGPT file
  penstock simulate --model ~/models/mine --hardware mine.json   a checkpoint's shape, measured steps
  penstock simulate --model llama-3-70b --hardware h100-80g --tensor-parallel-size 4 --quantization w8a8
                                                a replica of four cards; between hosts, say, --link ethernet-100g
  penstock simulate --table --model llama-3-8b
                                                what each card makes of it: tokens/s, TTFT, TPOT, requests/s, cost
  penstock simulate --trace conv.csv --max-total-tokens 16384 --speed 8 --replicas 4 12 \
      --autoscale deploy/kubernetes/keda/scaled.yaml --max-replicas 12
                                                an Azure trace, 8 times as fast, on 4, on 12, and on 1 to 12 replicas
"""
DEFAULTS = {"model": "llama-3-8b", "hardware": "a100-80g", "quantization": "none", "kv_cache_dtype": "auto"}


def positive(text: str) -> float:
    return bounded(text, float(text) > 0, "above 0")


def not_negative(text: str) -> float:
    return bounded(text, float(text) >= 0, "not negative")


def bounded(text: str, is_right: bool, words: str) -> float:
    if not is_right or float(text) == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number that is {words}")
    return float(text)


def build_parser() -> argparse.ArgumentParser:
    parser = CommandLineParser(
        prog="penstock simulate",
        description=(
            "Replay a trace of requests through the scheduler and the KV cache's accounting, with a cost model of "
            "the steps."
        ),
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--trace",
        default="synthetic",
        help=(
            "synthetic, a ShareGPT .json, an Azure trace's .csv, or a .jsonl of prompt_tokens, output_tokens, "
            "arrived_at"
        ),
    )
    parser.add_argument(
        "--model", help=f"a checkpoint folder, or one of {', '.join(MODELS)} (default: {DEFAULTS['model']})"
    )
    help_text = "or a .json with fixed_s, per_token_s, per_context_token_s and kv_tokens"
    parser.add_argument(
        "--hardware", help=f"one of {', '.join(HARDWARE)}, {help_text} (default: {DEFAULTS['hardware']})"
    )
    parser.add_argument("--quantization", choices=PRECISIONS, help="form of the weights; none: 16 bits (default: none)")
    parser.add_argument("--kv-cache-dtype", choices=KV_BYTES, help="of keys and values; auto: 16 bits (default: auto)")
    parser.add_argument(
        "--tensor-parallel-size", type=positive_number, default=1, metavar="N", help="cards that divide every layer"
    )
    parser.add_argument(
        "--pipeline-parallel-size", type=positive_number, default=1, metavar="N", help="stages that divide the layers"
    )
    parser.add_argument(
        "--link", choices=LINKS, metavar="LINK", help=f"between cards: {', '.join(LINKS)} (default: the card's own)"
    )
    parser.add_argument("--pipeline-link", choices=LINKS, metavar="LINK", help="between stages (default: as --link)")
    parser.add_argument(
        "--price", type=not_negative, help="$ of a card for an hour (default: a round figure; 1 for measured steps)"
    )
    parser.add_argument("--num-requests", type=positive_number, help="default: all of the file, 1000 synthetic ones")
    parser.add_argument(
        "--rate", type=positive, help="requests/s, at random times; default: the trace's times, or all at once"
    )
    parser.add_argument("--speed", type=positive, help="the trace's times pass so many times as fast")
    parser.add_argument(
        "--max-total-tokens", type=positive_number, default=4096, help="tokens that each request asks for in all"
    )
    parser.add_argument("--admission", choices=STRATEGIES, default="predicted", help="default: %(default)s")
    parser.add_argument("--max-num-seqs", type=positive_number, default=256, help="default: %(default)s")
    parser.add_argument("--max-batched-tokens", type=positive_number, default=2048, help="default: %(default)s")
    parser.add_argument(
        "--target-itl-ms", type=positive, help="cut prompts into chunks so that steps take no longer than this"
    )
    parser.add_argument("--block-size", type=positive_number, default=16, help="default: %(default)s")
    parser.add_argument("--seed", type=whole_number, default=0)
    tables = parser.add_argument_group("tables, in Markdown")
    help_text = f"by default {', '.join(TABLE_MODELS)} on {', '.join(TABLE_HARDWARE)}; flags above choose one"
    tables.add_argument(
        "--table", action="store_true", help=f"a line for each card, precision and number of cards: {help_text}"
    )
    tables.add_argument(
        "--published", action="store_true", help="figures that PPL.LLM's authors measured, and the simulator's"
    )
    fleet = parser.add_argument_group(
        "several replicas at one stream", "Each number of replicas, and each choice of triggers, is a run of its own."
    )
    fleet.add_argument(
        "--replicas", type=positive_number, nargs="+", metavar="N", default=[], help="fixed numbers of replicas"
    )
    fleet.add_argument(
        "--autoscale",
        metavar="FILE",
        help="replicas by the ScaledObject for compute in this manifest, e.g. deploy/kubernetes/keda/scaled.yaml",
    )
    fleet.add_argument(
        "--triggers", nargs="+", metavar="NAMES", help="only these of the manifest's: lag, pending, or lag+pending"
    )
    fleet.add_argument("--min-replicas", type=whole_number, metavar="N", help="instead of the manifest's")
    fleet.add_argument("--max-replicas", type=positive_number, metavar="N", help="instead of the manifest's")
    fleet.add_argument(
        "--start-s", type=not_negative, default=60.0, help="from a replica's start until its model is loaded"
    )
    fleet.add_argument(
        "--ttft-ms", type=positive, default=2000.0, help="goodput counts requests whose TTFT is at most this"
    )
    fleet.add_argument("--tpot-ms", type=positive, default=100.0, help="and whose TPOT is at most this")
    return parser


def simulate(argv: list[str]) -> None:
    """Replay and print. Raises StartupError for what can't be."""
    args = build_parser().parse_args(argv)
    if args.published:
        print_lines(published_lines())
        return
    requests = requests_of(args)
    if args.table:
        print_tables(args, requests)
        return
    for name, value in DEFAULTS.items():
        setattr(args, name, getattr(args, name) or value)
    machine = machine_of(args)
    num_cards = args.tensor_parallel_size * args.pipeline_parallel_size
    cards = (
        args.hardware
        if num_cards == 1
        else f"{args.tensor_parallel_size} x {args.pipeline_parallel_size} {args.hardware}"
    )
    print(f"{args.model} on {cards}: KV cache of {machine.kv_tokens:,} tokens, admission {args.admission}")
    if args.replicas or args.autoscale:
        simulate_fleets(args, sorted(requests, key=lambda request: request.arrived_at), machine)
    else:
        simulate_replica(args, requests, machine)


def requests_of(args: argparse.Namespace) -> list[TraceRequest]:
    """The trace's requests at their times. Raises StartupError."""
    requests = load_trace(args.trace, args.num_requests, seed=args.seed)
    if args.speed is not None:
        requests = with_speed(requests, args.speed)
    if args.rate is not None:
        requests = with_rate(requests, args.rate, seed=args.seed)
    try:
        check_lengths(requests, args.max_total_tokens)
    except ValueError as error:
        raise StartupError(f"--max-total-tokens: {error}") from None
    return requests


def machine_of(args: argparse.Namespace) -> Machine:
    """The replica's. Raises StartupError if the model or a request does not fit."""
    precision = replace(PRECISIONS[args.quantization], kv_bytes=KV_BYTES[args.kv_cache_dtype])
    group = CardGroup(args.tensor_parallel_size, args.pipeline_parallel_size, *links_of(args, args.hardware))
    machine = find_machine(args.hardware, find_model(args.model), precision, group, args.price)
    if args.max_total_tokens > machine.kv_tokens // args.block_size * args.block_size:
        raise StartupError(
            f"--max-total-tokens {args.max_total_tokens}: the KV cache has room for {machine.kv_tokens} tokens"
        )
    return machine


def print_lines(lines: Iterator[str]) -> None:
    """Each as soon as it is found, and above the bar where both are on one terminal."""
    for line in lines:
        with tqdm.external_write_mode(file=sys.stderr):
            print(line, flush=True)


def limits_of(args: argparse.Namespace) -> ReplicaLimits:
    target_itl_s = args.target_itl_ms / 1000 if args.target_itl_ms is not None else None
    return ReplicaLimits(
        args.max_num_seqs, args.max_batched_tokens, args.block_size, args.admission, args.max_total_tokens, target_itl_s
    )


def links_of(args: argparse.Namespace, hardware: str) -> tuple[Link, Link]:
    """Between the ranks that divide every layer, and between stages."""
    link = args.link or (HARDWARE[hardware].link if hardware in HARDWARE else "shared-memory")
    return LINKS[link], LINKS[args.pipeline_link or link]


def print_tables(args: argparse.Namespace, requests: list[TraceRequest]) -> None:
    """The hardware table of each model."""
    if args.tensor_parallel_size * args.pipeline_parallel_size > 1:
        raise StartupError(
            "--table: it finds how to divide a model by itself; leave out --tensor-parallel-size and "
            "--pipeline-parallel-size"
        )
    if args.hardware is not None and args.hardware not in HARDWARE:
        raise StartupError(f"--hardware {args.hardware}: the table takes one of {', '.join(HARDWARE)}")
    precisions = [each for each in TABLE_PRECISIONS if args.quantization in (None, each[0])]
    if args.kv_cache_dtype is not None:
        precisions = [(quantization, args.kv_cache_dtype) for quantization, _ in precisions]
    cases = []
    for name in [args.hardware] if args.hardware else TABLE_HARDWARE:
        group = CardGroup(1, 1, *links_of(args, name))
        cases += [
            Case(name, *precision, group, HARDWARE[name].price if args.price is None else args.price)
            for precision in precisions
        ]
    for model in [args.model] if args.model else TABLE_MODELS:
        print_lines(lines_of(model, find_model(model), cases, requests, limits_of(args)))
        print()


def simulate_replica(args: argparse.Namespace, requests: list[TraceRequest], machine: Machine) -> None:
    scheduler = limits_of(args).scheduler(Scheduler, machine.kv_tokens)
    longest, cost = args.max_total_tokens, machine.cost
    result = replay(
        scheduler, requests, lambda batch: cost.seconds(Work.of(batch)), max_total_tokens=longest, progress=True
    )
    print(describe(result, machine.price))
    peaks = scheduler.admission.peaks
    if peaks is not None and peaks.num_predictions:
        ratio = peaks.sum_of_ratios / peaks.num_predictions
        print(
            f"predicted peaks of KV memory: {peaks.num_exceeded} of {peaks.num_predictions} exceeded, real / "
            f"predicted {ratio:.2f} in the mean"
        )


def policies(args: argparse.Namespace) -> dict[str, Policy]:
    """The manifest's policy, with each choice of its triggers. Raises StartupError for what it has not."""
    policy = read_policy(args.autoscale)
    minimum = policy.min_replicas if args.min_replicas is None else args.min_replicas
    maximum = max(minimum, policy.max_replicas) if args.max_replicas is None else args.max_replicas
    if minimum > maximum:
        raise StartupError(f"--min-replicas {minimum}: must be at most --max-replicas, which is {maximum}")
    found = {}
    for names in args.triggers or ["+".join(each.metric for each in policy.triggers)]:
        triggers = tuple(each for each in policy.triggers if each.metric in names.split("+"))
        if {each.metric for each in triggers} != set(names.split("+")):
            raise StartupError(
                f"--triggers {names}: {args.autoscale} has {', '.join(each.metric for each in policy.triggers)}"
            )
        found[f"{minimum} to {maximum}, by {names}"] = replace(
            policy, triggers=triggers, min_replicas=minimum, max_replicas=maximum
        )
    return found


def simulate_fleets(args: argparse.Namespace, requests: list[TraceRequest], machine: Machine) -> None:
    """The same requests on each fleet."""
    autoscaled = policies(args) if args.autoscale else {}
    fleets: dict[str, tuple[int, Policy | None]] = {f"{count} fixed": (count, None) for count in args.replicas}
    fleets |= {name: (policy.min_replicas, policy) for name, policy in autoscaled.items()}

    make_replica = replicas_of(limits_of(args), machine.cost, machine.kv_tokens)
    runs = {
        name: Fleet(requests, make_replica, start_s=args.start_s, policy=policy).replay(num_replicas, progress=True)
        for name, (num_replicas, policy) in fleets.items()
    }
    print(
        f"{len(requests):,} requests in {requests[-1].arrived_at:,.0f} s; goodput: TTFT up to {args.ttft_ms:g} ms, "
        f"TPOT up to {args.tpot_ms:g} ms"
    )
    print(table(runs, Limits(args.ttft_ms / 1000, args.tpot_ms / 1000), machine.price))
    for name in autoscaled:
        print(f"\n{name}; a replica starts in {args.start_s:g} s\n{plot(runs[name])}")


def describe(result: ReplayResult, price: float) -> str:
    """The figures as text. price: of the replica, for an hour."""
    output_tokens = sum(timeline.request.num_output_tokens for timeline in result.timelines)
    rows = {
        "TTFT, s": percentiles(each.ttft for each in result.timelines),
        "TPOT, ms": percentiles(each.tpot * 1000 for each in result.timelines),
    }
    rows["ITL, ms"] = [result.itl(percentile) * 1000 for percentile in PERCENTILES]
    lines = [
        f"{len(result.timelines):,} requests in {result.seconds:,.1f} s: {result.qps:.2f} requests/s, "
        f"{output_tokens / result.seconds:,.0f} output tokens/s, "
        f"{price * result.seconds / 3600 / output_tokens * 1e6:.2f} a million output tokens",
        f"{result.num_steps:,} steps of {result.num_sequence_steps / result.num_steps:.0f} sequences, "
        f"{result.num_preemptions:,} preemptions, "
        f"scheduler {result.scheduler_s / result.num_steps * 1e6:.0f} us a step",
        f"{'':10}" + "".join(f"{f'p{percentile}':>10}" for percentile in PERCENTILES),
    ]
    return "\n".join(
        lines + [f"{name:10}" + "".join(f"{value:10.2f}" for value in values) for name, values in rows.items()]
    )


if __name__ == "__main__":
    try:
        simulate(sys.argv[1:])
    except StartupError as error:
        sys.exit(f"penstock: {error}")
