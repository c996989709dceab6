"""`python -m tests.clients.programs.mistralai_fim URL`: Mistral's package fills a gap, whole and
streamed. The script has no task for it.
"""

import sys
from typing import Any

from tests.clients.documented import names_of
from tests.clients.tasks import MODEL, OTHERWISE

if __name__ == "__main__":
    client = names_of("mistralai", sys.argv[1], MODEL)["client"]
    gap: Any = {
        "model": MODEL,
        "prompt": "def add(a, b):\n    return ",
        "suffix": "\n\nprint(add(1, 2))",
        "random_seed": 1,
    }
    whole = client.fim.complete(**gap)
    assert whole.choices[0].message.content == OTHERWISE and whole.usage.completion_tokens > 1, whole
    pieces = [event.data.choices[0].delta.content or "" for event in client.fim.stream(**gap)]
    assert len(pieces) > 1 and "".join(pieces) == OTHERWISE, pieces
