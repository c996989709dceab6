"""Answers drawn by chance among the tokens that a grammar allows, without a model: thousands in the
time in which a model writes one.

Each walk prefers some tokens, for engines go wrong at them: escapes and quotation marks, or digits;
or it prefers none. After some tokens it goes to an end.
"""

from functools import cache

import numpy as np
from llguidance import LLMatcher

from shared.model.arrays import Array
from shared.model.constraint import Constraint
from shared.model.grammar import compile_grammar
from tests.grammars.generate import EOS, Answer, vocabulary

MIN_ENDING = 24  # tokens after which the walk goes to an end
LIMIT = "too many expressions"  # of patterns that nobody can hold: a server ends such an answer with an error
ESCAPED = 30.0  # how much more often such a token is drawn than another
IN_ESCAPES = 8.0
DIGIT = 20.0
ENDING = 60.0


@cache
def preferences() -> tuple[list[Array], Array]:
    """Weights of the tokens: one row for each kind of walk; and of those that end something."""
    texts = [vocabulary().tokenizer.decode_bytes([token]) for token in range(vocabulary().vocab_size)]
    escapes = [
        ESCAPED
        if each.startswith(b"\\")
        else IN_ESCAPES
        if b'"' in each or each in (b"u", b"0", b"1", b"n", b"b", b"t")
        else 1.0
        for each in texts
    ]
    digits = [DIGIT if each[:1].isdigit() or each in (b"-", b".", b"e", b"E", b"+") else 1.0 for each in texts]
    return [np.array(escapes), np.array(digits), np.ones(len(texts))], np.array(
        [ENDING if each[:1] and each[:1] in b'"}],:' else 1.0 for each in texts]
    )


def walk(constraint: Constraint, *, seed: int, max_tokens: int = 400, min_ending: int = MIN_ENDING) -> Answer:
    """Raises Invalid for a grammar that does not compile."""
    return walk_from(compile_grammar(constraint, vocabulary()), seed=seed, max_tokens=max_tokens, min_ending=min_ending)


def walk_from(beginning: LLMatcher, *, seed: int, max_tokens: int = 400, min_ending: int = MIN_ENDING) -> Answer:
    """The kind of the walk follows from the seed."""
    rng, matcher, output = np.random.default_rng(seed), beginning.deep_copy(), list[int]()
    kinds, endings = preferences()
    early, late = kinds[seed % len(kinds)] * np.sqrt(endings), kinds[seed % len(kinds)] * endings**2
    while len(output) < max_tokens and not matcher.is_stopped():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[
            : early.size
        ].astype(bool)
        if matcher.is_error():
            return failed(output, matcher)
        may_end = mask[list(EOS)].any()
        mask[list(EOS)] = False
        if may_end and (len(output) > min_ending or not mask.any() or rng.random() < 0.15):
            return ended(output, "stop")
        summed = np.cumsum((late if len(output) > min_ending else early) * mask)
        output.append(int(np.searchsorted(summed, rng.random() * summed[-1], side="right")))
        if not matcher.consume_token(output[-1]):
            return failed(output, matcher)
    return ended(output, "length" if len(output) >= max_tokens else "stop")


def failed(output: list[int], matcher: LLMatcher) -> Answer:
    if LIMIT in matcher.get_error():
        return ended(output, "beyond the engine's limit")
    raise AssertionError(f"{ended(output, '').text!r}: {matcher.get_error()}")


def ended(output: list[int], reason: str) -> Answer:
    text = vocabulary().tokenizer.decode_bytes(output).decode("utf-8", "replace")
    return Answer(text, tuple(output), reason)
