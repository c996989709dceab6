"""Counts and an array of a sequence's tokens, kept up to date token by token: edits of logits ask
for them in each step.
"""

import numpy as np

from shared.model.arrays import Array


class TokenFrequencies:
    """How often each token occurs from `first` on. Each token costs once when it comes, and once if
    it is dropped."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.num_counted = 0
        self._ids: Array = np.zeros(64, np.int64)
        self._times: Array = np.zeros(64, np.float32)
        self._place: dict[int, int] = {}  # by token id: its index in both arrays

    @property
    def token_ids(self) -> Array:
        """Token ids, each once, in no particular order: [n] int64, a view."""
        return self._ids[: len(self._place)]

    @property
    def times(self) -> Array:
        """How often each of them occurs: [n] float32, a view."""
        return self._times[: len(self._place)]

    def follow(self, token_ids: list[int], num_tokens: int) -> None:
        """Count exactly the first num_tokens: add what is new, and drop what was counted beyond them."""
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
                self._ids, self._times = (
                    np.concatenate((each, np.zeros_like(each))) for each in (self._ids, self._times)
                )
            self._ids[place] = token_id
            self._times[place] += 1
        self.num_counted = max(0, num_tokens - self.first)

    def drop(self, token_ids: list[int], num_tokens: int) -> None:
        """Drop all but the first num_tokens."""
        for token_id in token_ids[max(num_tokens, self.first) : self.first + self.num_counted]:
            if token_id < 0:
                continue
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
    """Tokens as a numpy array, each copied once."""

    def __init__(self) -> None:
        self._ids = np.zeros(64, np.int64)
        self._num_copied = 0

    def follow(self, token_ids: list[int]) -> Array:
        """[n] int64, a view."""
        if len(token_ids) > len(self._ids):
            room = np.zeros(2 * len(token_ids) - self._num_copied, np.int64)
            self._ids = np.concatenate((self._ids[: self._num_copied], room))
        self._ids[self._num_copied : len(token_ids)] = token_ids[self._num_copied :]
        self._num_copied = len(token_ids)
        return self._ids[: self._num_copied]

    def drop(self, num_tokens: int) -> None:
        """Drop all but the first num_tokens."""
        self._num_copied = min(self._num_copied, num_tokens)
