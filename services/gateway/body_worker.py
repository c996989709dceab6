"""`python -m services.gateway.body_worker`: the gateway's helper that parses long bodies, so that no body stalls the streams of others.

A question is the body's kind, one byte, and the body; the answer is the checked body, or Invalid. Schemas in it are
looked through here, too: one that is too long is refused, and its megabytes never come to the gateway's loop.
"""

import gc

from services.gateway.openai.parse import BODIES, INVOCATION, parse
from services.gateway.openai.schemas import ChatCompletionBody, GenerateBody
from services.gateway.worker import run_worker

KINDS = (*BODIES, INVOCATION)


def answer(question: bytes) -> object:
    gc.collect()  # what the body before has left
    body = parse(KINDS[question[0]], question[1:])
    if isinstance(body, GenerateBody):
        body.constraint()
    if isinstance(body, ChatCompletionBody):
        body.calling().forced()
    return body


if __name__ == "__main__":
    gc.disable()  # millions of small objects at once, freed as soon as they are checked: looking for cycles among them doubles the time
    run_worker(answer)
