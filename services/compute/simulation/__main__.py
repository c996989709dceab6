"""`penstock simulate`: predicts the speed of a model on other hardware."""

import argparse
import sys

from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.admission import STRATEGIES, make_admission
from services.compute.scheduling.scheduler import Scheduler
from services.compute.simulation.hardware import HARDWARE, MODELS, find_hardware, find_model
from services.compute.simulation.simulator import PERCENTILES, Replay, percentiles, replay
from services.compute.simulation.trace import load_trace, with_rate
from shared.process.arguments import Parser
from shared.process.errors import StartupError

EXAMPLES = """examples:
  penstock simulate                                              chat-like requests, Llama 3 8B, one A100
  penstock simulate --rate 12 --target-itl-ms 40                 requests arrive one by one, prompts in smaller chunks
  penstock simulate --trace chats.json --admission reserve       the lengths of a ShareGPT file
  penstock simulate --trace AzureLLMInferenceTrace_conv.csv      a trace of Azure's: lengths and times
  penstock simulate --model ~/models/mine --hardware mine.json   a checkpoint's shape, measured steps
"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="penstock simulate",
        description="Replay a trace of requests through the scheduler and the KV cache's accounting, with a cost model of the steps.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--trace", default="synthetic", help="synthetic, a ShareGPT .json, an Azure trace's .csv, or a .jsonl of prompt_tokens, output_tokens, arrived_at"
    )
    parser.add_argument("--model", default="llama-3-8b", help=f"a checkpoint folder, or one of {', '.join(MODELS)} (default: %(default)s)")
    help_text = "or a .json with fixed_s, per_token_s, per_context_token_s and kv_tokens"
    parser.add_argument("--hardware", default="a100-80g", help=f"one of {', '.join(HARDWARE)}, {help_text} (default: %(default)s)")
    parser.add_argument("--num-requests", type=int, help="default: all of the file, 1000 synthetic ones")
    parser.add_argument("--rate", type=float, help="requests/s, at random times; default: the trace's times, or all at once")
    parser.add_argument("--max-total-tokens", type=int, default=4096, help="tokens that each request asks for, prompt and answer (default: %(default)s)")
    parser.add_argument("--admission", choices=STRATEGIES, default="predicted", help="default: %(default)s")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--max-batched-tokens", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--target-itl-ms", type=float, help="cut prompts into chunks so that steps take no longer than this")
    parser.add_argument("--block-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def simulate(argv: list[str]) -> None:
    """Replay and print. Raises StartupError for what can't be."""
    args = build_parser().parse_args(argv)
    for name in ("num_requests", "rate", "max_total_tokens", "max_num_seqs", "max_batched_tokens", "target_itl_ms", "block_size"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise StartupError(f"--{name.replace('_', '-')}: must be above 0, got {value}")
    if args.seed < 0:
        raise StartupError(f"--seed: must not be negative, got {args.seed}")
    requests = load_trace(args.trace, args.num_requests, seed=args.seed)
    if args.rate is not None:
        requests = with_rate(requests, args.rate, seed=args.seed)
    cost, kv_tokens = find_hardware(args.hardware, find_model(args.model))
    blocks = BlockManager(kv_tokens // args.block_size, args.block_size, prefix_caching=False)
    if args.max_total_tokens > blocks.num_blocks * args.block_size:
        raise StartupError(f"--max-total-tokens {args.max_total_tokens}: the KV cache has room for {kv_tokens} tokens")
    target_itl_s = args.target_itl_ms / 1000 if args.target_itl_ms is not None else None
    scheduler = Scheduler(
        blocks,
        make_admission(args.admission, blocks),
        max_num_seqs=args.max_num_seqs,
        max_batched_tokens=args.max_batched_tokens,
        target_itl_s=target_itl_s,
    )
    try:
        result = replay(
            scheduler,
            requests,
            lambda batch: cost.seconds(batch.num_tokens, batch.num_context_tokens),
            max_total_tokens=args.max_total_tokens,
            progress=True,
        )
    except ValueError as error:
        raise StartupError(f"--max-total-tokens: {error}") from None
    print(f"{args.model} on {args.hardware}: KV cache of {kv_tokens:,} tokens, admission {args.admission}")
    print(describe(result))
    peaks = scheduler.admission.calibration
    if peaks is not None and peaks.num_predictions:
        ratio = peaks.sum_of_ratios / peaks.num_predictions
        print(f"predicted peaks of KV memory: {peaks.num_exceeded} of {peaks.num_predictions} exceeded, real / predicted {ratio:.2f} in the mean")


def describe(result: Replay) -> str:
    """The figures as text."""
    output_tokens = sum(timeline.request.num_output_tokens for timeline in result.timelines)
    rows = {"TTFT, s": percentiles(each.ttft for each in result.timelines), "TPOT, ms": percentiles(each.tpot * 1000 for each in result.timelines)}
    rows["ITL, ms"] = [result.itl(percentile) * 1000 for percentile in PERCENTILES]
    lines = [
        f"{len(result.timelines):,} requests in {result.seconds:,.1f} s: {result.qps:.2f} requests/s, {output_tokens / result.seconds:,.0f} output tokens/s",
        f"{result.num_steps:,} steps of {result.num_sequence_steps / result.num_steps:.0f} sequences, {result.num_preemptions:,} preemptions, "
        f"scheduler {result.scheduler_s / result.num_steps * 1e6:.0f} us a step",
        f"{'':10}" + "".join(f"{f'p{percentile}':>10}" for percentile in PERCENTILES),
    ]
    return "\n".join(lines + [f"{name:10}" + "".join(f"{value:10.2f}" for value in values) for name, values in rows.items()])


if __name__ == "__main__":
    try:
        simulate(sys.argv[1:])
    except StartupError as error:
        sys.exit(f"penstock: {error}")
