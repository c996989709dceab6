"""Proposer: guesses the next tokens of a sequence, for one step to compute at once.

A guess decides nothing. The step computes every position that the drafts reach, each position's
token is drawn as ever, with its own noise, and the drafts stand as far as they are what was drawn.
So a proposer may be wrong, slow to learn or gone: the text is the same, only later. It must not
raise for a sequence, and what it returns is cut to what was wanted.

The order of a step, for each sequence that runs:

    propose    before the step: its last token is known, and is what the step computes first
    computed   behind the step: how many of its tokens are decided now
    forget     it has ended, or has left this replica

A sequence may be preempted between any two of them: its tokens stay, and come to `computed` again
as a prompt's do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.compute.sequence import Sequence
from services.compute.sequence.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence for which drafts pay, and how many of them at most.

    All its tokens are known, none is PENDING, and all but the last are computed. Its block table has
    slots for that one and for `max_drafts` tokens behind it: what a proposer writes there of a cache of the
    same shape, the step writes again. No copy of its blocks is outstanding.
    """

    sequence: Sequence
    max_drafts: int  # at least 1


@dataclass(frozen=True, slots=True)
class Drafts:
    """The tokens that are guessed to follow a sequence's last."""

    token_ids: list[int]
    # how sure the proposer is, in steps of its own from 0 to MAX_GRADE. What drafts are worth is
    # measured by proposer and grade: those of one grade should stand about equally often
    grade: int = 0


MAX_GRADE = 8


class Proposer(Protocol):
    """A replica has one proposer of each kind. All methods are the loop's: no two run at once."""

    @property
    def name(self) -> str:
        """The proposer's name in --speculate and in metrics."""
        ...

    @property
    def needs_hidden(self) -> bool:
        """Whether `computed` is to be called before another step runs, with its hidden states still
        there. On a device that draws, no step is launched ahead then."""
        ...

    @property
    def runs_model(self) -> bool:
        """Whether `propose` takes long enough that it is asked only where no other proposer has drafts
        that pay, and where its own time is measured to pay, too."""
        ...

    @property
    def stops_itself(self) -> bool:
        """Whether it guesses only as far as it is sure. Else, where it runs a model, it is asked for
        as many drafts as pay on the average."""
        ...

    def propose(self, wanted: Mapping[int, Wanted]) -> dict[int, Drafts]:
        """Drafts by handle, for some of the sequences; none where it has no guess."""
        ...

    def computed(self, batch: ScheduledBatch, hidden: Any, decided: Mapping[int, int]) -> None:
        """A step was collected, with drafts in it or without.

        hidden: what Executor.run returned of it; decided: by handle, how many tokens the sequence
        has got of the step. Of n tokens the first n of the row's `sampled` decided one each: the
        first n - 1 of them are the drafts that stand, the last is not computed yet. A row of the
        batch without an entry got none: it is a part of a prompt, or its sequence has ended, or is
        computed again.
        """
        ...

    def forget(self, handle: int) -> None:
        """The sequence is gone. Unknown handles are passed over."""
        ...
