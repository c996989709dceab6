"""The tokens that a request allows next, as a bit for each token of the vocabulary.

A grammar's mask is what its matcher says, with these rules about ends. An end token (of the model,
or one of stop_token_ids) is allowed where the grammar accepts. min_tokens and ignore_eos keep end
tokens out, as long as the grammar allows anything else. allowed_token_ids and bad_words take their
tokens out of what is left; where nothing is left, the request contradicts itself, and fails.
"""

import numpy as np

from services.compute.sequence import Prefix
from shared.model.arrays import Array
from shared.process.errors import Invalid


def num_bytes(vocab_size: int) -> int:
    """Bytes of a mask: whole words of 32 bits, as the grammars' library fills them."""
    return (vocab_size + 31) // 32 * 4


def allowed_tokens(prefix: Prefix, grammar_mask: Array | None, vocab_size: int) -> Array | None:
    """The mask of the token after the prefix, [num_bytes(vocab_size)] uint8, bit i of byte b for
    token 8 b + i; None: all that is not banned.

    grammar_mask: what its grammar allows, of the same form. Raises Invalid if no token is left.
    """
    sequence, params = prefix.sequence, prefix.sequence.request.params
    if grammar_mask is None and not params.allowed_token_ids:
        return None
    mask = np.full(num_bytes(vocab_size), 255, np.uint8) if grammar_mask is None else grammar_mask.copy()
    if grammar_mask is not None:
        enders = np.array(sequence.request.eos_token_ids, np.int64)
        # the library allows the model's end tokens exactly where the grammar accepts
        if (mask[enders >> 3] >> (enders & 7) & 1).any():
            enders = np.concatenate((enders, np.array(params.stop_token_ids, np.int64)))
            others = mask & ~bits_of(enders, vocab_size)
            mask |= bits_of(enders, vocab_size)
            if others.any() and (params.ignore_eos or prefix.position <= params.min_tokens):
                mask = others
    if params.allowed_token_ids:
        mask &= bits_of(np.array(params.allowed_token_ids, np.int64), vocab_size)
    banned = bad_tokens(prefix) if grammar_mask is not None else banned_tokens(prefix)
    if banned:
        mask &= ~bits_of(np.array(banned, np.int64), vocab_size)
    if not mask.any():
        reason = (
            "no token is left to go on with: what the request's constraint, allowed_token_ids and bad_words allow "
            "together is nothing"
        )
        raise Invalid(reason, code="nothing_allowed")
    return mask


def banned_tokens(prefix: Prefix) -> list[int]:
    """The tokens that may not come next, without a grammar: ends before min_tokens, and the last
    tokens of bad words."""
    sequence = prefix.sequence
    is_early = prefix.position <= sequence.request.params.min_tokens
    return [*sequence.request.end_token_ids, *bad_tokens(prefix)] if is_early else bad_tokens(prefix)


def bad_tokens(prefix: Prefix) -> list[int]:
    """The tokens that would complete a bad word."""
    found = []
    for token_ids in prefix.sequence.request.params.bad_words_token_ids:
        begun = len(token_ids) - 1
        if begun <= prefix.num_output_tokens and prefix.sequence.tokens.ids[
            prefix.num_tokens - begun : prefix.num_tokens
        ] == list(token_ids[:-1]):
            found.append(token_ids[-1])
    return found


def bits_of(token_ids: Array, vocab_size: int) -> Array:
    """A mask with these tokens."""
    is_in = np.zeros(8 * num_bytes(vocab_size), bool)
    is_in[token_ids] = True
    mask: Array = np.packbits(is_in, bitorder="little")
    return mask
