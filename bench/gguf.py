"""A GGUF file alone, ours and llama.cpp's in turns: prefill and decode tokens/s, and the memory. No
server on either side.

Method: a prompt, then greedy tokens. Ours is the compute loop in one process (bench.loop): prefill
is the time of a run with one token, decode that of a run with --tokens more, less that. llama.cpp's
figures are those of its own tools, llama-bench and llama-batched-bench, with as many threads;
--peer names their folder. The median of the rounds counts, and of the rounds' ratios.

    python -m bench.gguf FILE.gguf --peer /tmp/llama/bin
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.loop import Loop


@dataclass(frozen=True, slots=True)
class Case:
    """The case that one figure is of."""

    kind: str  # prefill or decode
    context: int  # tokens of each prompt
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.kind} at {self.context}" + (f", batch {self.batch}" if self.batch > 1 else "")


def run_ours(loop: Loop, case: Case, num_tokens: int) -> float:
    first = loop.run(case.batch, case.context, 1)["seconds"]
    if case.kind == "prefill":
        return case.context / first
    return case.batch * num_tokens / (loop.run(case.batch, case.context, num_tokens + 1)["seconds"] - first)


def run_peer(folder: Path, file: Path, threads: int, case: Case, num_tokens: int) -> float:
    """Returns tokens/s. llama-bench has no batches."""
    if case.batch == 1:
        what = (
            ["-p", str(case.context), "-n", "0"]
            if case.kind == "prefill"
            else ["-p", "0", "-n", str(num_tokens), "-d", str(case.context)]
        )
        return float(run_tool(folder / "llama-bench", file, threads, [*what, "-r", "1", "-o", "jsonl"])["avg_ts"])
    cells = case.batch * (case.context + num_tokens)
    sizes = ["-npp", str(case.context), "-ntg", str(num_tokens), "-npl", str(case.batch), "-c", str(cells)]
    return float(
        run_tool(folder / "llama-batched-bench", file, threads, [*sizes, "--output-format", "jsonl"])["speed_tg"]
    )


def run_tool(tool: Path, file: Path, threads: int, arguments: list[str]) -> dict[str, Any]:
    """Run one of llama.cpp's tools. Returns its last line of JSON."""
    try:
        done = subprocess.run(
            [str(tool), "-m", str(file), "-t", str(threads), *arguments], capture_output=True, text=True, timeout=600
        )
    except OSError as error:
        raise SystemExit(f"--peer: {error}") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{tool.name}: {(done.stderr.strip() or 'it printed no figures').splitlines()[-1]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def peer_version(folder: Path) -> str:
    done = subprocess.run([str(folder / "llama-bench"), "--version"], capture_output=True, text=True)
    return next(iter((done.stdout + done.stderr).splitlines()), "unknown").removeprefix("version: ")


def main() -> None:
    parser = argparse.ArgumentParser(description="A GGUF file alone, and llama.cpp beside it.")
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--peer", type=Path, help="the folder of llama-bench and llama-batched-bench; by default ours alone"
    )
    parser.add_argument("--context", type=int, nargs="+", default=[32, 512], help="of the prompt (default: 32 512)")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8], help="sequences that are decoded together (default: 1 8)"
    )
    parser.add_argument("--tokens", type=int, default=128, help="to decode (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--activations", choices=["int8", "bfloat16"], default="int8", help="ours (default: %(default)s)"
    )
    args = parser.parse_args()
    if not args.file.is_file():
        raise SystemExit(f"{args.file}: no such file")
    cases = [Case("prefill", context) for context in args.context]
    cases += [Case("decode", args.context[0], batch) for batch in args.batch]
    ours: dict[Case, list[float]] = {case: [] for case in cases}
    theirs: dict[Case, list[float]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", str(args.file), "--dtype", "bfloat16", "--activations", args.activations]
        loop = Loop([*flags, "--no-prefix-caching", "--kv-cache-memory", "1GiB"], Path(folder) / "loop.log")
        try:
            run_ours(loop, cases[-1], 8)  # warm
            for _ in range(args.rounds):
                for case in cases:
                    ours[case].append(run_ours(loop, case, args.tokens))
                    if args.peer:
                        theirs[case].append(run_peer(args.peer, args.file, loop.num_threads, case, args.tokens))
            memory = loop.resident_bytes()
        finally:
            loop.close()
    figures = {}
    for case in cases:
        figures[str(case)] = {"ours": round(statistics.median(ours[case]), 1)}
        line = f"{case!s:24} {statistics.median(ours[case]):9.1f} tokens/s"
        if args.peer:
            ratio = statistics.median(a / b for a, b in zip(ours[case], theirs[case], strict=True))
            figures[str(case)] |= {"theirs": round(statistics.median(theirs[case]), 1), "ratio": round(ratio, 2)}
            line += f"   llama.cpp {statistics.median(theirs[case]):9.1f}   ratio {ratio:5.2f}"
        print(line)
    sizes = {"file_mib": args.file.stat().st_size >> 20, "resident_mib": memory >> 20}
    print(
        f"{'memory':24} {sizes['resident_mib']:9} MiB of the process, which reserves 1 GiB for a KV cache; the file "
        f"has {sizes['file_mib']}"
    )
    peer = f"llama.cpp {peer_version(args.peer)}" if args.peer else None
    print(
        json.dumps(
            {
                "file": args.file.name,
                "peer": peer,
                "rounds": args.rounds,
                "activations": args.activations,
                "figures": figures,
                **sizes,
            }
        )
    )


if __name__ == "__main__":
    main()
