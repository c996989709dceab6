"""The command line of `python -m tests.chaos`. What it does not know is a setting of compute, and passed on."""

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path

from shared.process.settings import ComputeSettings

READER_TIMEOUT_S = 60.0  # the default of the setting, which the long faults are made for
# The last one: a slow machine may take more than the usual minute to start a gateway again, and
# what has no reader for that long is cancelled
COMPUTE_DEFAULTS = {
    "dtype": "bfloat16",
    "num_threads": "1",
    "kv_cache_memory": "48MiB",
    "publish_interval_ms": "20",
    "reader_timeout_s": "300",
}


@dataclass(frozen=True, slots=True)
class Options:
    """One run. Times are in seconds."""

    seconds: float
    seed: int
    max_faults: int | None
    more: bool
    long: bool
    scale: float
    only: tuple[str, ...]
    excluded: tuple[str, ...]
    counts: dict[str, int]  # by stage
    model: str
    num_clients: int
    round_s: float
    deadline_s: float
    rss_tolerance_mib: int
    redis_tolerance_mib: int | None
    max_pause_s: float | None
    keep_going: bool
    soak: bool
    older: str | None  # the commit whose processes are replaced
    history: Path | None
    folder: Path | None
    num_ranks: int = 1  # of each replica of compute
    group_timeout_s: float = 0.0
    compute: dict[str, str] = field(default_factory=dict)  # settings of compute, as PENSTOCK_* names without the prefix
    arguments: str = ""  # what to type to have this run again, seed and all


def parse(argv: list[str]) -> Options:
    """The options in argv. Exits with a message on what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Faults under load, and whether every request ends once with its own text.",
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of load, faults, healing and draining (default: %(default)g)"
    )
    parser.add_argument("--minutes", type=float, help="the same in minutes")
    parser.add_argument("--faults", type=int, help="end after so many faults, if that is sooner")
    parser.add_argument("--seed", type=int, help="draws faults and requests (default: random, and printed)")
    parser.add_argument("--more", action="store_true", help="draw the faults of --list's more, too")
    parser.add_argument(
        "--long",
        action="store_true",
        help="draw outages of 60, 90 and 300 s only; compute's reader time-out is then 60 s, as by default",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="of the outages and the reader time-out of --long; at least 0.15 (default: %(default)g)",
    )
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="load without any fault; memory is sampled, and must not grow"
    )
    parser.add_argument(
        "--from",
        dest="older",
        metavar="COMMIT",
        help="an upgrade and no fault: processes of an older version are replaced, one after another",
    )
    parser.add_argument(
        "--only", default="", help="faults to choose from: names or patterns, joined by commas, as in kill-*,readonly"
    )
    parser.add_argument("--except", dest="excluded", default="", help="faults to leave out")
    parser.add_argument(
        "--list",
        action="store_true",
        help=(
            "print the faults with their weights, and when they are drawn: always, with --more, with --long, or if "
            "--only names them; and exit"
        ),
    )
    for stage, count in (("gateway", 2), ("tokenizer", 2), ("compute", 2), ("sampler", 2)):
        parser.add_argument(f"--{stage}s", type=int, default=count, help="replicas (default: %(default)d)")
    for size, says in (("tensor", "ranks that divide every layer"), ("pipeline", "stages that divide the layers")):
        says = (
            f"{says} of each compute, which is a group if there are several: faults then hit ranks, too (default: "
            "%(default)d)"
        )
        parser.add_argument(f"--{size}-parallel-size", type=int, default=1, metavar="N", help=says)
    parser.add_argument("--model", default="demo", help="checkpoint folder, or demo")
    parser.add_argument("--clients", type=int, default=12, help="requests at once (default: %(default)d)")
    parser.add_argument(
        "--round",
        type=float,
        default=12.0,
        dest="round_s",
        help="seconds in which a round's faults begin (default: %(default)g)",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=60.0,
        help="seconds without a token, after healing, for what has not ended (default: %(default)g)",
    )
    parser.add_argument(
        "--rss-tolerance", type=int, default=150, help="MiB that a process may grow in a run (default: %(default)d)"
    )
    parser.add_argument(
        "--redis-tolerance",
        type=int,
        metavar="MIB",
        help="the same of Redis, which keeps what it must for an hour (default: not judged)",
    )
    parser.add_argument(
        "--max-pause",
        type=float,
        metavar="SECONDS",
        help="that a stream may be silent after the last fault has ended (default: not judged)",
    )
    parser.add_argument(
        "--history", type=Path, metavar="FILE", help="where to write the history, for python -m tests.chaos.check"
    )
    parser.add_argument("--keep-going", action="store_true", help="go on after a round in which something hung")
    parser.add_argument(
        "--folder", type=Path, help="for logs and Redis's data, left behind (default: a temporary one); a short path"
    )
    args, rest = parser.parse_known_args(argv)
    if args.list:
        from tests.chaos.faults import FAULTS

        for fault in FAULTS.values():
            print(f"{fault.name:24}{fault.weight:3}  {fault.draw:8}{fault.says}")
        raise SystemExit(0)
    if not 0.15 <= args.scale <= 1:
        parser.error("--scale is between 0.15 and 1: below, the reader time-out comes near to the lease")
    sizes = {f"{size}_parallel_size": str(getattr(args, f"{size}_parallel_size")) for size in ("tensor", "pipeline")}
    compute = (
        COMPUTE_DEFAULTS
        | ({"reader_timeout_s": f"{READER_TIMEOUT_S * args.scale:g}"} if args.long else {})
        | sizes
        | compute_settings(parser, rest)
    )
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1_000_000)
    return Options(
        seconds=60 * (args.soak or args.minutes) if args.soak or args.minutes else args.seconds,
        seed=seed,
        more=args.more,
        long=args.long,
        scale=args.scale,
        max_faults=1 if args.older else args.faults,
        only=names(args.only),
        excluded=names(args.excluded),
        counts={
            "sampler": args.samplers,
            "tokenizer": args.tokenizers,
            "compute": args.computes,
            "gateway": args.gateways,
        }
        | ({"jobs": 2} if args.older else {}),
        model=args.model,
        num_clients=args.clients,
        round_s=args.round_s,
        deadline_s=args.deadline,
        rss_tolerance_mib=args.rss_tolerance,
        redis_tolerance_mib=args.redis_tolerance,
        max_pause_s=args.max_pause,
        keep_going=args.keep_going,
        soak=args.soak is not None,
        older=args.older,
        history=args.history,
        folder=args.folder,
        num_ranks=args.tensor_parallel_size * args.pipeline_parallel_size,
        group_timeout_s=float(compute.get("group_timeout_s", ComputeSettings.model_fields["group_timeout_s"].default)),
        compute=compute,
        arguments=" ".join(argv if args.seed is not None else ["--seed", str(seed), *argv]),
    )


def names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def compute_settings(parser: argparse.ArgumentParser, rest: list[str]) -> dict[str, str]:
    """`--kv-cache-dtype int8` or `--kv-cache-dtype=int8` as {"kv_cache_dtype": "int8"}."""
    words = [
        word for argument in rest for word in (argument.split("=", 1) if argument.startswith("--") else [argument])
    ]
    settings = {}
    for flag, value in zip(words[::2], words[1::2], strict=False):
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in ComputeSettings.model_fields:
            parser.error(f"unknown argument: {flag}")
        settings[name] = value
    if len(words) % 2:
        parser.error(f"{words[-1]} needs a value")
    return settings
