"""One stream of tokens being computed: what was asked (Request), its tokens (Tokens), and where its
keys and values are (Kv). No torch here, nor in any other module of the scheduler."""

from services.compute.sequence.counts import TokenFrequencies
from services.compute.sequence.kv import BlockTable, Kv
from services.compute.sequence.request import Request
from services.compute.sequence.sequence import Prefix, RowKey, ScoredTokens, Sequence
from services.compute.sequence.tokens import PENDING, Tokens

__all__ = [
    "PENDING",
    "BlockTable",
    "Kv",
    "Prefix",
    "Request",
    "RowKey",
    "ScoredTokens",
    "Sequence",
    "TokenFrequencies",
    "Tokens",
]
