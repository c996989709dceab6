"""ScheduledBatch: the scheduler's decision for one step, as plain Python."""

from dataclasses import dataclass, field

from services.compute.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """num_tokens of a sequence's uncomputed tokens, from num_computed_tokens on."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the chunk ends with the sequence's last token, whose logits the next token is drawn from."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


@dataclass(slots=True)
class ScheduledBatch:
    """One step: single tokens of running sequences, then chunks of prompts, in one ragged batch."""

    decodes: list[Sequence] = field(default_factory=list)  # one token behind: each computes that token and gets the next
    chunks: list[ScheduledChunk] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to), before the step: all are read before any is written

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose KV the step's attention reads."""
        chunks = sum(chunk.sequence.num_computed_tokens + chunk.num_tokens for chunk in self.chunks)
        return sum([len(sequence.token_ids) for sequence in self.decodes]) + chunks

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token from this step, in the order of their rows of logits."""
        return self.decodes + [chunk.sequence for chunk in self.chunks if chunk.is_last]
