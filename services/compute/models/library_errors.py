"""Refusals of one line for errors of the transformers library's own code."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shared.process.errors import StartupError, words_of
from shared.process.host_memory import is_out_of_memory

LONGEST = 200  # characters of another's error


@contextmanager
def refusals(name: str) -> Iterator[None]:
    """Raise StartupError for whatever the library raises, which has some 500 models, each with errors
    of its own. name: of the model."""
    try:
        yield
    except (StartupError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        kind = type(error).__name__
        raise StartupError(f"{name} can't run on the transformers library: {kind}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The error, short enough for one line."""
    return words_of(error)[:LONGEST]
