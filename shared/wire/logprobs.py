"""Logprobs, as messages carry them: of a prompt's tokens, and of a token that was decided."""

from __future__ import annotations

import numpy as np
from msgspec import field

from shared.model.arrays import Float32Array, Int32Array
from shared.model.wire_struct import WireStruct
from shared.process.errors import Invalid


class PromptLogprobs(WireStruct, frozen=True):
    """The logprobs of a prompt's P tokens at temperature 1, before penalties and bias. Row r is of
    token r + 1: nothing predicts the first."""

    token_ids: Int32Array  # [P]
    logprobs: Float32Array  # [P - 1]
    ranks: Int32Array  # [P - 1] 1 + how many tokens of the vocabulary were likelier
    # [(P - 1) * k] the k likeliest of each row, by falling logprob, ties by token id
    top_token_ids: Int32Array
    top_logprobs: Float32Array  # [(P - 1) * k]
    # all of the above, each once: the sampler knows their texts
    spelled_token_ids: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    texts: tuple[str, ...] = ()  # of the spelled tokens
    # [P] where each token begins in the echoed text; empty: none is
    text_offsets: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        num_rows, num_top = len(self.logprobs), len(self.top_token_ids)
        if (
            len(self.token_ids) != num_rows + 1
            or len(self.ranks) != num_rows
            or len(self.text_offsets) not in (0, num_rows + 1)
        ):
            raise Invalid("PromptLogprobs: not a row for each token after the first, or not an offset for each token")
        if (
            num_top != len(self.top_logprobs)
            or num_top % max(num_rows, 1)
            or len(self.texts) != len(self.spelled_token_ids)
        ):
            raise Invalid("PromptLogprobs: columns of different lengths")

    @property
    def num_top(self) -> int:
        """k, how many of the likeliest each row has."""
        return len(self.top_token_ids) // max(len(self.logprobs), 1)


class TopLogprob(WireStruct, frozen=True):
    token: str
    raw: bytes
    logprob: float
    token_id: int = -1  # -1: an older sender's


class TokenLogprob(WireStruct, frozen=True):
    """A released token's logprob, and the likeliest alternatives'."""

    token: str
    raw: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()
    # characters of the text that the client gets, an echoed prompt's included, before this token's
    text_offset: int = 0
    token_id: int = -1  # -1: an older sender's
    is_end: bool = False  # it ends the answer, and is no part of the text
