"""A GGUF file alone, at batch 1: prefill and decode tokens/s, ours and llama.cpp's in turns. No server on either side.

Method: a prompt, then greedy tokens. Ours is the compute loop in one process (bench.loop): prefill is the time of a run with one token, decode that of
a run with --tokens more, less that. llama.cpp is driven by llama-cpp-python, one call a token (bench/llama.py), in the environment whose Python --peer
names. The median of the rounds counts, and of the rounds' ratios.

    python3 -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python
    python -m bench.gguf FILE.gguf --peer /tmp/llama/bin/python
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from bench.loop import Loop

Rates = dict[int, dict[str, float]]  # by the context


def run_ours(loop: Loop, contexts: list[int], num_tokens: int) -> Rates:
    found = {}
    for context in contexts:
        first, all_of_it = loop.run(1, context, 1)["seconds"], loop.run(1, context, num_tokens + 1)["seconds"]
        found[context] = {"prefill": context / first, "decode": num_tokens / (all_of_it - first)}
    return found


def run_peer(python: Path, file: Path, threads: int, contexts: list[int], num_tokens: int) -> tuple[str, Rates]:
    command = [str(python), str(Path(__file__).with_name("llama.py")), str(file), "--threads", str(threads), "--tokens", str(num_tokens)]
    try:
        done = subprocess.run([*command, "--context", *map(str, contexts)], capture_output=True, text=True, timeout=600)
    except OSError as error:
        raise SystemExit(f"--peer {python}: {error}") from None
    if done.returncode:
        raise SystemExit(f"--peer {python}: {(done.stderr.strip() or 'it failed').splitlines()[-1]}")
    found = json.loads(done.stdout)
    return found["version"], {int(context): rates for context, rates in found["rates"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="A GGUF file alone at batch 1, and llama.cpp beside it.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--peer", type=Path, help="the Python of an environment with llama-cpp-python; by default ours alone")
    parser.add_argument("--context", type=int, nargs="+", default=[32, 512], help="of the prompt (default: 32 512)")
    parser.add_argument("--tokens", type=int, default=128, help="to decode (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    args = parser.parse_args()
    if not args.file.is_file():
        raise SystemExit(f"{args.file}: no such file")
    ours: list[Rates] = []
    theirs: list[Rates] = []
    version = ""
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(["--model", str(args.file), "--dtype", "bfloat16", "--no-prefix-caching", "--kv-cache-memory", "1GiB"], Path(folder) / "loop.log")
        try:
            run_ours(loop, args.context, 8)  # warm
            for _ in range(args.rounds):
                ours.append(run_ours(loop, args.context, args.tokens))
                if args.peer:
                    version, rates = run_peer(args.peer, args.file, loop.num_threads, args.context, args.tokens)
                    theirs.append(rates)
        finally:
            loop.close()
    figures = {}
    for context in args.context:
        for kind in ("prefill", "decode"):
            name, mine = f"{kind} at {context}", [each[context][kind] for each in ours]
            figures[name] = {"ours": round(statistics.median(mine), 1)}
            line = f"{name:16} {statistics.median(mine):9.1f} tokens/s"
            if theirs:
                other = [each[context][kind] for each in theirs]
                ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
                figures[name] |= {"theirs": round(statistics.median(other), 1), "ratio": round(ratio, 2)}
                line += f"   llama.cpp {statistics.median(other):9.1f}   ratio {ratio:5.2f}"
            print(line)
    print(json.dumps({"file": args.file.name, "peer": f"llama-cpp-python {version}" if version else None, "rounds": args.rounds, "figures": figures}))


if __name__ == "__main__":
    main()
