"""The error for a prompt that does not fit into the model's context: OpenAI's sentence, in which
clients look for its words.

The tokenizer writes the sentence. The gateway reads the sizes back from it, for clients of
llama.cpp, which expect them in fields.
"""

import re

from shared.process.errors import Invalid

CODE = "context_length_exceeded"
SIZES = re.compile(
    r"maximum context length is (\d+) tokens\. However, you requested .*?(\d+)(?: tokens)? (?:\(in|in) the "
)


def context_exceeded(field: str, max_model_len: int, num_tokens: int, min_room: int) -> Invalid:
    """The error for a prompt of num_tokens that leaves no room for min_room more."""
    parts = f"{num_tokens + min_room} tokens ({num_tokens} in the {field}, at least {min_room} in the completion)"
    return _error(field, max_model_len, parts)


def context_far_exceeded(field: str, max_model_len: int, at_least: int) -> Invalid:
    """The error for a prompt whose first part alone, at_least tokens, is too long."""
    return _error(field, max_model_len, f"more than {at_least} tokens (in the {field})")


def _error(field: str, max_model_len: int, wanted: str) -> Invalid:
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {wanted}. Please "
        f"reduce the {field}."
    )
    return Invalid(message, param=field, code=CODE)


def sizes_of(message: str) -> tuple[int, int] | None:
    """The tokens of the prompt, and how many the model's context holds; None for another message."""
    match = SIZES.search(message)
    return (int(match[2]), int(match[1])) if match is not None else None
