"""StateSlots: which sequence has which slot of a model's states. No torch here.

A running sequence has a slot. The state in it stands behind the first num_folded tokens of the sequence.
Where it has a log, those that are computed behind them can be computed again, or go; otherwise all that is
computed is in the state, and a sequence that goes back begins again.
"""

from services.compute.sequence import Sequence


class StateSlots:
    """As many as sequences may run at once."""

    def __init__(self, count: int, log_length: int) -> None:
        """log_length: tokens that a state's log holds; 0: it has none."""
        self.log_length = log_length
        self.free = list(range(count - 1, -1, -1))

    def take(self, sequence: Sequence) -> None:
        sequence.kv.slot = self.free.pop()

    def give_back(self, sequence: Sequence) -> None:
        self.free.append(sequence.kv.slot)

    def fold_to(self, sequence: Sequence, num_tokens: int, *, is_sampled: bool) -> int:
        """The tokens behind which the state stands after a step that computes the first num_tokens: those that
        are decided, but for the one that the next is decided by, whose row may be computed again."""
        if not self.log_length:
            return num_tokens
        found = min(sequence.tokens.num_decided, num_tokens - is_sampled)
        assert num_tokens - found <= self.log_length, "more tokens are undecided than the log holds"
        return found
