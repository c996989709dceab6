"""`python -m tests.clients.programs.anthropic_tools URL`: the package's own tool runner, whole and
streamed, with its default settings.
"""

import sys
from typing import Any

from anthropic import beta_tool

from tests.clients.documented import names_of
from tests.clients.tasks import MODEL, QUESTION, REPORT, WEATHER

asked: list[str] = []


@beta_tool
def get_weather(place: str) -> str:
    """How the weather is."""
    asked.append(place)
    return WEATHER


if __name__ == "__main__":
    client = names_of("anthropic", sys.argv[1], MODEL)["client"]
    question: Any = {
        "model": MODEL,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [get_weather],
    }
    for streams in (False, True):
        final = client.beta.messages.tool_runner(**question, stream=streams).until_done()
        assert final.content[0].text == REPORT, final
    assert asked == ["Paris", "Paris"], asked
