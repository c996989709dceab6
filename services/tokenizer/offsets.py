"""Where each token of a prompt begins in the text that is echoed."""

from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from shared.model.arrays import Array
from shared.process.errors import Invalid
from shared.wire.messages import GenerateRequest


def offsets_of(tokenizer: Any, request: GenerateRequest, text: str | None, token_ids: Array) -> Array:
    """The offset of each token in the text that is echoed; None: the text is decoded. What the
    text lacks, as a BOS, begins where the next one does."""
    if text is None:
        return decoded_offsets(tokenizer, token_ids.tolist())
    offsets, end, adds = [], 0, request.encoding.add_special_tokens is not False
    for begin, own_end in tokenizer(text, add_special_tokens=adds, return_offsets_mapping=True, verbose=False)["offset_mapping"]:
        # less than the end: a part of a character; more: of some, spaces are cut off
        offsets.append(end if begin == own_end else min(begin, end))
        end = max(end, own_end)
    return np.array(offsets, np.int32)


def decoded_offsets(tokenizer: Any, token_ids: list[int]) -> Array:
    """Offsets of the tokens in their text, special ones included."""
    stream, offsets, end = DecodeStream(skip_special_tokens=False), [], 0
    for token_id in token_ids:
        offsets.append(end)
        try:
            end += len(stream.step(tokenizer.backend_tokenizer, token_id) or "")
        except Exception as error:  # bare, from Rust
            raise Invalid(f"the prompt's tokens can't be made text one by one: {error}", param="prompt") from None
    return np.array(offsets, np.int32)
