"""Sequence: one stream of tokens being computed. No torch here, nor in any other module of the scheduler: they are plain accounting."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared.dry_breakers import Breakers
from shared.messages import EmbeddingParams
from shared.sampling_params import SamplingParams

Array = np.ndarray[Any, Any]

PENDING = -1  # in the place of a sequence's last token: the device has drawn it, and it is not read yet


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The logprobs of some consecutive tokens of a prompt, and of the k likeliest in their places."""

    logprobs: Array  # [n] float32
    ranks: Array  # [n] int32, from 1
    top_token_ids: Array  # [n, k] int32
    top_logprobs: Array  # [n, k] float32


@dataclass(slots=True, eq=False)
class Sequence:
    """Only Scheduler and BlockManager change what is below `eos_token_ids`; only Scheduler appends tokens."""

    handle: int  # unique in this process; names the sequence in StepCandidates
    request_id: str
    token_ids: list[int]  # the prompt, then the decided tokens, then those that compute foresees, of which the last may be PENDING
    num_prompt_tokens: int
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0  # smaller is more urgent
    arrived_at: float = 0.0  # s, on the clock of whoever drives the scheduler
    deadline: float | None = None  # on the same clock: if it has not begun by then, it is not worth beginning
    group_id: str | None = None  # sequences of one prompt (n > 1) share its blocks
    cache_salt: str = ""  # only sequences of one salt share cached prefixes
    embedding: EmbeddingParams | None = None  # set: its prompt is computed, and no token is sampled; its pooling is said
    rank: float = 0.0  # its place in the order of admission and, from the other end, of preemption
    num_computed_tokens: int = 0  # tokens whose KV is written, or will be by the step that was scheduled last
    num_undecided_tokens: int = 0  # the last ones, foreseen: no log holds them yet
    is_ending: bool = False  # the last token is foreseen to be its last: nothing more is computed unless the decision says otherwise
    num_cached_tokens: int = 0  # of the prompt, found computed when it first began
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)  # one block id per block_size tokens
    block_hashes: list[bytes] = field(default_factory=list)  # of its first full blocks, as far as they were needed
    num_committed_blocks: int = 0  # its first blocks, which the prefix cache has been offered
    num_shared_blocks: int = 0  # blocks that others held already when it began
    has_shared_tail: bool = False  # the block it writes next may be another's as well
    num_scored_tokens: int = 0  # of the prompt, after its first: those whose logprobs are computed, or will be by the step that was scheduled last
    scored: list[ScoredTokens] = field(default_factory=list)  # their logprobs, step by step
    dry_breakers: Breakers = field(default_factory=dict)  # over which no repetition reaches that DRY penalizes
    pooled: Array | None = None  # [hidden] float64, the sum of the hidden states that were pooled so far
    has_begun: bool = False
    is_finished: bool = False
    _counts: Counter[int] = field(default_factory=Counter)
    _num_counted: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_pending(self) -> bool:
        """Whether the last token is in a step in flight."""
        return self.token_ids[-1] == PENDING

    @property
    def num_decided_tokens(self) -> int:
        return len(self.token_ids) - self.num_undecided_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

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
        """Its first tokens whose KV may be another's: at least its last token is left over, what is only foreseen, and what logprobs are still asked of."""
        if self.embedding is not None and self.embedding.pooling != "last":
            return 0  # the cache holds keys and values, and no hidden states
        decided = min(self.num_tokens - 1, self.num_decided_tokens)
        return decided if self.is_scored else min(decided, self.num_scored_tokens)

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
        for token_id in self.token_ids[max(num_tokens, self.num_prompt_tokens) : self.num_prompt_tokens + self._num_counted]:
            self._counts[token_id] -= 1
            if not self._counts[token_id]:
                del self._counts[token_id]
        self.num_undecided_tokens -= len(self.token_ids) - num_tokens
        del self.token_ids[num_tokens:]
        self._num_counted = min(self._num_counted, self.num_output_tokens)

    def output_counts(self) -> Counter[int]:
        """How often each token is in the output; counted up as the sequence grows."""
        for token_id in self.token_ids[self.num_prompt_tokens + self._num_counted :]:
            self._counts[token_id] += 1
        self._num_counted = self.num_output_tokens
        return self._counts
