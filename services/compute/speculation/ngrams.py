"""NgramIndex: where in some tokens the last few of others stand, longest match first."""

from array import array

NO_TOKEN = -1  # between texts: nothing matches across it
LONGEST = 16
MAX_PLACES = 8  # of one pair of tokens that are looked at, the last ones first
FIRST_CAPACITY = 256


class NgramIndex:
    """The last `capacity` tokens of what was added, chains through the places of equal pairs, as
    deflate has them (Deutsch, RFC 1951, section 4), and the last place of each token. A token costs
    the same whenever it comes, and some 28 bytes while it stays."""

    def __init__(self, capacity: int) -> None:
        """capacity: a power of two."""
        self.max_capacity = capacity
        self._resize(min(FIRST_CAPACITY, capacity))
        self.num_added = 0

    @property
    def num_bytes(self) -> int:
        return sum(each.itemsize * len(each) for each in (self._tokens, self._before, self._heads, self._singles))

    def add(self, token_ids: list[int]) -> None:
        """More tokens, behind those that were added before."""
        for token_id in token_ids:
            if self.num_added == self._capacity < self.max_capacity:
                kept = list(self._tokens)
                self._resize(2 * self._capacity)
                self.num_added = 0
                self.add(kept)
            self._append(token_id)

    def find(self, context: list[int]) -> tuple[int, int]:
        """Where the longest match of the last tokens of the context ends, with at least one token
        behind it, and its length; -1 and 0 without a match. Of matches of equal length the last one
        wins."""
        best, best_length = -1, 0
        if not context:
            return best, best_length
        place = self._heads[hash(tuple(context[-2:])) & self._mask]
        for _ in range(MAX_PLACES):
            if not self._is_held(place):
                break
            length = self._match(context, place) if place + 1 < self.num_added else 0
            if length > best_length:
                best, best_length = place, length
                if length == LONGEST:
                    break
            place = self._before[place & self._mask]
        if best_length > 1:
            return best, best_length
        place = self._singles[context[-1] & self._mask]
        return (
            (place, self._match(context, place))
            if self._is_held(place) and self._tokens[place & self._mask] == context[-1]
            else (-1, 0)
        )

    def read(self, place: int, max_drafts: int) -> list[int]:
        """The tokens behind a place, as far as they are of one text."""
        tokens = [
            self._tokens[each & self._mask] for each in range(place + 1, min(place + 1 + max_drafts, self.num_added))
        ]
        return tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens

    def _is_held(self, place: int) -> bool:
        return place >= max(0, self.num_added - self._capacity)

    def _match(self, context: list[int], place: int) -> int:
        """How many tokens up to the place are the context's last."""
        tokens, mask = self._tokens, self._mask
        longest = min(LONGEST, len(context), place + 1, place + self._capacity - self.num_added + 1)
        return next(
            (length for length in range(longest) if tokens[(place - length) & mask] != context[-1 - length]), longest
        )

    def _append(self, token_id: int) -> None:
        place, mask = self.num_added, self._mask
        self._tokens[place & mask] = token_id
        if place:
            head = hash((self._tokens[(place - 1) & mask], token_id)) & mask
            self._before[place & mask] = self._heads[head]
            self._heads[head] = place
            self._singles[self._tokens[(place - 1) & mask] & mask] = place - 1  # a token is behind it now
        self.num_added += 1

    def _resize(self, capacity: int) -> None:
        self._capacity, self._mask = capacity, capacity - 1
        self._tokens = array("i", [NO_TOKEN]) * capacity
        self._before = array("q", [-1]) * capacity
        self._heads = array("q", [-1]) * capacity
        self._singles = array("q", [-1]) * capacity
