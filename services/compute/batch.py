"""ScheduledBatch: the scheduler's decision for one step. Plain values that nothing changes
afterwards."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One sequence's part of a step: the tokens whose KV the step computes."""

    handle: int
    token_ids: tuple[int, ...]  # the last may be PENDING: the step in flight has drawn it
    # of the sequence, before the step: where the first of token_ids stands
    num_computed_tokens: int
    block_table: tuple[int, ...]  # blocks for all tokens up to the last of token_ids, at least
    # the last of token_ids is the sequence's last: its logits decide the next token
    is_sampled: bool
    first_target: int = 0  # where the first of target_ids stands in the sequence
    # tokens of its prompt whose logprobs the step computes, each from the row of the token before
    # it
    target_ids: tuple[int, ...] = ()
    # of token_ids, those whose hidden states go into the sequence's embedding
    pooled: range = range(0)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose KV the row's attention reads."""
        return self.num_computed_tokens + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: single tokens of sequences that are one token behind ("decodes"), then chunks of
    others, in one ragged batch."""

    rows: tuple[BatchRow, ...]
    num_decodes: int  # of the rows, the first ones
    # (from, to), before the step: all are read before any is written
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([row.num_tokens for row in self.rows])

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose KV the step's attention reads."""
        return sum([row.num_context_tokens for row in self.rows])

    @property
    def has_targets(self) -> bool:
        """Whether logprobs of prompts are computed."""
        return any(row.target_ids for row in self.rows)

    @property
    def embedded(self) -> list[BatchRow]:
        """The rows of which hidden states are wanted."""
        return [row for row in self.rows if row.pooled]

    @property
    def sampled(self) -> list[int]:
        """The handles of the sequences that get a token from this step, in the order of their rows
        of logits."""
        return [row.handle for row in self.rows if row.is_sampled]
