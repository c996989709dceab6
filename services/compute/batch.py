"""ScheduledBatch: the scheduler's decision for one step, as plain Python."""

from dataclasses import dataclass, field

from services.compute.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """num_scheduled_tokens of the sequence's uncomputed tokens, from num_computed_tokens on."""

    sequence: Sequence
    num_scheduled_tokens: int

    @property
    def is_sampled(self) -> bool:
        """Whether the step computes the sequence's last token, whose logits the next token is drawn from."""
        return self.num_scheduled_tokens == self.sequence.num_uncomputed_tokens


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: single tokens of running sequences first, then chunks of prompts, in one ragged batch."""

    sequences: list[ScheduledSequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_scheduled_tokens for scheduled in self.sequences)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token from this step, in the order of their rows of logits."""
        return [scheduled.sequence for scheduled in self.sequences if scheduled.is_sampled]
