"""What does it cost the gateway to write a token, in each API?

Method: the events of one streamed answer (a thought, a text, a call), each through the objects that
a stream has: parsed, made into the API's events, and encoded. No Redis, no socket. CPU time of this
process, the median of several runs, the APIs in turn. Ceiling: what orjson needs for the bytes of
an event of OpenAI's, which is all that cannot be saved.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import orjson

from services.requests.dialects.anthropic.events import MessageEvents
from services.requests.dialects.ollama.lines import OllamaLines
from services.requests.dialects.responses.events import ResponseEvents
from services.requests.store.record import ResponseRecord, make_record
from services.requests.text.answers.choice import Choice
from services.requests.text.answers.formats import format_for
from services.requests.text.answers.sse import encode_event
from services.requests.text.answers.translate import Fold, Translation
from shared.model.parsing.answer import Parsing
from shared.wire.messages import TokenEvent

THOUGHT, TEXT = 100, 400  # tokens
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ASKED = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}}


def answer() -> list[TokenEvent]:
    texts = [
        "<think>",
        *[" thought"] * THOUGHT,
        "</think>",
        *[" word"] * TEXT,
        *(CALL[at : at + 4] for at in range(0, len(CALL), 4)),
    ]
    last = len(texts) - 1
    return [
        TokenEvent(
            "r.0", number + 1, number, text, num_prompt_tokens=9, finish_reason="stop" if number == last else None
        )
        for number, text in enumerate(texts)
    ]


def record_of(kind: str) -> ResponseRecord:
    return make_record(
        kind, "model", "model", parsing=Parsing("qwen3", "hermes", ("add",)), fingerprint="fp_0123456789ab"
    )


def write_chunks(events: list[TokenEvent]) -> int:
    record = record_of("chat.completion")
    choice, form = Choice.begin(0, record), format_for(record)
    return sum(len(encode_event(chunk)) for event in events for chunk in form.chunks(choice, event, choice.add(event)))


def write_by(kind: str, make: Callable[[ResponseRecord], Translation]) -> Callable[[list[TokenEvent]], int]:
    def write(events: list[TokenEvent]) -> int:
        record = record_of(kind)
        fold = Fold(record, make(record))
        return sum(len(fold.encode(fold.add(event))) for event in events)

    return write


APIS: dict[str, Callable[[list[TokenEvent]], int]] = {
    "openai": write_chunks,
    "anthropic": write_by("message", MessageEvents),
    "ollama": write_by("ollama", lambda record: OllamaLines(record, is_chat=True)),
    "responses": write_by("response", lambda record: ResponseEvents(record, ASKED)),
}


def ceiling(events: list[TokenEvent]) -> int:
    record = record_of("chat.completion")
    choice, form = Choice.begin(0, record), format_for(record)
    (chunk,) = form.chunks(choice, events[0], choice.add(TokenEvent("r.0", 1, 1, "</think>word")))
    return sum(len(orjson.dumps(chunk)) for _ in events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    runs, events = parser.parse_args().runs, answer()
    times: dict[str, list[float]] = {}
    for _ in range(runs):
        for name, write in (APIS | {"ceiling": ceiling}).items():
            began = time.process_time()
            write(events)
            times.setdefault(name, []).append((time.process_time() - began) / len(events) * 1e6)
    print(json.dumps({f"{name}_us_per_token": round(statistics.median(each), 2) for name, each in times.items()}))


if __name__ == "__main__":
    main()
