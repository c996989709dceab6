"""`python -m tests.clients.programs.openai_agents URL`: an agent with a tool, whole and streamed,
by Responses and by chat completions.
"""

import asyncio
import sys
from typing import Any

from agents import Agent, OpenAIResponsesModel, Runner, function_tool

from tests.clients.documented import names_of
from tests.clients.tasks import MODEL, QUESTION, REPORT, WEATHER

asked: list[str] = []


@function_tool
def get_weather(place: str) -> str:
    """How the weather is."""
    asked.append(place)
    return WEATHER


async def check(model: Any) -> None:
    agent = Agent(name="weather", instructions="You know the weather.", tools=[get_weather], model=model)
    assert (await Runner.run(agent, QUESTION)).final_output == REPORT
    running = Runner.run_streamed(agent, QUESTION)
    deltas = [
        event.data.delta
        async for event in running.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert running.final_output == REPORT and len(deltas) > 1 and "".join(deltas) == REPORT, deltas
    assert asked[-2:] == ["Paris", "Paris"], asked


async def main(url: str) -> None:
    names = names_of("openai-agents", url, MODEL)
    for model in (names["model"], OpenAIResponsesModel(model=MODEL, openai_client=names["client"])):
        await check(model)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
