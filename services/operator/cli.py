"""`penstock`: the command line. A stage's code is imported only when that stage is asked for."""

import argparse
import importlib
import os
import sys
from importlib.metadata import version
from pathlib import Path

from services.operator.keys import add_arguments as add_keys_arguments
from shared.process.arguments import CommandLineParser, positive_number, seconds, whole_number
from shared.process.errors import StartupError
from shared.process.settings import UpSettings, load_settings
from shared.process.stage_settings import DEFAULT_DATA_DIR
from shared.process.stages import STAGES
from shared.process.telemetry import setup_logging

SHAPES = ("qwen2.5-0.5b", "llama-3.2-1b", "llama-3-8b", "qwen2.5-7b", "smollm2-135m", "tiny")
SEEING_SHAPES = ("smolvlm-256m", "tiny-smolvlm")

EXAMPLES = """examples:
  penstock up                                   a small model, fetched once, on http://127.0.0.1:8000
  penstock up --model ~/models/Qwen2.5-0.5B-Instruct --samplers 2
  penstock chat                                 talk to it
  penstock batch requests.jsonl                 answers to a file of requests
  penstock status --watch                       replicas, queues, tokens/s
  penstock serve sampler --redis-url redis://10.0.0.5:6379/0     one more sampler, on any host

penstock COMMAND --help shows the flags of a command."""

CHAT_EXAMPLES = """examples:
  penstock chat                                         with the penstock up on this machine
  penstock chat "What is a penstock?"                   one answer
  git diff | penstock chat "Write a commit message."    about the text from a pipe
  penstock chat --url https://host/v1 --model NAME      with any OpenAI-compatible server

The API key comes from PENSTOCK_API_KEY or OPENAI_API_KEY."""

BATCH_EXAMPLES = """examples:
  penstock batch questions.jsonl
  penstock batch batch_0123456789abcdef          wait for a batch again"""

STATUS_EXAMPLES = """examples:
  penstock status                               one look
  penstock status --watch                       every two seconds, until Ctrl-C
  penstock status --data-dir /srv/penstock      of a penstock up with that --data-dir
  penstock status --json | jq .replicas         for programs

It reads only Redis, so it works without a gateway. The exit code is 1 if a stage is missing."""

QUANTIZE_EXAMPLES = """examples:
  penstock quantize ~/models/mine ~/models/mine-w8a8
  penstock quantize ~/models/mine ~/models/mine-w4 --quantization w4 --calibrate default

The output is packed for a CPU's kernels. On a GPU, quantize at load, in seconds:
penstock up --device cuda --model ~/models/mine --quantization fp8"""

MAKE_MODEL_EXAMPLES = """examples:
  penstock make-model /tmp/m --shape qwen2.5-0.5b
  penstock up --model /tmp/m"""

TRAIN_HEADS_EXAMPLES = """examples:
  penstock train-heads smollm2-135m ~/models/smollm2-heads
  penstock train-heads ~/models/mine ~/models/mine-heads --prompts questions.txt --temperature 0.7
  penstock up --model ~/models/mine --heads ~/models/mine-heads

It runs on the CPU, for as long as the model takes to answer so many tokens, and about as long again.
The same machine, flags and seed give the same heads."""

PULL_EXAMPLES = """examples:
  penstock pull smollm2-135m
  penstock pull Qwen/Qwen2.5-0.5B-Instruct
  penstock pull owner/name-GGUF --file name-Q4_K_M.gguf
  penstock up --model owner/name-GGUF"""


SERVE_EXAMPLES = """examples:
  penstock serve compute --help                 the flags of a stage
  penstock serve gateway --port 9000
  penstock serve sampler --redis-url redis://10.0.0.5:6379/0"""


class StageHelp(argparse.Action):
    """--help of `penstock serve`; behind a stage it is the stage's, and is handed on."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object) -> None:
        if namespace.stage is None:
            parser.print_help()
            parser.exit()
        namespace.stage_help = ["--help"]


OURS = ("services", "shared")  # packages that are always there, but for these, which images leave out (.dockerignore)
NOT_IN_IMAGES = ("services.simulator", "services.modeltools")


def build_parser() -> argparse.ArgumentParser:
    parser = CommandLineParser(
        prog="penstock", description="Serve large language models as a durable pipeline.", epilog=EXAMPLES
    )
    parser.add_argument("--version", action="version", version=f"penstock {version('penstock')}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("up", add_help=False, help="start everything on this machine")
    serve = commands.add_parser(
        "serve", add_help=False, help="run one stage here (penstock serve STAGE --help)", epilog=SERVE_EXAMPLES
    )
    serve.add_argument("stage", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    serve.add_argument(
        "-h", "--help", action=StageHelp, nargs=0, dest="stage_help", default=[], help="after a stage: all of its flags"
    )
    add_status(
        commands.add_parser("status", help="show replicas, queues, running requests, tokens/s", epilog=STATUS_EXAMPLES)
    )
    add_chat(commands.add_parser("chat", help="chat in the terminal", epilog=CHAT_EXAMPLES))
    add_batch(commands.add_parser("batch", help="have a file of requests answered, and wait", epilog=BATCH_EXAMPLES))
    pull = commands.add_parser(
        "pull", help="fetch a model into ~/.penstock/models; --model then finds it by name", epilog=PULL_EXAMPLES
    )
    pull.add_argument("name", metavar="NAME", help="smollm2-135m, or a hub id, owner/name")
    pull.add_argument("--file", default="", help="the GGUF file to fetch, from a hub repository with several")
    models = commands.add_parser(
        "models", help="list the models that were pulled: name, size, form", epilog="example:\n  penstock models"
    )
    models.add_argument(
        "--supported", action="store_true", help="list the architectures instead: how each runs, or why it is refused"
    )
    examples = "example:\n  penstock keys add team-a --rpm 600"
    add_keys_arguments(commands.add_parser("keys", help="add, list, rotate and revoke API keys", epilog=examples))
    commands.add_parser(
        "simulate", add_help=False, help="simulate a trace of requests on a model and hardware of your choice"
    )
    add_quantize(
        commands.add_parser("quantize", help="write a checkpoint that loads in seconds", epilog=QUANTIZE_EXAMPLES)
    )
    add_train_heads(
        commands.add_parser("train-heads", help="train heads that guess next tokens", epilog=TRAIN_HEADS_EXAMPLES)
    )
    built = "example:\n  apt install g++ && penstock build-kernels"
    commands.add_parser(
        "build-kernels", help="compile the native kernels for this package (needs g++ or clang++)", epilog=built
    )
    make = commands.add_parser(
        "make-model", help="write a model of random weights, for benchmarks and tests", epilog=MAKE_MODEL_EXAMPLES
    )
    make.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    make.add_argument("--shape", choices=SHAPES + SEEING_SHAPES, default="tiny", help="default: %(default)s")
    make.add_argument(
        "--text",
        default="",
        metavar="MODEL",
        help="whose text part a shape that sees has (default: smollm2-135m or demo)",
    )
    make.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    make.add_argument("--seed", type=whole_number, default=0, metavar="N", help="seed of the random numbers")
    add_force(make)
    # up, serve and simulate hand what they don't know to parsers of their own
    for command in commands.choices.values():
        command.set_defaults(parser=command if command.add_help else None)
    serve.set_defaults(parser=None)
    return parser


def add_status(status: argparse.ArgumentParser) -> None:
    place = status.add_mutually_exclusive_group()
    place.add_argument(
        "--redis-url", metavar="URL", help="the stages' Redis (default: PENSTOCK_REDIS_URL, else penstock up's)"
    )
    place.add_argument("--data-dir", type=Path, metavar="FOLDER", help="the --data-dir of the penstock up to ask")
    status.add_argument(
        "--watch",
        type=seconds,
        nargs="?",
        const=2.0,
        metavar="SECONDS",
        help="look again so often (default: %(const)s)",
    )
    status.add_argument("--json", action="store_true", help="for programs; with --watch, a line for each look")


def add_chat(chat: argparse.ArgumentParser) -> None:
    chat.add_argument(
        "question", nargs="?", default="", metavar="QUESTION", help="one, and no chat; text from a pipe is put below it"
    )
    chat.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    chat.add_argument("--model", help="default: the first that the server serves")
    chat.add_argument("--system", default="", metavar="TEXT", help="a system prompt")
    chat.add_argument("--temperature", type=float, default=0.7, metavar="X", help="0 is greedy")
    chat.add_argument(
        "--max-tokens", type=positive_number, metavar="N", help="longest answer (default: what the context holds)"
    )
    chat.add_argument("--seed", type=whole_number, metavar="N", help="the same conversation then gets the same answers")
    chat.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="an image with the first question; several times"
    )


def add_batch(batch: argparse.ArgumentParser) -> None:
    batch.add_argument(
        "source", metavar="FILE", help="requests, a line each, as OpenAI's batches have them; or a batch's id"
    )
    batch.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway")
    batch.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="answers; by default FILE.out.jsonl, failed requests in FILE.out.errors.jsonl",
    )
    batch.add_argument("--window", default="24h", metavar="TIME", help="in which the batch must end, at most 24h")
    batch.add_argument(
        "--api-key", default=os.environ.get("PENSTOCK_API_KEY", ""), metavar="KEY", help="default: PENSTOCK_API_KEY"
    )


def add_quantize(quantize: argparse.ArgumentParser) -> None:
    quantize.add_argument("source", metavar="SOURCE", help="a checkpoint folder, a hub id, or demo")
    quantize.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    quantize.add_argument(
        "--quantization",
        choices=("w8a8", "w4", "nf4"),
        default="w8a8",
        help="default: %(default)s; for fp8 on a GPU, quantize at load: penstock up --quantization fp8",
    )
    quantize.add_argument(
        "--group", type=int, choices=(32, 64, 128), default=32, help="inputs that share a step (w4) or a scale (nf4)"
    )
    quantize.add_argument(
        "--attention-output", action="store_true", help="attention's output projection in four bits, too; else eight"
    )
    quantize.add_argument("--lm-head", action="store_true", help="the LM head in four bits, too; else eight")
    quantize.add_argument(
        "--calibrate", metavar="TEXT", help="a text file, or default: calibrate the rounding on it, which takes minutes"
    )
    quantize.add_argument(
        "--calibration-tokens", type=positive_number, default=16_384, metavar="N", help="tokens of the text, at most"
    )
    add_force(quantize)


def add_train_heads(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "model", metavar="MODEL", help="a checkpoint folder, a GGUF file, a name that was pulled, or a hub id"
    )
    train.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    train.add_argument(
        "--prompts", default="default", metavar="FILE", help="a prompt on each line (default: 1,200 built-in ones)"
    )
    train.add_argument(
        "--tokens", type=positive_number, default=100_000, metavar="N", help="tokens of the model's answers, about"
    )
    train.add_argument(
        "--temperature", type=float, metavar="X", help="of answers (default: as the model's makers say, else 1)"
    )
    train.add_argument("--heads", type=positive_number, default=3, metavar="N", help="each guesses one token further")
    train.add_argument("--layers", type=positive_number, default=1, metavar="N", help="residual blocks of a head")
    train.add_argument(
        "--vocabulary", type=positive_number, default=8192, metavar="N", help="frequent tokens, which heads know"
    )
    train.add_argument(
        "--epochs", type=positive_number, default=6, metavar="N", help="times that each answer is learnt from"
    )
    train.add_argument("--learning-rate", type=float, default=2e-3, metavar="X", help="the largest, of AdamW")
    train.add_argument("--seed", type=whole_number, default=0, metavar="N", help="of answers and training")
    train.add_argument("--num-threads", type=whole_number, default=0, metavar="N", help="0: all cores")
    add_force(train)


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace a model that is in the folder already")


def main(argv: list[str] | None = None) -> int:
    """Run a command. Errors are one line on standard error and exit code 2."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if args.command is None and not rest:
        parser.error("the following arguments are required: COMMAND")
    if rest and args.parser is not None:
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return run(args, rest)
    except StartupError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or (error.name.split(".")[0] in OURS and error.name not in NOT_IN_IMAGES):
            raise  # a mistake of ours
        what = f"the package {error.name!r} is not installed: pip install 'penstock[all]' has all that this needs"
        print(f"penstock: {what}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of our output has gone, as head does; what is still buffered must not fail at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def run(args: argparse.Namespace, rest: list[str]) -> int:
    match args.command:
        case "up":
            from services.operator.launcher import up

            settings = load_settings(UpSettings, rest)
            setup_logging(settings.log_level, settings.log_format)
            return up(settings)
        case "serve":
            from shared.wire.stage import run_stage

            sys.argv = [f"penstock serve {args.stage}", *rest, *args.stage_help]
            run_stage(importlib.import_module(f"services.{args.stage}.__main__").main)
        case "status":
            from services.operator.status import show_status

            return show_status(redis_of(args.redis_url, args.data_dir), watch_s=args.watch, as_json=args.json)
        case "chat":
            from services.operator.chat.chat import ChatSettings, chat

            return chat(
                ChatSettings(
                    args.url, args.model, args.system, args.temperature, args.max_tokens, args.seed, tuple(args.image)
                ),
                args.question,
            )
        case "batch":
            from services.operator.batch import run_batch

            return run_batch(args.url, args.source, args.out, args.window, args.api_key)
        case "simulate":
            from services.simulator.__main__ import simulate

            simulate(rest)
        case _:
            run_tool(args)
    return 0


def run_tool(args: argparse.Namespace) -> None:
    """The commands about models and this package, which no server takes part in."""
    match args.command:
        case "pull":
            from services.operator.model_store import pull

            print(f"{args.name} is in {pull(args.name, args.file)}")
        case "models":
            from services.operator.model_store import list_models, supported_models

            print(supported_models() if args.supported else list_models())
        case "keys":
            from services.operator.keys import keys

            keys(args)
        case "quantize":
            run_quantize(args)
        case "build-kernels":
            from services.compute.backends.cpu.build import LIBRARY, build

            if (problem := build()) is not None:
                raise StartupError(f"the kernels were not built: {problem}")
            print(f"built {LIBRARY}")
        case "train-heads":
            run_train_heads(args)
        case "make-model":
            run_make_model(args)
            print(f"written to {args.out}; serve it: penstock up --model {args.out}")


def run_make_model(args: argparse.Namespace) -> None:
    if args.text and args.shape not in SEEING_SHAPES:
        raise StartupError(f"--text is for shapes that see: {', '.join(SEEING_SHAPES)}")
    if args.shape in SEEING_SHAPES:
        from services.modeltools.make_vision_model import make_vision_model

        return make_vision_model(
            args.out, shape=args.shape, text=args.text, dtype=args.dtype, seed=args.seed, force=args.force
        )
    from services.modeltools.make_model import make_model

    make_model(args.out, shape=args.shape, dtype=args.dtype, seed=args.seed, force=args.force)


def run_quantize(args: argparse.Namespace) -> None:
    from services.compute.models.config import Packed
    from services.modeltools.quantize import quantize

    packing = Packed(args.quantization, args.group, args.attention_output, args.lm_head)
    result = quantize(
        args.source, args.out, packing, calibration=args.calibrate, tokens=args.calibration_tokens, force=args.force
    )
    texts = ["", ""]
    if result.perplexities is not None:
        before, after = result.perplexities
        print(f"{'':12}{'size':>12}{'perplexity':>14}")
        texts = [f"{before:14.3f}", f"{after:14.3f} ({after / before - 1:+.1%}, of text that calibration did not see)"]
    for name, size, text in zip(("before", args.quantization), result.num_bytes, texts, strict=True):
        print(f"{name:12}{size / 1e6:9.1f} MB{text}")
    print(f"written to {args.out}; serve it: penstock up --model {args.out}")


def run_train_heads(args: argparse.Namespace) -> None:
    from services.modeltools.heads.answers import Sampling
    from services.modeltools.heads.training import Recipe
    from services.modeltools.train_heads import train_heads

    recipe = Recipe(args.heads, args.layers, args.epochs, args.learning_rate, args.seed)
    sampling = Sampling(args.tokens, args.temperature, args.seed)
    options = {
        "prompts": args.prompts,
        "vocabulary": args.vocabulary,
        "num_threads": args.num_threads,
        "force": args.force,
    }
    result = train_heads(args.model, args.out, sampling, recipe, **options)
    print(f"right guesses, of {result.num_tokens:,} tokens that the heads have not seen:")
    for number, share in enumerate(result.accuracies, 2):
        print(f"  {number} tokens ahead {share:7.1%}")
    print(f"written to {args.out}; use them: penstock up --model {args.model} --heads {args.out}")


def redis_of(redis_url: str | None, data_dir: Path | None) -> str:
    """The Redis that is meant: by a flag, by the environment, or penstock up's own. Raises
    StartupError if it can't be there.
    """
    if redis_url is None and data_dir is None:
        redis_url = os.environ.get("PENSTOCK_REDIS_URL")
    if redis_url is not None:
        return redis_url
    from services.operator.redis_server import socket_path, url_of

    folder = data_dir or Path(os.environ.get("PENSTOCK_DATA_DIR") or DEFAULT_DATA_DIR)
    if not socket_path(folder).exists():
        hint = "" if data_dir else "; of another --data-dir, or of a Redis of your own (--redis-url), say which"
        raise StartupError(f"nothing runs with its data in {folder}: penstock up starts it{hint}")
    return url_of(folder)


if __name__ == "__main__":
    sys.exit(main())
