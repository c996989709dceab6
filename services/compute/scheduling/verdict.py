"""Verdicts on the head of the queue of sequences that wait."""

from dataclasses import dataclass

from services.compute.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Begin:
    """The head of the queue begins."""

    matched: list[int]  # blocks of its first tokens that are computed already
    twin: Sequence | None  # a sequence of the same prompt whose blocks it takes
    victim: Sequence | None  # a sequence that gives its place back first; None: there is a free one


@dataclass(frozen=True, slots=True)
class Wait:
    """The head of the queue waits, and so does all behind it."""

    # since there was too little memory for it; None: it waits for something else
    num_steps: int | None = None
