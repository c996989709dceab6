"""A prediction of an answer, as OpenAI's field `prediction` gives one: which of its tokens come in the
answer is a function of the two alone."""

from collections import deque

SYNC = 3  # tokens that must be equal to go on elsewhere in the prediction
WINDOW = 512  # tokens that are passed over at most


class PredictionFollower:
    """Follows an answer, token by token, along its prediction."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_accepted = 0  # of them, that have come
        self._place = 0  # of the one that is expected next
        self._last: deque[int] = deque(maxlen=SYNC)  # of the answer

    @property
    def num_rejected(self) -> int:
        return len(self.token_ids) - self.num_accepted

    def take(self, token_id: int) -> None:
        """The answer's next token. Where it is another than was expected, the prediction is followed
        again from where the answer's last tokens stand."""
        self._last.append(token_id)
        if self._place < len(self.token_ids) and self.token_ids[self._place] == token_id:
            self._place += 1
            self.num_accepted += 1
        elif len(self._last) == SYNC:
            self._find()

    def copy(self) -> "PredictionFollower":
        """Another, that has come as far."""
        other = PredictionFollower(self.token_ids)
        other.num_accepted, other._place, other._last = self.num_accepted, self._place, self._last.copy()
        return other

    def expected(self, count: int) -> list[int]:
        """Up to count tokens that come next, if the prediction holds."""
        return self.token_ids[self._place : self._place + count]

    def _find(self) -> None:
        last, at, end = list(self._last), max(self._place, SYNC - 1), self._place + WINDOW
        while last[-1] in (window := self.token_ids[at:end]):
            at += window.index(last[-1])
            first = at + 1 - SYNC
            if self.token_ids[first : at + 1] == last:
                self.num_accepted += at + 1 - max(self._place, first)
                self._place = at + 1
                return
            at += 1
