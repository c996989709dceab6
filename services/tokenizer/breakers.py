"""DRY's sequence breakers as tokens: every token that holds one, or whose end begins one, with the
tokens that must follow then (llama.cpp's way)."""

from functools import cached_property, lru_cache

from tokenizers import Tokenizer

from shared.model.arrays import Int32Array
from shared.model.dry_breakers import pack_breakers
from shared.process.errors import Invalid

MAX_PACKED = 1 << 18  # numbers of one request's breakers: 1 MB in its message
MAX_TAIL = 20  # tokens after the first
KEPT = 256  # breakers that are remembered


class BreakerTable:
    """Looks through the whole vocabulary for a breaker that it has not seen; nothing is made before
    the first request that wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._find = lru_cache(KEPT)(self._search)

    def pack(self, breakers: tuple[str, ...]) -> Int32Array:
        """Raises Invalid for breakers that too many tokens hold."""
        found = dict.fromkeys(tokens for breaker in breakers for tokens in self._find(breaker))
        packed = pack_breakers(found)
        if len(packed) > MAX_PACKED:
            raise Invalid(f"dry_sequence_breakers are in {len(found)} tokens of this vocabulary, which are too many", param="dry_sequence_breakers")
        return packed

    @cached_property
    def _words(self) -> list[str]:
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return self._tokenizer.decode_batch([[token_id] for token_id in range(size)], skip_special_tokens=False)

    def _search(self, breaker: str) -> tuple[tuple[int, ...], ...]:
        tails = [self._tail(breaker[length:]) for length in range(1, len(breaker))]
        found: list[tuple[int, ...]] = []
        for token_id, word in enumerate(self._words):
            if breaker in word:
                found.append((token_id,))
            else:
                found += [(token_id, *tails[length - 1]) for length in range(1, len(breaker)) if word.endswith(breaker[:length])]
        return tuple(found)

    def _tail(self, rest: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(rest, add_special_tokens=False).ids[:MAX_TAIL])
