"""Grammar: the tokens that a sequence's constraint leaves no choice about, such as the keys of a JSON
schema. The model is asked about them all the same: text has more than one way into tokens."""

from collections.abc import Mapping
from typing import Any

from services.compute.candidates.constraints import Constraints
from services.compute.sequence.batch import ScheduledBatch
from services.compute.speculation.proposer import Drafts, Wanted


class GrammarProposer:
    """See proposer.py's Proposer."""

    name = "grammar"
    needs_hidden = False
    runs_model = False
    stops_itself = True

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints

    def propose(self, wanted: Mapping[int, Wanted]) -> dict[int, Drafts]:
        found = {handle: self.constraints.forced(each.sequence, each.most) for handle, each in wanted.items()}
        return {handle: Drafts(token_ids) for handle, token_ids in found.items() if token_ids}

    def computed(self, batch: ScheduledBatch, hidden: Any, decided: Mapping[int, int]) -> None:
        """A sequence's matcher follows its tokens by itself."""

    def forget(self, handle: int) -> None:
        """So it goes, too."""
