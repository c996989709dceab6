"""How long are sequences without decisions when their sampler dies? Seconds until the first and the
last of them goes on at another.

Method: a real SamplerService and a real Redis (the embedded one, on a Unix socket) that holds the
token logs of 256 sequences, 4,000 tokens each. One message introduces all of them, with a row each,
as compute sends it when a sampler has gone; the sampler replays the logs and decides. On the other
side stands compute's own account of what is undecided, looked at ten times a second: it says how
often compute would have sent everything again. The ceiling: all that must be done is to read the
logs and to make their text again; the table says what that is for a token.

    python -m bench.takeover
"""

import argparse
import json
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import redis

from services.compute.candidates.rows import CandidateRows, new_rows
from services.compute.exchange.active import ActiveRequest, Decision
from services.compute.exchange.exchange import RESEND_EVERY_S
from services.compute.exchange.undecided import Undecided
from services.compute.sequence import Request, Sequence, Tokens
from services.operator.redis_server import socket_path, start_server
from services.sampler.detokenizer import load_tokenizer
from services.sampler.service import SamplerService
from shared.model.arrays import Array
from shared.model.files import DEMO_MODEL
from shared.model.sampling_params import SamplingParams
from shared.process.settings import SamplerSettings
from shared.wire.messages import (
    SequenceIntro,
    StepCandidates,
    StepDecisions,
    TokenEvent,
    TokenizedRequest,
    decode,
    encode,
)
from shared.wire.stage import Stage
from shared.wire.streams import MESSAGE, decisions, log_key

COMPUTE = "compute-bench"


@dataclass(frozen=True, slots=True)
class Takeover:
    sequences: int
    tokens: int  # in each log
    first_s: float  # until the first decision is there
    last_s: float
    sent_again: int  # times that compute would have lost its patience
    answers: int  # messages that brought decisions
    us_per_token: float


def fill_logs(client: "redis.Redis", sequences: int, tokens: int) -> Array:
    """Returns the token ids [sequences, tokens]."""
    token_ids = np.random.default_rng(0).integers(260, 2048, (sequences, tokens))
    for row in range(sequences):
        pipe: Any = client.pipeline(transaction=False)
        for position, token_id in enumerate(token_ids[row].tolist(), 1):
            pipe.xadd(
                log_key(f"bench.{row}"),
                {MESSAGE: encode(TokenEvent(f"bench.{row}", position, token_id, "", 10))},
                id=f"{position}-0",
            )
        pipe.execute()
    return token_ids


def rows_at(position: int, previous: Array) -> CandidateRows:
    """A greedy row for each sequence, computed on its log's last token."""
    count = len(previous)
    rows = new_rows(np.arange(count, dtype=np.int32), np.full(count, position, np.int32), previous.astype(np.int32))
    rows.token_ids[:] = 300
    rows.chosen[:] = 300
    return rows


def watch(client: "redis.Redis", rows: CandidateRows, begun: threading.Event) -> tuple[float, float, int, int]:
    """Compute's side, until all is decided. Returns the seconds to the first and to the last decision,
    how often it would have sent again, and how many messages there were."""
    request = TokenizedRequest("bench", "", "", SamplingParams(max_tokens=1 << 20), np.zeros(1, np.int32), ())
    active = {
        handle: ActiveRequest(
            Sequence(Request(handle, "bench", SamplingParams()), Tokens([0])),
            request,
            b"",
            None,
            sampler_id="sampler-bench",
        )
        for handle in rows.handles.tolist()
    }
    undecided, last_id, first_s, sent_again, answers = Undecided(active), "0-0", 0.0, 0, 0
    begun.wait()
    began = time.monotonic()
    undecided.add(rows, 1)
    undecided.unsent(1)
    while undecided.handles:
        reply: Any = client.xread({decisions(COMPUTE).key: last_id}, block=int(RESEND_EVERY_S * 1000))
        for _, entries in reply.items() if isinstance(reply, dict) else reply or []:
            for entry_id, values in (
                [each for group in entries for each in group] if isinstance(reply, dict) else entries
            ):
                last_id, message = entry_id, decode(StepDecisions, values[MESSAGE])
                undecided.record_reply(message.sampler_id, message.step)
                columns = (message.handles, message.positions, message.token_ids, message.is_finished)
                decided = [Decision(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]
                if undecided.settle(message.step, decided):
                    first_s = first_s or time.monotonic() - began
                    answers += 1
        if late := undecided.silent():
            sent_again += 1
            undecided.of(late, 1)
    return first_s, time.monotonic() - began, sent_again, answers


def measure(url: str, sequences: int, tokens: int) -> Takeover:
    """On an empty Redis at `url`."""
    settings = SamplerSettings(redis_url=url, replica_id="sampler-bench")
    stage = Stage("sampler", settings, model="penstock-demo")
    stage.transport.wait_until_up(10)
    client = redis.Redis.from_url(url)
    client.flushall()
    rows = rows_at(tokens + 1, fill_logs(client, sequences, tokens)[:, -1])
    params, tail = SamplingParams(max_tokens=1 << 20, temperature=0.0), np.array([40], np.int32)
    intros = tuple(SequenceIntro(row, f"bench.{row}", None, params, (), 10, tail) for row in range(sequences))
    packed = encode(rows.message(list(range(sequences)), COMPUTE, 1, intros, []))
    service = SamplerService(stage, settings, load_tokenizer(DEMO_MODEL))
    begun, found = threading.Event(), []
    watching = threading.Thread(target=lambda: found.append(watch(client, rows, begun)))
    watching.start()
    begun.set()
    began = time.perf_counter()
    service.answer(decode(StepCandidates, packed))
    seconds = time.perf_counter() - began
    watching.join()
    service.news.close()
    stage.transport.close()
    client.close()
    first_s, last_s, sent_again, answers = found[0]
    return Takeover(
        sequences,
        tokens,
        round(first_s, 3),
        round(last_s, 3),
        sent_again,
        answers,
        round(1e6 * seconds / (sequences * tokens), 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds until a sampler's sequences go on at another.")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4000)
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder))
        try:
            print("sequences  tokens each  first decision, s  last, s  sent again  µs a token")
            for sequences in sorted({1, args.sequences // 4 or 1, args.sequences}):
                found = measure(f"unix://{socket_path(Path(folder))}", sequences, args.tokens)
                results.append(asdict(found))
                print(
                    f"{found.sequences:9}  {found.tokens:11}  {found.first_s:17}  {found.last_s:7}  "
                    f"{found.sent_again:10}  {found.us_per_token:10}"
                )
        finally:
            server.terminate()
            server.wait()
    print(json.dumps({"takeovers": results}))


if __name__ == "__main__":
    main()
