"""Answers drawn by chance among the tokens that a grammar allows, without a model: thousands in the time in which a model writes one."""

from functools import cache

import numpy as np

from shared.model.constraint import Constraint
from shared.model.grammar import compile_grammar
from tests.grammars.generate import EOS, Answer, vocabulary

MIN_ENDING = 24  # tokens after which the walk goes to an end
LIMIT = "too many expressions"  # of patterns that nobody can hold: a server ends such an answer with an error


@cache
def closing() -> np.ndarray:
    """The tokens that end something."""
    tokens = [tuple(vocabulary().tokenizer.tokenize_str(text)) for text in ('"', "}", "]", '"}', '"]', '":', '": "', '",', "0", "1", "-", "01", "2", ":", "/")]
    return np.array(sorted({each[0] for each in tokens if len(each) == 1}))


def walk(constraint: Constraint, *, seed: int, max_tokens: int = 600) -> Answer:
    """Raises Invalid for a grammar that does not compile."""
    rng, matcher = np.random.default_rng(seed), compile_grammar(constraint, vocabulary())
    output: list[int] = []
    while len(output) < max_tokens and not matcher.is_stopped():
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if matcher.is_error() and LIMIT in matcher.get_error():
            return ended(output, "beyond the engine's limit")
        if matcher.is_error():
            raise AssertionError(matcher.get_error())
        if (ends := np.intersect1d(allowed, EOS)).size and (len(output) > MIN_ENDING or rng.random() < 0.3 or ends.size == allowed.size):
            return ended(output, "stop")
        closers = np.intersect1d(allowed, closing())
        rest = np.setdiff1d(allowed, EOS)
        chance = 0.2 if len(output) < MIN_ENDING else 0.85
        token = int(rng.choice(closers if closers.size and rng.random() < chance else rest))
        if not matcher.consume_token(token):
            raise AssertionError(f"the grammar allows the token {token}, and does not take it: {matcher.get_error()}")
        output.append(token)
    return ended(output, "length" if len(output) >= max_tokens else "stop")


def ended(output: list[int], reason: str) -> Answer:
    text = vocabulary().tokenizer.decode_bytes(output).decode("utf-8", "replace")
    return Answer(text, tuple(output), reason)
