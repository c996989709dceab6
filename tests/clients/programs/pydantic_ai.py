"""`python -m tests.clients.programs.pydantic_ai URL`: an agent with a tool, streamed and whole, by
chat completions, by Responses and by Messages.
"""

import asyncio
import sys
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIResponsesModel

from tests.clients.documented import names_of
from tests.clients.tasks import MODEL, QUESTION, REPORT, WEATHER


async def check(model: Any) -> None:
    asked: list[str] = []
    agent = Agent(model)

    @agent.tool_plain
    def get_weather(place: str) -> str:
        """How the weather is."""
        asked.append(place)
        return WEATHER

    assert (await agent.run(QUESTION)).output == REPORT
    async with agent.run_stream(QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 1 and "".join(pieces) == REPORT, pieces
    assert asked == ["Paris", "Paris"], asked


if __name__ == "__main__":
    names = names_of("pydantic-ai", sys.argv[1], MODEL)
    for model in (
        names["model"],
        OpenAIResponsesModel(MODEL, provider=names["model"]._provider),
        names["anthropic_model"],
    ):
        asyncio.run(check(model))
