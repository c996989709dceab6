"""Timeline: when a sequence came to each stage of the pipeline. What its metrics, its line in the
log and its trace are made of."""

from dataclasses import dataclass

from shared.wire.messages import Moments


@dataclass(slots=True)
class Timeline:
    """Wall clock of the stage that did it, s; 0: unknown, or not yet. A gateway that resumes a stream
    does not know of its first token."""

    submitted_at: float = 0.0
    tokenized_at: float = 0.0
    scheduled_at: float = 0.0  # its prompt began to be computed
    first_token_at: float = 0.0
    ended_at: float = 0.0  # its last token was decided, if it is not the first; of an embedding, it was there
    compute_id: str = ""  # who computed it last
    sampler_id: str = ""

    def note(self, moments: Moments) -> None:
        """Take in the moments of the first event, or of the last."""
        if moments.position <= 1:
            self.tokenized_at, self.scheduled_at = moments.tokenized_at, moments.scheduled_at
        if moments.position == 1:
            self.first_token_at = moments.decided_at
        else:
            self.ended_at = moments.decided_at
        self.compute_id, self.sampler_id = moments.compute_id, moments.sampler_id

    @property
    def tokenize_s(self) -> float | None:
        """Seconds from submission until it had tokens, including the tokenizers' queue."""
        return between(self.submitted_at, self.tokenized_at)

    @property
    def queue_s(self) -> float | None:
        """Seconds from there until compute began with it."""
        return between(self.tokenized_at, self.scheduled_at)

    @property
    def prefill_s(self) -> float | None:
        """Seconds from there until its first token was decided."""
        return between(self.scheduled_at, self.first_token_at)

    @property
    def decode_s(self) -> float | None:
        """Seconds from its first token to its last."""
        return between(self.first_token_at, self.ended_at)

    @property
    def inference_s(self) -> float | None:
        """Seconds from compute's beginning to the last token."""
        return between(self.scheduled_at, self.ended_at or self.first_token_at)


def between(start: float, end: float) -> float | None:
    """Seconds; None while one is unknown. The clocks of two machines may disagree: never below
    0."""
    return max(0.0, end - start) if start and end else None
