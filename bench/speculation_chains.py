"""Chains of drafts that were seen with one model, imposed on another: what a model that drafts for
itself gains in a shape for which there are no weights here.

What drafts cost is real: the drafting model runs as many steps as the chain is long. Which of its
drafts stand is as it was seen: the answer is known, for the requests have been answered without
drafts, and the chain has its tokens as far as the one that was seen stood, and then others.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.compute.sequence.batch import ScheduledBatch
from services.compute.speculation.chains import ChainProposer
from services.compute.speculation.control import DraftControl, DraftKind
from services.compute.speculation.margins import Margins
from services.compute.speculation.proposer import Drafts, Wanted

Seen = tuple[int, int]  # drafts of a chain, and those of them that stood


class Recorder:
    """A ChainProposer whose chains are written down, by the kind of request."""

    needs_hidden = False
    runs_model = True
    stops_itself = True

    def __init__(self, inner: ChainProposer) -> None:
        self.inner = inner
        self.name = inner.name
        self.kind = ""  # of the requests that run
        self.seen: dict[str, list[Seen]] = {}

    def propose(self, wanted: Mapping[int, Wanted]) -> dict[int, Drafts]:
        return self.inner.propose(wanted)

    def computed(self, batch: ScheduledBatch, hidden: Any, decided: Mapping[int, int]) -> None:
        rows = [row for row in batch.rows if len(row.sampled) > 1 and row.handle in decided]
        self.seen.setdefault(self.kind, []).extend((len(row.sampled) - 1, decided[row.handle] - 1) for row in rows)
        self.inner.computed(batch, hidden, decided)

    def forget(self, handle: int) -> None:
        self.inner.forget(handle)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.seen))


class TakeAll(DraftControl):
    """Takes what is offered, whatever it costs."""

    def choose(self, offers: Mapping[int, tuple[DraftKind, int]], num_decodes: int) -> dict[int, int]:  # noqa: ARG002
        return {handle: count for handle, (_, count) in offers.items()}

    def best_length(self, name: str, handles: list[int], num_decodes: int, max_drafts: int, draft_s: float) -> int:  # noqa: ARG002
        return max_drafts


class Unstopped(Margins):
    """Margins that end no chain."""

    def chance(self, level: int) -> float:  # noqa: ARG002
        return 1.0


class Imposer(Recorder):
    """One whose chains are as long as some that were seen, and stand as far."""

    def __init__(self, inner: ChainProposer, path: Path, vocab_size: int) -> None:
        super().__init__(inner)
        inner.margins = Unstopped()
        self.imposed: dict[str, list[Seen]] = json.loads(path.read_text())
        self.vocab_size = vocab_size
        self.answers: dict[int, list[int]] = {}  # by the request's seed
        self.rng = random.Random(0)

    def propose(self, wanted: Mapping[int, Wanted]) -> dict[int, Drafts]:
        drawn = {handle: self.rng.choice(self.imposed[self.kind]) for handle in wanted}
        found = self.inner.propose(
            {
                handle: replace(each, max_drafts=min(each.max_drafts, drawn[handle][0]))
                for handle, each in wanted.items()
            }
        )
        return {
            handle: Drafts(self._as_seen(wanted[handle], len(drafts.token_ids), drawn[handle][1]))
            for handle, drafts in found.items()
        }

    def _as_seen(self, wanted: Wanted, count: int, stood: int) -> list[int]:
        sequence = wanted.sequence
        answer = self.answers[sequence.request.params.seed][sequence.tokens.num_output :][:count]
        return [token_id if at < stood else (token_id + 1) % self.vocab_size for at, token_id in enumerate(answer)]
