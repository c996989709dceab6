"""Proposers that run no model, and the choice among all.

Grammar: the tokens that a sequence's constraint leaves no choice about, such as the keys of a JSON
schema. The model is asked about them all the same: text has more than one way into tokens.
Prediction: the answer as the client expects it (OpenAI's field `prediction`). Lookup: what followed
when the same few tokens stood there before, in the sequence itself or in answers that its tenant got
(Saxena, "Prompt Lookup Decoding", 2023).
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.compute.candidates.constraints import Constraints
from services.compute.sequence import Sequence
from services.compute.sequence.batch import ScheduledBatch
from services.compute.speculation.ngrams import LONGEST, NO_TOKEN, NgramIndex
from services.compute.speculation.proposer import Drafts, Proposer, Wanted
from shared.model.prediction import PredictionFollower

AUTO = ("grammar", "prediction", "lookup")
OWN_TOKENS = 1 << 15  # of a sequence that are looked through, the last ones
POOL_TOKENS = 1 << 16  # of answers to a tenant: 1.75 MiB
MAX_POOLS = 16
POOLED_TOKENS = 1 << 12  # of one answer
LENGTHS = (2, 3, 5, 9)  # matches shorter than these are of grades 0, 1, 2 and 3
POOL_GRADES = 4  # a match in the pool is of a kind of its own, and of two tokens at least

Owner = tuple[str, str]  # tenant and salt: what one's requests hold is nothing to another's


class GrammarProposer:
    """See proposer.py's Proposer."""

    name = "grammar"
    needs_hidden = False
    runs_model = False
    stops_itself = True

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints

    def propose(self, wanted: Mapping[int, Wanted]) -> dict[int, Drafts]:
        found = {handle: self.constraints.forced(each.sequence, each.max_drafts) for handle, each in wanted.items()}
        return {handle: Drafts(token_ids) for handle, token_ids in found.items() if token_ids}

    def computed(self, batch: ScheduledBatch, hidden: Any, decided: Mapping[int, int]) -> None:
        """A sequence's matcher follows its tokens by itself."""

    def forget(self, handle: int) -> None:
        """So it goes, too."""


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
        found = {
            handle: self._expected(each.sequence, each.max_drafts)
            for handle, each in wanted.items()
            if each.sequence.request.prediction
        }
        return {handle: Drafts(token_ids) for handle, token_ids in found.items() if token_ids}

    def computed(self, batch: ScheduledBatch, hidden: Any, decided: Mapping[int, int]) -> None:
        """Nothing to do: `propose` reads the sequence itself."""

    def forget(self, handle: int) -> None:
        self._followed.pop(handle, None)

    def _expected(self, sequence: Sequence, max_drafts: int) -> list[int]:
        if (followed := self._followed.get(sequence.handle)) is None:
            followed = self._followed[sequence.handle] = Followed(
                PredictionFollower(sequence.request.prediction), sequence.tokens.num_prompt
            )
        for token_id in sequence.tokens.ids[followed.num_followed : sequence.tokens.num_decided]:
            followed.follower.take(token_id)
        followed.num_followed = sequence.tokens.num_decided
        ahead = followed.follower.copy()
        for token_id in sequence.tokens.ids[sequence.tokens.num_decided :]:
            ahead.take(token_id)
        return ahead.expected(max_drafts)


@dataclass(slots=True)
class Own:
    """A sequence, and how far it is indexed: as far as it is decided, for that stays."""

    sequence: Sequence
    index: NgramIndex = field(default_factory=lambda: NgramIndex(OWN_TOKENS))
    num_indexed: int = 0

    def look_up(self, context: list[int], max_drafts: int) -> tuple[list[int], int]:
        """The tokens that followed the context's last ones before, and how many of them stood there. Where
        that reaches the end, what follows is taken to go on as it does from there."""
        num_decided, token_ids = self.sequence.tokens.num_decided, self.sequence.tokens.ids
        more = token_ids[max(self.num_indexed, num_decided - OWN_TOKENS) : num_decided]
        self.index.add([max(each, NO_TOKEN) for each in more] if self.sequence.request.images else more)
        self.num_indexed = num_decided
        place, length = self.index.find(context)
        if not length:
            return [], 0
        first = place + 1 + num_decided - self.index.num_added
        found = token_ids[first : first + max_drafts]
        period = len(found)
        for at in range(period, max_drafts):
            found.append(found[at - period])
        return found, length


class Lookup:
    """See proposer.py's Proposer."""

    name = "lookup"
    needs_hidden = False
    runs_model = False
    stops_itself = True

    def __init__(self) -> None:
        self._own: dict[int, Own] = {}  # by handle
        self._pools: OrderedDict[Owner, NgramIndex] = OrderedDict()  # the last used last

    def propose(self, wanted: Mapping[int, Wanted]) -> dict[int, Drafts]:
        found = {handle: self._look_up(each.sequence, each.max_drafts) for handle, each in wanted.items()}
        return {handle: drafts for handle, drafts in found.items() if drafts is not None}

    def computed(self, batch: ScheduledBatch, hidden: Any, decided: Mapping[int, int]) -> None:
        """Nothing to do: `propose` reads the sequence itself."""

    def forget(self, handle: int) -> None:
        """The sequence's answer goes into its tenant's pool."""
        own = self._own.pop(handle, None)
        if own is None:
            return
        sequence = own.sequence
        answer = sequence.tokens.ids[sequence.tokens.num_prompt : sequence.tokens.num_decided][-POOLED_TOKENS:]
        if not answer:
            return
        pool = self._pools.setdefault(owner(sequence), NgramIndex(POOL_TOKENS))
        self._pools.move_to_end(owner(sequence))
        if len(self._pools) > MAX_POOLS:
            self._pools.popitem(last=False)
        pool.add([*answer, NO_TOKEN])

    def _look_up(self, sequence: Sequence, max_drafts: int) -> Drafts | None:
        if (own := self._own.get(sequence.handle)) is None:
            own = self._own[sequence.handle] = Own(sequence)
        context = sequence.tokens.ids[-LONGEST:]
        token_ids, length = own.look_up(context, max_drafts)
        grade = grade_of(length)
        if length < LONGEST and (pool := self._pools.get(owner(sequence))) is not None:
            place, its_length = pool.find(context)
            if its_length > max(length, 1) and (of_pool := pool.read(place, max_drafts)):
                token_ids, grade = of_pool, POOL_GRADES + grade_of(its_length)
        return Drafts(token_ids, grade) if token_ids else None


def owner(sequence: Sequence) -> Owner:
    return sequence.request.tenant_id, sequence.request.cache_salt


def grade_of(length: int) -> int:
    """The longer a match, the likelier what follows it."""
    return sum(length >= each for each in LENGTHS)


def make_proposers(names: tuple[str, ...], constraints: Constraints, loaded: Iterable[Proposer] = ()) -> list[Proposer]:
    """Makes one proposer of each name, those that run no model first. auto: all that need no weights of their own;
    loaded: those that have them."""
    wanted = {each for name in names for each in (AUTO if name == "auto" else (name,))}
    made: dict[str, Proposer] = {
        "grammar": GrammarProposer(constraints),
        "prediction": PredictionProposer(),
        "lookup": Lookup(),
    }
    return [*(proposer for name, proposer in made.items() if name in wanted), *loaded]
