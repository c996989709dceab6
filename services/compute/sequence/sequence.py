"""Sequence: a request, its tokens, and its keys and values.

add                  schedule: a place and blocks
 |      +---------+ -----------------------------> +---------+
 +----> | WAITING |                                | RUNNING | <--+ a step: see tokens.py
        +---------+ <----------------------------- +---------+ ---+
             |        preempted: blocks given back   |     ^
             |                                  held |     | the mask of its grammar is ready
             | finish                                v     |
             v                                     +---------+
        +---------+ <----------------------------- |  HELD   |
        |  ENDED  |  finish, from any state        +---------+
        +---------+  (blocks are free at once)

schedule   the step's tokens count as computed from here on; drafts may be appended for it
launch     the step runs on the device: its token is PENDING
collect    the step is read: drafts and PENDING are settled
decide     the log's next token is confirmed; or all from there on is truncated, and it is appended
take back  the mask came too late: the row is computed again; until then the sequence is HELD
preempt    nothing is computed any more; tokens stay, and are computed again when there is a place

A step in flight: schedule -> launch -> (the next step: schedule -> launch) -> collect -> send -> decide.
Where only the host draws, collect follows launch at once.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from services.compute.sequence.kv import Kv
from services.compute.sequence.request import Request
from services.compute.sequence.tokens import Tokens
from shared.model.arrays import Array


class RowKey(NamedTuple):
    """A token of a sequence: names a row of logits, and all that is made of it, by the token that it
    decides."""

    handle: int
    position: int  # in the token log, from 1


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The logprobs of some consecutive tokens of a prompt, and of the k likeliest in their
    places."""

    logprobs: Array  # [n] float32
    ranks: Array  # [n] int32, from 1
    top_token_ids: Array  # [n, k] int32
    top_logprobs: Array  # [n, k] float32


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` change by their own verbs, `kv` by its verbs and cache/; the scheduler and what reads a step
    write the rest."""

    request: Request
    tokens: Tokens
    kv: Kv = field(default_factory=Kv)
    rank: float = 0.0  # place in the order of admission and, from the other end, of preemption
    has_begun: bool = False
    is_finished: bool = False
    num_cached_tokens: int = 0  # of the prompt, found computed when the sequence first began
    num_preemptions: int = 0
    num_queued_tokens: int = 0  # when it was queued last: decisions may still come while it waits
    # prompt tokens after the first whose logprobs are computed, by the step that was scheduled last at the
    # latest
    num_scored_tokens: int = 0
    scored: list[ScoredTokens] = field(default_factory=list)  # their logprobs, step by step
    pooled: Array | None = None  # [hidden] float64, the sum of the hidden states pooled so far
    handle: int = field(init=False)  # the request's

    def __post_init__(self) -> None:
        self.handle = self.request.handle

    @property
    def num_prompt_ids(self) -> int:
        """Tokens of the prompt, without holes."""
        return self.tokens.num_prompt - self.request.layout.num_holes

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.tokens.ids) - self.kv.num_computed

    @property
    def longest_chunk(self) -> int:
        """How many tokens may be computed next at once: a segment's, at most."""
        return self.request.layout.chunk_end(self.kv.num_computed, len(self.tokens.ids)) - self.kv.num_computed

    def chunk(self, room: int, max_tokens: int) -> int:
        """How many tokens are computed next, with room for so many, or for max_tokens if they are of an image that
        is computed whole."""
        count = min(self.longest_chunk, room)
        if not self.request.sees_whole_images or count <= 0:
            return count
        first, end = self.kv.num_computed, self.kv.num_computed + count
        cut = next((run for run in self.request.images if run.start < end < run.end), None)
        if cut is None:
            return count
        if cut.start > first:
            return cut.start - first
        return cut.end - first if cut.end - first <= max_tokens else 0

    @property
    def max_num_tokens(self) -> int:
        """The longest it can become."""
        return self.tokens.num_prompt + (self.request.params.max_tokens or 0)

    @property
    def is_scored(self) -> bool:
        """Whether no logprobs of its prompt are missing."""
        return self.request.params.prompt_logprobs is None or self.num_scored_tokens == self.tokens.num_prompt - 1

    @property
    def num_reusable_tokens(self) -> int:
        """How many first tokens may take another's KV: neither the last token, nor what is only
        foreseen, nor what logprobs are still computed from."""
        embedding = self.request.embedding
        if embedding is not None and embedding.pooling != "last":
            return 0  # the cache holds keys and values, and no hidden states
        decided = min(len(self.tokens) - 1, self.tokens.num_decided)
        return decided if self.is_scored else min(decided, self.num_scored_tokens)

    def pooled_tokens(self, first: int, last: int) -> range:
        """Which of the tokens [first, last) have hidden states that go into the embedding."""
        embedding = self.request.embedding
        if embedding is None:
            return range(0)
        begin = max(first, self.tokens.num_prompt - 1) if embedding.pooling == "last" else first
        return range(begin, min(last, 1) if embedding.pooling == "cls" else last)

    @property
    def next_position(self) -> int:
        """The position in the token log of the token to be decided next."""
        return self.tokens.num_output + 1

    def history(self, num_tokens: int) -> Array:
        """The first num_tokens, prompt and output, without holes and images: [n] int64."""
        token_ids = self.tokens.history(num_tokens)
        return token_ids if self.request.is_plain else token_ids[token_ids >= 0]

    def prefix(self) -> "Prefix":
        """All its tokens, as they are now."""
        return Prefix(self, len(self.tokens.ids))


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first tokens of a sequence, on which a row of logits is computed: the row decides the
    token after them. Its edits follow from these tokens, whatever stands behind them already."""

    sequence: Sequence
    num_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.sequence.tokens.num_prompt

    @property
    def position(self) -> int:
        """The log position of the token that the row decides."""
        return self.num_output_tokens + 1

    @property
    def key(self) -> RowKey:
        return RowKey(self.sequence.handle, self.position)

    @property
    def previous_token_id(self) -> int:
        """The output token before the one that the row decides; -1 if there is none."""
        return self.sequence.tokens.ids[self.num_tokens - 1] if self.num_output_tokens else -1
