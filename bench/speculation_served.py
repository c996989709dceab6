"""What does a server's own speculation gain? Any two with OpenAI's completions: one without it, and the same with it.

Method: the prompts of bench.speculation (those without a schema, which every server asks for in
another way), one stream, end tokens ignored; the two servers in turns. Tokens/s from the first
piece of text to the last: without the prompt. The median of the rounds' ratios counts; the first
round, in which prompts come into caches, does not. Beside it: how many texts of the second are not
the first's. Each request has a cache_salt of its own: a server that drafts from earlier answers
(Penstock does) would have the same answer before it.

    llama-server -m FILE --port 8001; llama-server -m FILE --port 8002 --spec-type ngram-simple
    --spec-ngram-simple-size-n 2
    python -m bench.speculation_served http://127.0.0.1:8001 http://127.0.0.1:8002
"""

import argparse
import asyncio
import json
import secrets
import statistics
from urllib.parse import urlsplit

import uvloop

from bench.load import Stream, post
from bench.served import Answer, read, server_of
from bench.speculation import Kind, chat_text, kinds


async def ask(url: str, model: str, prompt: str, kind: Kind, num_tokens: int) -> Answer:
    parts = urlsplit(url)
    body: dict[str, object] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": kind.params.temperature,
        "seed": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": secrets.token_hex(8),
    }
    packed = post(parts.netloc, parts.path.rstrip("/") + "/v1/completions", body)
    _, stream = await asyncio.get_running_loop().create_connection(
        lambda: Stream(packed), parts.hostname or "localhost", parts.port or 80
    )
    await stream.ended
    answer = read(stream)
    if answer.error or not answer.tpot_s > 0:
        raise SystemExit(f"{url}: {answer.error or 'the text came in one piece'}")
    return answer


def compare(
    servers: list[tuple[str, str]], kind: Kind, prompt: str, args: argparse.Namespace, runner: asyncio.Runner
) -> dict[str, object]:
    """One row of the table. servers: address and model, the one without speculation first."""
    ratios: list[float] = []
    plain: list[float] = []
    num_different = 0
    for number in range(args.rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        found = {place: runner.run(ask(*servers[place], prompt, kind, args.tokens)) for place in order}
        if number:
            ratios.append(found[0].tpot_s / found[1].tpot_s)
            plain.append(1 / found[0].tpot_s)
            num_different += found[0].text != found[1].text
    return {
        "kind": kind.name,
        "ratio": round(statistics.median(ratios), 3),
        "plain_tokens_per_s": round(statistics.median(plain), 1),
        "texts_that_differ": f"{num_different} of {args.rounds}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A server's own speculation: tokens/s with it over without.")
    parser.add_argument("plain", help="the server without speculation, as in http://127.0.0.1:8001")
    parser.add_argument("drafting", help="the same with it")
    parser.add_argument("--kinds", nargs="+", help="some of the kinds, by the first word of their names (default: all)")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-chat-marks", action="store_true", help="prompts without ChatML's marks")
    args = parser.parse_args()
    servers = [server_of(url, None) for url in (args.plain, args.drafting)]
    rows = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for kind in kinds():
            if kind.constraint is None and (args.kinds is None or kind.name.split(",")[0] in args.kinds):
                rows.append(compare(servers, kind, chat_text(kind, has_marks=not args.no_chat_marks), args, runner))
                print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    print(json.dumps({"servers": [url for url, _ in servers], "results": rows}))


if __name__ == "__main__":
    main()
