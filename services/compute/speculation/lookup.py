"""Lookup: what followed when the same few tokens stood there before, in the sequence itself or in
answers that its tenant got. (Saxena, "Prompt Lookup Decoding", 2023.)"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.compute.sequence import Sequence
from services.compute.sequence.batch import ScheduledBatch
from services.compute.speculation.ngrams import LONGEST, NO_TOKEN, NgramIndex
from services.compute.speculation.proposer import Drafts, Wanted

OWN_TOKENS = 1 << 15  # of a sequence that are looked through, the last ones
POOL_TOKENS = 1 << 16  # of answers to a tenant: 1.75 MiB
MAX_POOLS = 16
POOLED_TOKENS = 1 << 12  # of one answer
LENGTHS = (2, 3, 5, 9)  # matches shorter than these are of grades 0, 1, 2 and 3
POOL_GRADES = 4  # a match in the pool is of a kind of its own, and of two tokens at least

Owner = tuple[str, str]  # tenant and salt: what one's requests hold is nothing to another's


@dataclass(slots=True)
class Own:
    """A sequence, and how far it is indexed: as far as it is decided, for that stays."""

    sequence: Sequence
    index: NgramIndex = field(default_factory=lambda: NgramIndex(OWN_TOKENS))
    num_indexed: int = 0

    def look_up(self, context: list[int], most: int) -> tuple[list[int], int]:
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
        found = token_ids[first : first + most]
        period = len(found)
        for at in range(period, most):
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
        found = {handle: self._look_up(each.sequence, each.most) for handle, each in wanted.items()}
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

    def _look_up(self, sequence: Sequence, most: int) -> Drafts | None:
        if (own := self._own.get(sequence.handle)) is None:
            own = self._own[sequence.handle] = Own(sequence)
        context = sequence.tokens.ids[-LONGEST:]
        token_ids, length = own.look_up(context, most)
        grade = grade_of(length)
        if length < LONGEST and (pool := self._pools.get(owner(sequence))) is not None:
            place, its_length = pool.find(context)
            if its_length > max(length, 1) and (of_pool := pool.read(place, most)):
                token_ids, grade = of_pool, POOL_GRADES + grade_of(its_length)
        return Drafts(token_ids, grade) if token_ids else None


def owner(sequence: Sequence) -> Owner:
    return sequence.request.tenant_id, sequence.request.cache_salt


def grade_of(length: int) -> int:
    """The longer a match, the likelier what follows it."""
    return sum(length >= each for each in LENGTHS)
