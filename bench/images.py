"""The cost of images: requests/s and TTFT of chats about images, beside the same chats without, and
the pauses of other streams meanwhile.

Method: --num-requests chats at once, streamed, greedy, end tokens ignored, about --num-images
different images (gradients and noise, JPEG), each a few times. Four turns: without images; with
images that the server has not seen; with the same again; and a stream of text alone that runs while
new images come, whose longest pause is told. The encoder's time is the server's own metric, where
it has one. Any server with OpenAI's chats and ignore_eos can be measured.

    python -m bench.images http://127.0.0.1:8000 [--num-requests 64] [--num-images 16] [--size 640x480] [--detail low]
"""

import argparse
import asyncio
import base64
import io
import json
import re
import statistics
import time
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from PIL import Image

from bench.served import server_of

QUESTION = "Look at this, and tell what stands there, number {number}, in as many words as you have."


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's; times in seconds from its sending."""

    times: list[float]  # of each piece of text
    ended_at: float
    num_prompt_tokens: int
    text: str

    @property
    def longest_pause_s(self) -> float:
        return max((later - before for before, later in zip(self.times, self.times[1:], strict=False)), default=0.0)


def picture(width: int, height: int, seed: int) -> str:
    """A data URL of gradients and noise."""
    rng = np.random.default_rng(seed)
    across, down = np.meshgrid(np.linspace(0, 200, width), np.linspace(0, 200, height))
    pixels = np.stack([across, down, (across + down) / 2], -1)[:, :: 1 - 2 * (seed % 2)] + rng.integers(
        0, 55, (height, width, 3)
    )
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


async def ask(
    client: httpx.AsyncClient, model: str, number: int, image: str | None, options: argparse.Namespace, max_tokens: int
) -> Answer:
    parts: list[dict[str, Any]] = [{"type": "text", "text": QUESTION.format(number=number)}]
    if image is not None:
        parts.append({"type": "image_url", "image_url": {"url": image, "detail": options.detail}})
    body = {
        "model": model,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_at = time.perf_counter()
    times: list[float] = []
    text, num_prompt_tokens = "", 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{reply.status_code}: {(await reply.aread()).decode(errors='replace')[:300]}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    times.append(time.perf_counter() - started_at)
                    text += piece
            num_prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", num_prompt_tokens)
    return Answer(times, time.perf_counter() - started_at, num_prompt_tokens, text)


async def encoder_s(client: httpx.AsyncClient) -> float | None:
    reply = await client.get("/metrics")
    found = re.findall(r"^penstock_image_encoder_seconds_total\{.*\} (\S+)$", reply.text, re.MULTILINE)
    return sum(map(float, found)) if found else None


async def crowd(
    client: httpx.AsyncClient, model: str, images: list[str | None], options: argparse.Namespace, name: str
) -> list[Answer]:
    """All at once; prints a row."""
    before, started_at = await encoder_s(client), time.perf_counter()
    answers = await asyncio.gather(
        *(ask(client, model, number, image, options, options.max_tokens) for number, image in enumerate(images))
    )
    seconds = time.perf_counter() - started_at
    await asyncio.sleep(1.5)  # the figures are announced each second
    after = await encoder_s(client)
    share = f"{(after - before) / seconds:6.2f}" if before is not None and after is not None else "     -"
    first = sorted(each.times[0] for each in answers)
    tokens = statistics.median(each.num_prompt_tokens for each in answers)
    row = (
        f"{name:24} {len(answers) / seconds:9.3f} {statistics.median(first):10.2f} "
        f"{first[int(0.99 * (len(first) - 1))]:10.2f} {tokens:14.0f} {share:>15}"
    )
    print(row, flush=True)
    return answers


async def measure(url: str, model: str, options: argparse.Namespace) -> None:
    width, height = map(int, options.size.split("x"))
    pictures = [picture(width, height, options.seed + number) for number in range(options.num_images)]
    images = [pictures[number % len(pictures)] for number in range(options.num_requests)]
    async with httpx.AsyncClient(
        base_url=url, timeout=3600, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as client:
        await ask(client, model, 0, picture(64, 64, options.seed + 10_000), options, 1)  # what is loaded with the first
        await asyncio.sleep(1.5)
        print(f"{'':24} requests/s TTFT p50 s TTFT p99 s tokens, prompt encoder's share")
        await crowd(client, model, [None] * len(images), options, "without images")
        new = await crowd(client, model, list(images), options, "images, new")
        again = await crowd(client, model, list(images), options, "images, seen before")
        print(
            "answers that differ the second time: "
            f"{sum(one.text != other.text for one, other in zip(new, again, strict=True))}"
        )
        quiet = await ask(client, model, 0, None, options, 200)
        others = [picture(width, height, options.seed + 1000 + number) for number in range(4)]
        running = asyncio.create_task(ask(client, model, 1, None, options, 400))
        await asyncio.sleep(quiet.times[20])
        await asyncio.gather(*(ask(client, model, number, image, options, 1) for number, image in enumerate(others)))
        noticed = await running
        print(
            f"a stream of text: longest pause {quiet.longest_pause_s:.2f} s alone, {noticed.longest_pause_s:.2f} s "
            f"while {len(others)} images are encoded"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.images", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--model", help="by default the server's first")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--num-images", type=int, default=16)
    parser.add_argument("--size", default="640x480", help="of each image (default: %(default)s)")
    parser.add_argument("--detail", choices=("auto", "low", "high"), default="auto")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1, help="of the images: another one makes new ones")
    options = parser.parse_args()
    asyncio.run(measure(*server_of(options.url, options.model), options))


if __name__ == "__main__":
    main()
