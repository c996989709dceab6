"""`penstock`: the command line. A stage's code is imported only when that stage is asked for."""

import argparse
import importlib
import sys
from pathlib import Path

from shared.errors import StartupError
from shared.settings import DEFAULT_REDIS_URL, StageSettings, UpSettings, load_settings
from shared.telemetry import setup_logging

STAGES = ("gateway", "tokenizer", "compute", "sampler")
SHAPES = ("qwen2.5-0.5b", "llama-3.2-1b", "llama-3-8b", "qwen2.5-7b", "smollm2-135m", "tiny")

EXAMPLES = """examples:
  penstock up                                   a small model, fetched once, on http://127.0.0.1:8000
  penstock up --model ~/models/Qwen2.5-0.5B-Instruct --samplers 2
  penstock chat                                 talk to it
  penstock status                               replicas, queues, tokens/s
  penstock serve sampler --redis-url redis://10.0.0.5:6379/0     one more sampler, on any host
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Serve large language models as a durable pipeline. Every flag can also be set as PENSTOCK_<FLAG> in the environment.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("up", add_help=False, help="start everything on this machine (penstock up --help lists the flags)")
    serve = commands.add_parser("serve", add_help=False, help="run one stage in the foreground (penstock serve STAGE --help)")
    serve.add_argument("stage", choices=STAGES)
    commands.add_parser("status", add_help=False, help="replicas, queues, running requests, tokens/s")
    chat = commands.add_parser("chat", help="a chat in the terminal")
    chat.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway (default: %(default)s)")
    chat.add_argument("--model", help="default: the first that the gateway serves")
    chat.add_argument("--system", help="a system prompt")
    chat.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: %(default)s)")
    pull = commands.add_parser("pull", help="fetch a model into ~/.penstock/models, where --model finds it by its name")
    pull.add_argument("name", help="smollm2-135m, or a hub id, owner/name")
    pull.add_argument("--file", default="", help="of a hub repository with several GGUF files, the one that is wanted")
    commands.add_parser("models", help="the models that were pulled: name, size, form")
    commands.add_parser("simulate", add_help=False, help="replay a trace of requests on a model and hardware of your choice, in simulation")
    quantize = commands.add_parser("quantize", help="write a quantized checkpoint that loads in seconds")
    quantize.add_argument("source", help="a checkpoint folder, a hub id, or demo")
    quantize.add_argument("out", type=Path, help="folder to write")
    quantize.add_argument("--quantization", choices=("w8a8", "w4", "nf4"), default="w8a8", help="default: %(default)s")
    quantize.add_argument("--group", type=int, choices=(32, 64, 128), default=64, help="inputs that share a scale, with four bits (default: %(default)s)")
    quantize.add_argument("--attention-output", action="store_true", help="quantize attention's output projection too, whose inputs have outliers")
    quantize.add_argument("--lm-head", action="store_true", help="with four bits, the LM head in four bits too; else it has eight")
    quantize.add_argument(
        "--calibrate", metavar="TEXT", help="a text file, or default: round by what the layers see of it. Takes minutes, and keeps more of what the model knows"
    )
    quantize.add_argument("--calibration-tokens", type=int, default=16_384, help="of the text, at most (default: %(default)s)")
    commands.add_parser("build-kernels", help="compile the native kernels for this package (needs g++ or clang++)")
    make = commands.add_parser("make-model", help="write a model of random weights, for benchmarks and tests")
    make.add_argument("out", type=Path, help="folder to write")
    make.add_argument("--shape", choices=SHAPES, default="tiny", help="default: %(default)s")
    make.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    make.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command. Errors are one line on standard error and exit code 2."""
    args, rest = build_parser().parse_known_args(argv)
    if rest and args.command in ("chat", "pull", "models", "make-model", "quantize", "build-kernels"):
        print(f"penstock: unknown arguments: {' '.join(rest)}", file=sys.stderr)
        return 2
    try:
        return run(args, rest)
    except StartupError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace, rest: list[str]) -> int:
    match args.command:
        case "up":
            from services.launcher import up

            settings = load_settings(UpSettings, rest)
            setup_logging(settings.log_level)
            return up(settings)
        case "serve":
            from shared.stage import run_stage

            sys.argv = [f"penstock serve {args.stage}", *rest]
            run_stage(importlib.import_module(f"services.{args.stage}.__main__").main)
        case "status":
            from services.status import show_status

            show_status(default_redis(load_settings(StageSettings, rest)))
        case "chat":
            from services.chat import chat

            chat(args.url, args.model, args.system, args.temperature)
        case "simulate":
            from services.compute.simulation.__main__ import simulate

            simulate(rest)
        case _:
            run_tool(args)
    return 0


def run_tool(args: argparse.Namespace) -> None:
    """The commands about models and this package, which no server takes part in."""
    match args.command:
        case "pull":
            from services.model_store import pull

            print(f"{args.name} is in {pull(args.name, args.file)}")
        case "models":
            from services.model_store import list_models

            print(list_models())
        case "quantize":
            run_quantize(args)
        case "build-kernels":
            from services.compute.backends.cpu.build import LIBRARY, build

            if (problem := build()) is not None:
                raise StartupError(f"the kernels were not built: {problem}")
            print(f"built {LIBRARY}")
        case "make-model":
            from services.compute.tools.make_model import make_model

            make_model(args.out, shape=args.shape, dtype=args.dtype, seed=args.seed)


def run_quantize(args: argparse.Namespace) -> None:
    from services.compute.models.config import Packed
    from services.compute.tools.quantize import quantize

    packing = Packed(args.quantization, args.group, args.attention_output, args.lm_head)
    result = quantize(args.source, args.out, packing, calibration=args.calibrate, tokens=args.calibration_tokens)
    texts = ["", ""]
    if result.perplexities is not None:
        before, after = result.perplexities
        print(f"{'':12}{'size':>12}{'perplexity':>14}")
        texts = [f"{before:14.3f}", f"{after:14.3f} ({after / before - 1:+.1%}, of text that calibration did not see)"]
    for name, size, text in zip(("before", args.quantization), result.num_bytes, texts, strict=True):
        print(f"{name:12}{size / 1e6:9.1f} MB{text}")
    print(f"written to {args.out}; serve it: penstock up --model {args.out}")


def default_redis(settings: StageSettings) -> StageSettings:
    """The settings as they are, once it is clear that their Redis can exist."""
    if settings.redis_url == DEFAULT_REDIS_URL and not Path(DEFAULT_REDIS_URL.removeprefix("unix://")).exists():
        raise StartupError(f"no Redis at {DEFAULT_REDIS_URL}: is Penstock up? With a --data-dir of your own, give --redis-url unix://DIR/redis.sock")
    return settings


if __name__ == "__main__":
    sys.exit(main())
