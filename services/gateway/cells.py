"""Cells: a gateway may serve several pipelines, each in a Redis of its own, or in a slot of its own
in a cluster.

A response lives in one cell, and the last four digits of its id say in which. The first cell, home,
also keeps what belongs to no pipeline: files, batches, prompt modules, and limits a minute.

A new response goes to a cell that serves its model. The same beginning of a prompt goes to the same
cell, whose prefix cache has it, unless that cell has more than its share of this gateway's
sequences by a quarter ("Consistent Hashing with Bounded Loads", Mirrokni, Thorup, Zadimoghaddam,
arXiv 1608.01350, section 2).
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from services.gateway.generation.generation import Pipeline
from services.requests.dialects.responses.conversation import ITEM_ID
from services.requests.store.admission.admission import served_names, unknown_model
from services.requests.store.tenants.tenant import Tenant
from shared.process.stages import PIPELINE
from shared.wire.registry import Registry
from shared.wire.stage import Stage

SURPLUS = 1.25  # of a cell's share of the sequences: beyond, the next cell has them
BEGINNING = 256  # characters of a message, or of a prompt, that say where it goes


class CellContext(Protocol):
    """As much of a context as a choice of cells looks at."""

    @property
    def mark(self) -> str: ...
    @property
    def stage(self) -> Stage: ...
    @property
    def registry(self) -> Registry: ...
    @property
    def pipeline(self) -> Pipeline: ...


C = TypeVar("C", bound=CellContext)


class Cells(Generic[C]):
    """The contexts of a gateway's cells, home first."""

    def __init__(self) -> None:
        self.by_mark: dict[str, C] = {}

    @property
    def contexts(self) -> tuple[C, ...]:
        return tuple(self.by_mark.values())

    @property
    def home(self) -> C:
        return self.contexts[0]

    def of(self, response_id: str) -> C:
        """The cell of a response; home for an id of no cell."""
        return self.by_mark.get(response_id[-4:], self.home)

    def choose(self, body: Any, tenant: Tenant) -> C:
        """The cell for a request. One that goes on with a response, or names its items, stays in that
        one's. Raises Invalid (404) for a model that no cell has."""
        if len(self.by_mark) == 1 or not isinstance(name := getattr(body, "model", None), str):
            return self.home
        if earlier := earlier_of(body):
            return self.of(earlier)
        models = {context.mark: served_names(context.registry, tenant) for context in self.contexts}
        knowing = [context for context in self.contexts if name in models[context.mark]]
        if not knowing and any(models.values()):
            raise unknown_model(name, {known for names in models.values() for known in names})
        there = [(each, models[each.mark][name].model or "") for each in knowing if not each.stage.problem]
        # those that live; then those whose replicas can be waited for
        ready = [each for each in there if is_whole(each[0].stage.registry, each[1])] or [
            each for each in there if is_whole(each[0].registry, each[1])
        ]
        return chosen(ready, beginning_of(body)) if ready else (*knowing, self.home)[0]


def is_whole(registry: Registry, model: str) -> bool:
    """Whether the registry has all stages of the model."""
    return all(registry.of(stage, model) for stage in PIPELINE)


def chosen(places: Sequence[tuple[C, str]], beginning: str) -> C:
    """The first cell, in an order that the prompt's beginning makes, with room for one more
    sequence of this gateway's. places: cells, each with the model's own name there."""
    weights = {each.mark: max(1, len(each.stage.registry.of("compute", model))) for each, model in places}
    counts = {each.mark: each.pipeline.subscriptions.num_sequences for each, _ in places}
    share = SURPLUS * (sum(counts.values()) + 1) / sum(weights.values())
    order = sorted(
        (each for each, _ in places),
        key=lambda each: hashlib.blake2b(f"{each.mark}{beginning}".encode(errors="replace")).digest(),
    )
    return next(each for each in order if counts[each.mark] < math.ceil(share * weights[each.mark]))


def earlier_of(body: Any) -> str:
    """The response that a request goes on with, or whose items it names; empty: none."""
    items = getattr(body, "input", None)
    named = (
        [
            ITEM_ID.fullmatch(str(item.get("id")))
            for item in items
            if isinstance(item, dict) and item.get("type") == "item_reference"
        ]
        if items
        else []
    )
    return getattr(body, "previous_response_id", None) or next((found[1] for found in named if found is not None), "")


def beginning_of(body: Any) -> str:
    """Return what prompts that share a cached prefix most likely have in common: the beginnings of two
    messages, or of the text."""
    begun = getattr(body, "messages", None) or getattr(body, "prompt", None) or getattr(body, "input", None) or ""
    parts = [text_of(each) for each in begun[:2]] if isinstance(begun, list) else [begun]
    return "/".join(part[:BEGINNING] for part in parts if isinstance(part, str))


def text_of(part: Any) -> Any:
    """The text of a message or an item, of any API, or of the first part of its content."""
    for _ in range(2):
        part = (
            part.get("content", part.get("text"))
            if isinstance(part, dict)
            else getattr(part, "content", getattr(part, "text", part))
        )
        part = part[0] if isinstance(part, list) and part else part
    return part
