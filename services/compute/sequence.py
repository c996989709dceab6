"""Sequence: one stream of tokens being computed. No torch here, nor in any other module of the
scheduler: they are plain accounting.

The states of a sequence:

    add                  schedule: a place and blocks
     |      +---------+ -----------------------------> +---------+
     +----> | WAITING |                                | RUNNING | <--+ a step: see below
            +---------+ <----------------------------- +---------+ ---+
                 |        preempted: blocks given back   |     ^
                 |                                  held |     | its grammar's mask is there
                 | finish                                v     |
                 v                                     +---------+
            +---------+ <----------------------------- |  HELD   |
            |  ENDED  |  finish, from any state        +---------+
            +---------+  (blocks are free at once)

    The tokens of a running sequence, from the first to the last:

      | decided (in the log)          | foreseen | drafts | PENDING |
      |<----- num_decided_tokens ---->|<- num_undecided_tokens ---->|

    schedule   the step's tokens count as computed from here on; drafts may be appended for it
    launch     the step runs on the device: append a PENDING token
    collect    the step is read: the drafts that were drawn are foreseen from here on, the others go,
               and reveal turns PENDING into the token that the sampler will decide
    append     a token that is foreseen, or that is decided
    confirm    the log holds the first foreseen token: it is decided
    truncate   the log holds another: this and all after it are dropped; append adds the log's
    take_back  the mask came too late: the row is computed again; until then the sequence is HELD
    preempt    num_computed_tokens falls to 0; tokens stay, and are computed again when it has a place

    A step in flight: schedule -> launch -> (the next step: schedule -> launch) -> collect -> send -> confirm or truncate.
    Where only the host draws, collect follows launch at once.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shared.model.arrays import Array
from shared.model.dry_breakers import Breakers
from shared.model.sampling_params import SamplingParams
from shared.model.segments import Layout
from shared.model.vision.images import ImageRun
from shared.wire.messages import EmbeddingParams

# in the place of a sequence's last token: the device has drawn it, and it is not read yet
PENDING = -1


class RowKey(NamedTuple):
    """A token of a sequence: what names a row of logits, and all that is made of it, by the token
    that it decides."""

    handle: int
    position: int  # in the token log, from 1


class BlockTable(list[int]):
    """Block ids, a sequence's. Steps hold them as a tuple, the same one as long as nothing changes:
    who keeps a table from step to step need not compare it block by block."""

    _frozen: tuple[int, ...] | None = None

    @property
    def frozen(self) -> tuple[int, ...]:
        if self._frozen is None:
            self._frozen = tuple(self)
        return self._frozen

    def append(self, block_id: int) -> None:
        self._frozen = None
        super().append(block_id)

    def extend(self, block_ids: Iterable[int]) -> None:
        self._frozen = None
        super().extend(block_ids)

    def clear(self) -> None:
        self._frozen = None
        super().clear()

    def __setitem__(self, at: Any, value: Any) -> None:
        self._frozen = None
        super().__setitem__(at, value)


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The logprobs of some consecutive tokens of a prompt, and of the k likeliest in their
    places."""

    logprobs: Array  # [n] float32
    ranks: Array  # [n] int32, from 1
    top_token_ids: Array  # [n, k] int32
    top_logprobs: Array  # [n, k] float32


class TokenCounts:
    """How often each token is among the tokens of a sequence from `first` on. It follows them: each
    costs once when it comes, and once if it is dropped."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.num_counted = 0
        self._ids: Array = np.zeros(64, np.int64)
        self._times: Array = np.zeros(64, np.float32)
        self._place: dict[int, int] = {}  # by token id: where it stands in both

    @property
    def token_ids(self) -> Array:
        """Token ids, each once, in no particular order: [n] int64, a view."""
        return self._ids[: len(self._place)]

    @property
    def times(self) -> Array:
        """How often each of them is there: [n] float32, a view."""
        return self._times[: len(self._place)]

    def follow(self, token_ids: list[int], num_tokens: int) -> None:
        """Count the first num_tokens: what is new, and what was counted beyond them no more."""
        if not self._place and num_tokens - self.first > len(self._ids):
            counted = np.array(token_ids[self.first : num_tokens], np.int64)
            self._ids, times = np.unique(counted[counted >= 0], return_counts=True)
            self._times = times.astype(np.float32)
            self._place = {token_id: place for place, token_id in enumerate(self._ids.tolist())}
            self.num_counted = num_tokens - self.first
        self.drop(token_ids, num_tokens)
        for token_id in token_ids[self.first + self.num_counted : num_tokens]:
            if token_id < 0:
                continue
            place = self._place.setdefault(token_id, len(self._place))
            if place == len(self._ids):
                self._ids, self._times = (np.concatenate((each, np.zeros_like(each))) for each in (self._ids, self._times))
            self._ids[place] = token_id
            self._times[place] += 1
        self.num_counted = max(0, num_tokens - self.first)

    def drop(self, token_ids: list[int], num_tokens: int) -> None:
        """Drop all but the first num_tokens."""
        for token_id in token_ids[max(num_tokens, self.first) : self.first + self.num_counted]:
            place = self._place[token_id]
            self._times[place] -= 1
            if not self._times[place]:
                last = len(self._place) - 1
                self._ids[place], self._times[place] = self._ids[last], self._times[last]
                self._times[last] = 0
                self._place[int(self._ids[place])] = place
                del self._place[token_id]
        self.num_counted = min(self.num_counted, max(0, num_tokens - self.first))


class TokenArray:
    """The tokens of a sequence as numpy has them, copied once."""

    def __init__(self) -> None:
        self._ids = np.zeros(64, np.int64)
        self._num_copied = 0

    def follow(self, token_ids: list[int]) -> Array:
        """[n] int64, a view."""
        if len(token_ids) > len(self._ids):
            self._ids = np.concatenate((self._ids[: self._num_copied], np.zeros(2 * len(token_ids) - self._num_copied, np.int64)))
        self._ids[self._num_copied : len(token_ids)] = token_ids[self._num_copied :]
        self._num_copied = len(token_ids)
        return self._ids[: self._num_copied]

    def drop(self, num_tokens: int) -> None:
        """All but the first num_tokens go."""
        self._num_copied = min(self._num_copied, num_tokens)


@dataclass(slots=True, eq=False)
class Sequence:
    """Only Scheduler and BlockManager change what is below `eos_token_ids`; only Scheduler appends
    tokens."""

    handle: int  # unique in this process; names the sequence in StepCandidates
    request_id: str
    # the prompt, then the decided tokens, then those that compute foresees, of which the last may
    # be PENDING
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0  # smaller is more urgent
    arrived_at: float = 0.0  # s, on the clock of whoever drives the scheduler
    # on the same clock: if it has not begun by then, it is not worth beginning
    deadline: float | None = None
    group_id: str | None = None  # sequences of one prompt (n > 1) share its blocks
    cache_salt: str = ""  # only sequences of one salt share cached prefixes
    tenant_id: str = ""  # whose it is: tenants share the places
    # of the prompt's segments, if it has some: then all numbers of tokens count slots, and tokens are
    # HOLE where nothing is
    layout: Layout | None = None
    # of its prompt, the tokens that stand for images: what is there of each is below 0, and names it
    images: tuple[ImageRun, ...] = ()
    # of its prompt's tokens, where images have rows and columns: [3, n] int64
    positions: Array | None = None
    position_shift: int = 0  # of a token behind the prompt: its position, less its place
    sees_whole_images: bool = False  # an image's tokens see each other, and are computed together
    # set: its prompt is computed, and no token is sampled; its pooling is said
    embedding: EmbeddingParams | None = None
    rank: float = 0.0  # its place in the order of admission and, from the other end, of preemption
    # tokens whose KV is written, or will be by the step that was scheduled last
    num_computed_tokens: int = 0
    num_undecided_tokens: int = 0  # the last ones, foreseen: no log holds them yet
    # where those of them stand that were drafts, and came true
    foreseen_drafts: deque[int] = field(default_factory=deque)
    # the last token is foreseen to be its last: nothing more is computed unless the decision says
    # otherwise
    is_ending: bool = False
    num_cached_tokens: int = 0  # of the prompt, found computed when it first began
    num_preemptions: int = 0
    block_table: BlockTable = field(default_factory=BlockTable)  # one block id per block_size tokens
    # of its first full blocks, as far as they were needed
    block_hashes: list[bytes] = field(default_factory=list)
    num_committed_blocks: int = 0  # its first blocks, which the prefix cache has been offered
    num_shared_blocks: int = 0  # blocks that others held already when it began
    is_restored: bool = False  # a second tier was asked for its blocks
    has_shared_tail: bool = False  # the block it writes next may be another's as well
    # of the prompt, after its first: those whose logprobs are computed, or will be by the step that
    # was scheduled last
    num_scored_tokens: int = 0
    scored: list[ScoredTokens] = field(default_factory=list)  # their logprobs, step by step
    # over which no repetition reaches that DRY penalizes
    dry_breakers: Breakers = field(default_factory=dict)
    prediction: list[int] = field(default_factory=list)  # its output, as the client expects it
    # [hidden] float64, the sum of the hidden states that were pooled so far
    pooled: Array | None = None
    has_begun: bool = False
    is_finished: bool = False
    _output: TokenCounts | None = None  # of the output; None: nobody asked yet
    _seen: TokenCounts | None = None  # of prompt and output
    _history: TokenArray | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_prompt_ids(self) -> int:
        """Tokens of the prompt, without holes."""
        return self.num_prompt_tokens - (self.layout.num_holes if self.layout is not None else 0)

    @property
    def is_pending(self) -> bool:
        """Whether the last token is in a step in flight."""
        return self.token_ids[-1] == PENDING

    @property
    def num_decided_tokens(self) -> int:
        return len(self.token_ids) - self.num_undecided_tokens

    @property
    def num_undecided_steps(self) -> int:
        """How many steps have foreseen what is undecided, at least in part."""
        return self.num_undecided_tokens - len(self.foreseen_drafts)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def longest_chunk(self) -> int:
        """The tokens that may be computed next, at once: a segment's, at most."""
        if self.layout is None or self.num_computed_tokens >= self.layout.starts[-1]:
            return self.num_uncomputed_tokens
        return self.layout.end(self.layout.at(self.num_computed_tokens)) - self.num_computed_tokens

    def chunk(self, room: int, most: int) -> int:
        """How many tokens are computed next, at once, where there is room for so many, or for `most` if
        they are those of an image that is computed whole."""
        count = min(self.longest_chunk, room)
        first, end = self.num_computed_tokens, self.num_computed_tokens + count
        cut = next((run for run in self.images if run.start < end < run.end), None) if self.sees_whole_images and count > 0 else None
        if cut is None:
            return count
        if cut.start > first:
            return cut.start - first
        return cut.end - first if cut.end - first <= most else 0

    @property
    def largest_whole(self) -> int:
        """The tokens of its largest image, if they are computed together."""
        return max((run.count for run in self.images), default=0) if self.sees_whole_images else 0

    @property
    def max_num_tokens(self) -> int:
        """The longest it can become."""
        return self.num_prompt_tokens + (self.params.max_tokens or 0)

    @property
    def is_scored(self) -> bool:
        """Whether no logprobs of its prompt are missing."""
        return self.params.prompt_logprobs is None or self.num_scored_tokens == self.num_prompt_tokens - 1

    @property
    def num_reusable_tokens(self) -> int:
        """The number of first tokens whose KV may be another's: at least its last token is left
        over, what is only foreseen, and what logprobs are still asked of."""
        if self.embedding is not None and self.embedding.pooling != "last":
            return 0  # the cache holds keys and values, and no hidden states
        decided = min(self.num_tokens - 1, self.num_decided_tokens)
        return decided if self.is_scored else min(decided, self.num_scored_tokens)

    def images_in(self, first: int, last: int) -> tuple[ImageRun, ...]:
        """The runs among the tokens [first, last), from there on."""
        return tuple(
            ImageRun(max(run.start - first, 0), min(run.end, last) - max(run.start, first), run.key, run.row + max(0, first - run.start))
            for run in self.images
            if run.start < last and first < run.end
        )

    def pooled_tokens(self, first: int, last: int) -> range:
        """Which of the tokens [first, last) have hidden states that go into its embedding."""
        if self.embedding is None:
            return range(0)
        begin = max(first, self.num_prompt_tokens - 1) if self.embedding.pooling == "last" else first
        return range(begin, min(last, 1) if self.embedding.pooling == "cls" else last)

    @property
    def next_position(self) -> int:
        """The position in the token log of the token to be decided next."""
        return self.num_output_tokens + 1

    def drop_tokens(self, num_tokens: int) -> None:
        """Forget the tokens after the first num_tokens: they were foreseen, and came otherwise."""
        for counts in (self._output, self._seen):
            if counts is not None:
                counts.drop(self.token_ids, num_tokens)
        if self._history is not None:
            self._history.drop(num_tokens)
        while self.foreseen_drafts and self.foreseen_drafts[-1] >= num_tokens:
            self.foreseen_drafts.pop()
        self.num_undecided_tokens -= len(self.token_ids) - num_tokens
        del self.token_ids[num_tokens:]

    def output_counts(self, num_tokens: int) -> TokenCounts:
        """Counts the output's among the first num_tokens."""
        self._output = self._output or TokenCounts(self.num_prompt_tokens)
        self._output.follow(self.token_ids, num_tokens)
        return self._output

    def seen_counts(self, num_tokens: int) -> TokenCounts:
        """Counts the first num_tokens, of prompt and output."""
        self._seen = self._seen or TokenCounts(0)
        self._seen.follow(self.token_ids, num_tokens)
        return self._seen

    def history(self, num_tokens: int) -> Array:
        """The first num_tokens, of prompt and output, without holes and images: [n] int64."""
        self._history = self._history or TokenArray()
        found = self._history.follow(self.token_ids)[:num_tokens]
        return found if self.layout is None and not self.images else found[found >= 0]

    def prefix(self) -> "Prefix":
        """All its tokens, as they are now."""
        return Prefix(self, len(self.token_ids))


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first tokens of a sequence, on which a row of logits is computed: the row decides the
    token after them. Its edits follow from these tokens, whatever stands behind them already."""

    sequence: Sequence
    num_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.sequence.num_prompt_tokens

    @property
    def position(self) -> int:
        """In the token log, of the token that the row decides."""
        return self.num_output_tokens + 1

    @property
    def key(self) -> RowKey:
        return RowKey(self.sequence.handle, self.position)

    @property
    def previous_token_id(self) -> int:
        """The one decided before it; -1: none."""
        return self.sequence.token_ids[self.num_tokens - 1] if self.num_output_tokens else -1
