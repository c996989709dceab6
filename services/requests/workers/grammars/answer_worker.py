"""`python -m services.requests.workers.grammars.answer_worker`: the gateway's helper that holds answers
against their schemas.

Schemas come from clients, and a pattern may take for ever: then this process is killed, and nothing
else with it. A question is a packed list of function, schema as JSON, and text; the answer is a list
of what does not hold.
"""

import json
from typing import Any

from services.requests.text.schemas.validate import problems_of
from shared.process.plain import unpack
from shared.process.priority import run_behind
from shared.process.worker import run_worker

NICENESS = 19  # a check may come too late; the stages may not


def answer(question: bytes) -> list[dict[str, Any]]:
    found = []
    for name, schema, text in unpack(question):
        found += [{**({"function": name} if name else {}), **each} for each in problems_of(json.loads(schema), text)]
    return found


if __name__ == "__main__":
    run_behind(NICENESS)
    run_worker(answer)
