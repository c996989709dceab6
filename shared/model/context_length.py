"""The error of a prompt that the model's context can't hold: OpenAI's sentence, which clients search for its words, and the sizes that it names.

The tokenizer writes the sentence and the gateway reads the sizes back, for clients of llama.cpp, who find them in fields.
"""

import re

from shared.process.errors import Invalid

CODE = "context_length_exceeded"
SIZES = re.compile(r"maximum context length is (\d+) tokens\. However, you requested .*?(\d+)(?: tokens)? (?:\(in|in) the ")


def context_exceeded(field: str, max_model_len: int, num_tokens: int, least: int) -> Invalid:
    """The error for a prompt of num_tokens that leaves no room for `least` more."""
    parts = f"{num_tokens + least} tokens ({num_tokens} in the {field}, at least {least} in the completion)"
    return _error(field, max_model_len, parts)


def context_far_exceeded(field: str, max_model_len: int, at_least: int) -> Invalid:
    """The error for a prompt of which only a part was encoded, because that alone is too long."""
    return _error(field, max_model_len, f"more than {at_least} tokens (in the {field})")


def _error(field: str, max_model_len: int, wanted: str) -> Invalid:
    message = f"This model's maximum context length is {max_model_len} tokens. However, you requested {wanted}. Please reduce the {field}."
    return Invalid(message, param=field, code=CODE)


def sizes_of(message: str) -> tuple[int, int] | None:
    """The tokens of the prompt, and how many the model's context holds; None: the message is of something else."""
    found = SIZES.search(message)
    return (int(found[2]), int(found[1])) if found is not None else None
