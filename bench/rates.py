"""How many tokens/s does a server decode and prefill? Any with OpenAI's completions, by the number
of streams, at one length.

Method: the prose, greedy, of bench.served. Prefill: a request alone that asks for one token; its
prompt's tokens (the server's count) over TTFT, the best of
--rounds. Decode: so many requests at once; the tokens that come while every stream has begun and
none has ended, over that time: no prompt is
computed in it. No two requests begin alike, so a prefix cache finds nothing. Servers are compared
in turns, in one run of the machine.

    python -m bench.rates http://127.0.0.1:8000 --streams 1 8 64 --prompt-tokens 512
"""

import argparse
import asyncio
import bisect
import json
import math

import uvloop

from bench.served import Answer, ask_all, prose, server_of
from services.simulator.trace import TraceRequest


def decode_rate(answers: list[Answer]) -> float:
    """Output tokens/s of all streams together while all decode; not a number if they never did. A
    piece of text is its stream's mean of tokens.
    """
    begin, end = max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers)
    if begin >= end:
        return math.nan
    tokens = 0.0
    for answer in answers:
        pieces = bisect.bisect_right(answer.times, end) - bisect.bisect_right(answer.times, begin)
        tokens += pieces * answer.num_output_tokens / len(answer.times)
    return tokens / (end - begin)


def prefill_rate(answers: list[Answer]) -> float:
    """Prompt tokens/s of the fastest."""
    return max(answer.num_prompt_tokens / answer.times[0] for answer in answers)


def check(answers: list[Answer]) -> list[Answer]:
    for answer in answers:
        if answer.error or not answer.times:
            raise SystemExit(f"a request failed: {answer.error[:300] or 'an answer without text'}")
        if not answer.num_output_tokens:
            raise SystemExit("the server's streams say nothing of usage: there is nothing to count with")
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode and prefill tokens/s of an OpenAI-compatible server.")
    parser.add_argument("url", help="as in http://127.0.0.1:8000")
    parser.add_argument("--model", help="by default the server's first")
    parser.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=[1, 8, 16, 32, 64],
        metavar="N",
        help="at once (default: 1 8 16 32 64)",
    )
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of each stream, roughly (default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=192, help="of each stream (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the best of them counts (default: %(default)s)")
    args = parser.parse_args()
    url, model = server_of(args.url, args.model)
    # Each request of the whole run has a prompt of its own.
    prompts = iter(prose([TraceRequest(args.prompt_tokens, 1)] * (args.rounds * (1 + sum(args.streams)) + 1)))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        def run(count: int, num_output_tokens: int) -> list[Answer]:
            requests = [TraceRequest(args.prompt_tokens, num_output_tokens)] * count
            return check(
                runner.run(ask_all(url, model, [next(prompts) for _ in range(count)], requests, at_once=count))
            )

        run(1, 8)
        prefill = prefill_rate([answer for _ in range(args.rounds) for answer in run(1, 1)])
        print(f"prefill of {args.prompt_tokens}: {prefill:9.1f} tokens/s", flush=True)
        decode = {}
        for count in args.streams:
            rates = [decode_rate(run(count, args.output_tokens)) for _ in range(args.rounds)]
            decode[count] = max(rates)
            print(
                f"{count:4} streams: {decode[count]:9.1f} tokens/s   (rounds: "
                f"{', '.join(f'{each:.1f}' for each in rates)})",
                flush=True,
            )
    print(
        json.dumps(
            {
                "url": url,
                "model": model,
                "prompt_tokens": args.prompt_tokens,
                "prefill": round(prefill, 1),
                "decode": decode,
            }
        )
    )


if __name__ == "__main__":
    main()
