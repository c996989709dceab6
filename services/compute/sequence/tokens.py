"""Tokens: the tokens of one sequence, and how sure each of them is. No torch here.

From the first to the last:

    | prompt | decided (in the log) | foreseen | drafts | PENDING |
    |<------- num_decided --------->|<----- num_undecided ------->|

    append    one more token is decided, and nothing is undecided
    draft     guesses follow, for one step
    foresee   one more token follows that the log does not hold yet. PENDING: the device has drawn it,
              and the host has not read it
    settle    PENDING is read: the first drafts came true and are foreseen from here on, the other
              drafts go, and the token that follows takes PENDING's place
    end       the last token is foreseen to be the sequence's last: nothing more is computed, unless
              a decision says otherwise
    confirm   the log holds the first foreseen token
    truncate  the log holds another token, or a step came to nothing: all behind some tokens goes

Each verb asserts what it needs. tests/unit/test_tokens.py checks them against a model.
"""

from collections import deque

from services.compute.sequence.counts import TokenArray, TokenFrequencies
from shared.model.arrays import Array

# in the place of a sequence's last token: the device has drawn it, and it is not read yet
PENDING = -1


class Tokens:
    """The tokens of one sequence. Others read `ids`; only the verbs change them, and the simulator, which
    appends many at once."""

    __slots__ = (
        "_history",
        "_output",
        "_seen",
        "foreseen_drafts",
        "ids",
        "is_ending",
        "num_drafts",
        "num_prompt",
        "num_undecided",
    )

    def __init__(self, ids: list[int], num_prompt: int | None = None, *, num_undecided: int = 0) -> None:
        """ids: the prompt and the decided tokens; num_prompt: how many are the prompt's, by default all;
        num_undecided: how many of the last are foreseen."""
        self.ids = ids
        self.num_prompt = len(ids) if num_prompt is None else num_prompt
        self.num_undecided = num_undecided
        self.num_drafts = 0  # guesses that no step has settled yet
        self.foreseen_drafts: deque[int] = deque()  # places of foreseen tokens that were drafts
        self.is_ending = False
        self._output: TokenFrequencies | None = None  # None: not needed yet
        self._seen: TokenFrequencies | None = None
        self._history: TokenArray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_output(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def num_decided(self) -> int:
        return len(self.ids) - self.num_undecided

    @property
    def is_pending(self) -> bool:
        return self.ids[-1] == PENDING

    @property
    def num_undecided_steps(self) -> int:
        """How many steps have foreseen what is undecided, at least in part."""
        return self.num_undecided - len(self.foreseen_drafts)

    def append(self, token_id: int) -> None:
        assert not self.num_undecided
        self.ids.append(token_id)

    def draft(self, token_ids: list[int]) -> None:
        assert not self.is_pending
        self.ids.extend(token_ids)
        self.num_undecided += len(token_ids)
        self.num_drafts += len(token_ids)

    def foresee(self, token_id: int = PENDING) -> None:
        assert not self.is_pending
        assert token_id == PENDING or not self.num_drafts, "only a step settles drafts"
        self.ids.append(token_id)
        self.num_undecided += 1

    def settle(self, token_id: int, *, num_standing: int = 0) -> None:
        """num_standing: how many drafts came true, from the first on."""
        assert self.is_pending and 0 <= num_standing <= self.num_drafts
        first = len(self.ids) - 1 - self.num_drafts
        all_stand = num_standing == self.num_drafts
        self._drop(len(self.ids) - 1 if all_stand else first + num_standing)
        if not all_stand:
            self.is_ending = False
        self.ids.append(token_id)
        self.num_undecided += 1
        self.foreseen_drafts.extend(range(first, first + num_standing))
        self.num_drafts = 0

    def end(self) -> None:
        self.is_ending = True

    def confirm(self) -> None:
        assert self.num_undecided > 0 and self.ids[self.num_decided] != PENDING
        self.num_undecided -= 1
        if self.foreseen_drafts and self.foreseen_drafts[0] < self.num_decided:
            self.foreseen_drafts.popleft()
        if not self.num_undecided:
            self.is_ending = False

    def truncate(self, num_tokens: int) -> None:
        """Drop what is undecided behind the first num_tokens."""
        assert self.num_decided <= num_tokens <= len(self.ids)
        self._drop(num_tokens)
        self.is_ending = False

    def output_counts(self, num_tokens: int) -> TokenFrequencies:
        """Counts the output's tokens among the first num_tokens."""
        self._output = self._output or TokenFrequencies(self.num_prompt)
        self._output.follow(self.ids, num_tokens)
        return self._output

    def seen_counts(self, num_tokens: int) -> TokenFrequencies:
        """Counts the first num_tokens, prompt and output."""
        self._seen = self._seen or TokenFrequencies(0)
        self._seen.follow(self.ids, num_tokens)
        return self._seen

    def history(self, num_tokens: int) -> Array:
        """The first num_tokens, prompt and output: [n] int64, a view."""
        self._history = self._history or TokenArray()
        return self._history.follow(self.ids)[:num_tokens]

    def _drop(self, num_tokens: int) -> None:
        for counts in (self._output, self._seen):
            if counts is not None:
                counts.drop(self.ids, num_tokens)
        if self._history is not None:
            self._history.drop(num_tokens)
        while self.foreseen_drafts and self.foreseen_drafts[-1] >= num_tokens:
            self.foreseen_drafts.pop()
        num_dropped = len(self.ids) - num_tokens
        self.num_drafts = max(0, self.num_drafts - max(0, num_dropped - self.is_pending))
        self.num_undecided -= num_dropped
        del self.ids[num_tokens:]
