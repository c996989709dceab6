"""ActiveRequest: all that compute knows of a request that it answers for, from its claim to its end. This
module holds data only: what a part means is said in the module that uses it."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgpack

from services.compute.candidates.rows import CandidateRows
from services.compute.sequence import Sequence
from shared.wire.line import Pipeline
from shared.wire.messages import TokenizedRequest
from shared.wire.streams import LOG_TTL_S, attempts_key

NOT_ASKED = float("inf")

Record = tuple[str, bytes]  # a key, and what is written there


@dataclass(frozen=True, slots=True)
class Decision:
    """The log's token at a position of a sequence."""

    handle: int
    position: int
    token_id: int  # -1: the sequence has ended without one; LOST: its log lacks tokens that were decided
    is_finished: bool


@dataclass(slots=True)
class AwaitedRow:
    """A row that a sampler was asked to decide, or will be; see undecided.py."""

    rows: CandidateRows
    index: int
    step: int  # of the message that it is first sent with: decisions of earlier messages are not for it
    asked_at: float = NOT_ASKED  # monotonic, s: when it was sent last
    asked_step: int = 0  # of the message that it was sent with last
    num_silences: int = 0


@dataclass(frozen=True, slots=True)
class Attempts:
    """A request that runs, or was claimed, as Redis remembers it; see quarantine.py."""

    num_begun: int = 0  # trials in which a replica died, or may be dying, since its log last grew
    num_logged: int = 0  # tokens in its log then
    has_run: bool = False  # it has been in a step since: a death may be its doing

    def record(self, request_id: str) -> Record:
        return attempts_key(request_id), msgpack.packb([self.num_begun, self.num_logged, self.has_run])


@dataclass(frozen=True, slots=True)
class Suspect:
    """A request that may have killed a replica waits for its trial."""

    attempts: Attempts
    is_prepared: bool  # a grammar or embeddings are made for it before its first step


@dataclass(slots=True)
class Trial:
    """A suspect runs apart from all others."""

    attempts: Attempts  # before this trial
    num_tokens: int  # decided when the trial began
    is_blamed: bool  # for a death that happens now, as Redis has it
    # its grammar is compiled, which may be what kills: blamed until its first step is over
    is_preparing: bool

    def record(self, request_id: str) -> Record:
        return replace(self.attempts, num_begun=self.attempts.num_begun + self.is_blamed).record(request_id)


@dataclass(frozen=True, slots=True)
class Recovery:
    """A claimed request above suspicion has not gone on yet."""

    num_tokens: int  # decided when it was claimed


@dataclass(frozen=True, slots=True)
class Chunk:
    """A step's part of a prefill. Times are wall clock, s."""

    started_at: float
    ended_at: float
    num_tokens: int
    num_context_tokens: int


@dataclass(slots=True)
class TraceProgress:
    """A traced sequence between its spans; see spans.py."""

    chunks: list[Chunk] = field(default_factory=list)
    num_chunks: int = 0
    decoding_since: float = 0.0  # wall clock, s; 0: its prompt is not computed yet
    num_steps: int = 0  # of decoding


@dataclass(slots=True)
class ActiveRequest:
    """Kept by its sequence's handle, in one place: ComputeService.active. When the request ends, deleting
    it there forgets all of this."""

    sequence: Sequence
    message: TokenizedRequest  # as it came
    entry_id: bytes  # of the group entry that stays pending until the request has ended
    gateway_id: str | None  # the gateway that reads it
    sampler_id: str | None = None  # the sampler that the sequence was introduced to last
    was_claimed: bool = False  # from a replica that died or left
    num_logged_tokens: int = 0  # that it came with
    taken_at: float = field(default_factory=time.time)  # wall clock, s
    scheduled_at: float = 0.0  # wall clock, s, when its first step began; 0: not yet
    rows: dict[int, AwaitedRow] = field(default_factory=dict)  # undecided, by position, rising
    early: dict[int, Decision] = field(default_factory=dict)  # by position: decisions that wait for an earlier one
    quarantine: Suspect | Trial | Recovery | None = None
    trace: TraceProgress | None = None


def queue_records(pipe: Pipeline, records: Iterable[Record]) -> None:
    for key, value in records:
        pipe.set(key, value, ex=LOG_TTL_S)
