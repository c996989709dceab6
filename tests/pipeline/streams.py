"""Many streams at once, for tests that disturb them, and what compute says of its load."""

import asyncio
from collections.abc import Awaitable, Callable

from tests.deployment import MODEL, Deployment


async def stream_all(deployment: Deployment, count: int, *, max_tokens: int, disturb: Callable[[], Awaitable[None]] | None = None) -> list[str]:
    """`count` seeded streams at once; `disturb` runs when each of them has had its first tokens. Returns their texts."""
    begun = [asyncio.Event() for _ in range(count)]
    async with deployment.async_client() as client:

        async def one(number: int) -> str:
            text = ""
            stream = await client.completions.create(
                model=MODEL, prompt=f"Question {number}: the", temperature=0.9, seed=number, max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
            )  # fmt: skip
            async for chunk in stream:
                text += chunk.choices[0].text
                if len(text) > 10:
                    begun[number].set()
            begun[number].set()
            return text

        tasks = [asyncio.create_task(one(number)) for number in range(count)]
        if disturb is not None:
            await asyncio.gather(*(event.wait() for event in begun))
            assert not any(task.done() for task in tasks), "the streams were over before they could be disturbed"
            await disturb()
        return await asyncio.gather(*tasks)


def compute_load(deployment: Deployment) -> dict[str, float]:
    """What the one compute replica announced last; it does every second."""
    [compute] = deployment.registry().of("compute")
    return compute.load
