"""ScheduledBatch: the scheduler's decision for one step. Plain values that nothing changes
afterwards."""

from dataclasses import dataclass

from services.compute.sequence import RowKey
from shared.model.vision.images import ImageRun


@dataclass(slots=True, unsafe_hash=True)  # nothing changes one; not frozen, for speed: there is one a token
class BatchRow:
    """One sequence's part of a step: the tokens whose keys and values the step computes."""

    handle: int
    token_ids: tuple[int, ...]  # a PENDING token among them is drawn by the step in flight
    # the place of the first of token_ids in the row's context: in the sequence; of a segment that is
    # not the last, behind what it sees
    num_computed_tokens: int
    block_table: tuple[int, ...]  # blocks for all tokens up to the last of token_ids, at least
    # of token_ids, those whose logits decide the tokens after them; each is computed on all that
    # stand before it, so several of them are as many steps of one token. All but the first of
    # several are drafts
    sampled: range = range(0)
    num_prompt_tokens: int = 0  # of the sequence: the token after them is at position 1
    first_target: int = 0  # where the first of target_ids stands in the sequence
    # tokens of its prompt whose logprobs the step computes, each from the row of the token before
    # it
    target_ids: tuple[int, ...] = ()
    # of token_ids, those whose hidden states go into the sequence's embedding
    pooled: range = range(0)
    # where a token is rotated to, less its place among the row's tokens: not 0 in prompts with segments
    position_shift: int = 0
    # how many slots of each block hold tokens; empty if all do
    block_lens: tuple[int, ...] = ()
    # runs of token_ids that embeddings of images replace, counted from the first of token_ids
    images: tuple[ImageRun, ...] = ()
    sees_whole_images: bool = False  # each of their tokens sees all of its run
    # of token_ids, in time, down and across, where these differ
    positions: tuple[tuple[int, ...], ...] = ()
    # of a model that keeps states: the sequence's slot, and the tokens that the state in it stands behind before
    # the step, and after it
    slot: int = 0
    num_folded: int = 0
    fold_to: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose KV the row's attention reads."""
        return self.num_computed_tokens + len(self.token_ids)

    def key(self, index: int) -> RowKey:
        """The key of token_ids[index], or of the token that follows the last."""
        return RowKey(self.handle, self.num_computed_tokens + index - self.num_prompt_tokens + 1)

    @property
    def decides(self) -> list[RowKey]:
        """The tokens that its rows of logits decide."""
        return [self.key(index + 1) for index in self.sampled]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: the tokens of sequences that are one token behind ("decodes"), alone or with drafts
    behind them, then chunks of others, in one ragged batch."""

    rows: tuple[BatchRow, ...]
    num_decodes: int  # of the rows, the first ones
    # (from, to), before the step: one after the other, and none from a block that has been copied to
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([row.num_tokens for row in self.rows])

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose KV the step's attention reads."""
        return sum([row.num_context_tokens for row in self.rows])

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its chunks."""
        return sum([row.num_tokens for row in self.rows[self.num_decodes :]])

    @property
    def num_drafts(self) -> int:
        """Tokens that are drafts."""
        return sum([len(row.sampled) - 1 for row in self.rows if row.sampled])

    @property
    def has_targets(self) -> bool:
        """Whether logprobs of prompts are computed."""
        return any(row.target_ids for row in self.rows)

    @property
    def embedded(self) -> list[BatchRow]:
        """The rows whose hidden states go into embeddings."""
        return [row for row in self.rows if row.pooled]

    @property
    def sampled(self) -> list[RowKey]:
        """The tokens that this step decides, in the order of their rows of logits."""
        return [key for row in self.rows for key in row.decides]

    @property
    def firsts(self) -> list[RowKey]:
        """The first token that the step decides of each sequence that it samples. The others follow
        drafts: a row of theirs that is dropped is computed again, if its drafts are drawn."""
        return [row.decides[0] for row in self.rows if row.sampled]
