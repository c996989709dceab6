"""Prediction: the answer as the client expects it (OpenAI's field `prediction`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.compute.sequence import Sequence
from services.compute.sequence.batch import ScheduledBatch
from services.compute.speculation.proposer import Drafts, Wanted
from shared.model.prediction import PredictionFollower


@dataclass(slots=True)
class Followed:
    """A sequence's prediction, followed as far as the sequence is decided, for that stays."""

    follower: PredictionFollower
    num_followed: int  # tokens of the sequence


class PredictionProposer:
    """See proposer.py's Proposer."""

    name = "prediction"
    needs_hidden = False
    runs_model = False
    stops_itself = True

    def __init__(self) -> None:
        self._followed: dict[int, Followed] = {}  # by handle

    def propose(self, wanted: Mapping[int, Wanted]) -> dict[int, Drafts]:
        found = {handle: self._expected(each.sequence, each.most) for handle, each in wanted.items() if each.sequence.request.prediction}
        return {handle: Drafts(token_ids) for handle, token_ids in found.items() if token_ids}

    def computed(self, batch: ScheduledBatch, hidden: Any, decided: Mapping[int, int]) -> None:
        """Nothing to do: `propose` reads the sequence itself."""

    def forget(self, handle: int) -> None:
        self._followed.pop(handle, None)

    def _expected(self, sequence: Sequence, most: int) -> list[int]:
        if (followed := self._followed.get(sequence.handle)) is None:
            followed = self._followed[sequence.handle] = Followed(PredictionFollower(sequence.request.prediction), sequence.tokens.num_prompt)
        for token_id in sequence.tokens.ids[followed.num_followed : sequence.tokens.num_decided]:
            followed.follower.take(token_id)
        followed.num_followed = sequence.tokens.num_decided
        ahead = followed.follower.copy()
        for token_id in sequence.tokens.ids[sequence.tokens.num_decided :]:
            ahead.take(token_id)
        return ahead.expected(most)
