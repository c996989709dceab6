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
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from services.gateway.generation.generation import Pipeline
from services.requests.admission.admission import served_names, unknown_model
from services.requests.tenants.tenant import Tenant
from shared.process.errors import StartupError
from shared.process.settings import GatewaySettings
from shared.process.stages import PIPELINE
from shared.wire.registry import Registry

HOME = "home"
CELL = re.compile(r"[a-z0-9-]{1,16}=[a-z+]+://\S+")
SURPLUS = 1.25  # of a cell's share of the sequences: beyond, the next cell has them
BEGINNING = 256  # characters of a message, or of a prompt, that say where it goes


@dataclass(frozen=True, slots=True)
class Cell:
    """A pipeline's place."""

    name: str
    redis_url: str

    @property
    def mark(self) -> str:
        """The end of the ids of its responses."""
        return hashlib.blake2b(self.name.encode(), digest_size=2).hexdigest()


def cells_of(settings: GatewaySettings) -> list[Cell]:
    """The cells, home first. Raises StartupError for one that is none, and for two of one name."""
    cells = [Cell(HOME, settings.redis_url)]
    for named in settings.cell:
        if CELL.fullmatch(named) is None:
            example = "NAME=REDIS_URL is, as in b=redis://10.0.0.6:6379/0; a name has up to 16 small letters, digits and hyphens"
            raise StartupError(f"--cell: {named!r} is no cell: {example}")
        cell = Cell(*named.split("=", 1))
        if any(cell.mark == other.mark for other in cells):
            raise StartupError(f"--cell {named}: another cell has this name, or one whose responses could not be told from its own")
        cells.append(cell)
    return cells


class CellContext(Protocol):
    """As much of a context as a choice of cells looks at."""

    @property
    def mark(self) -> str: ...
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
        """The cell for a request. One that goes on with a response stays in that one's. Raises
        Invalid (404) for a model that no cell has."""
        if len(self.by_mark) == 1 or not isinstance(name := getattr(body, "model", None), str):
            return self.home
        if earlier := getattr(body, "previous_response_id", None):
            return self.of(earlier)
        models = {each.mark: served_names(each.registry, tenant) for each in self.contexts}
        knowing = [each for each in self.contexts if name in models[each.mark]]
        if not knowing and any(models.values()):
            raise unknown_model(name, {known for names in models.values() for known in names})
        ready = [each for each in knowing if is_whole(each, models[each.mark][name].model or "")]
        return chosen(ready, beginning_of(body)) if ready else (*knowing, self.home)[0]


def is_whole(context: CellContext, model: str) -> bool:
    """Whether all stages of the model live there, or can be waited for."""
    return all(context.registry.of(stage, model) for stage in PIPELINE)


def chosen(contexts: Sequence[C], beginning: str) -> C:
    """The first cell, in an order that the prompt's beginning makes, with room for one more
    sequence of this gateway's."""
    weights = {each.mark: len(each.registry.of("compute")) for each in contexts}
    counts = {each.mark: each.pipeline.subscriptions.num_sequences for each in contexts}
    most = SURPLUS * (sum(counts.values()) + 1) / sum(weights.values())
    order = sorted(contexts, key=lambda each: hashlib.blake2b(f"{each.mark}{beginning}".encode(errors="replace")).digest())
    return next(each for each in order if counts[each.mark] < math.ceil(most * weights[each.mark]))


def beginning_of(body: Any) -> str:
    """Return what prompts that share a cached prefix most likely have in common: the beginnings of two
    messages, or of the text."""
    begun = getattr(body, "messages", None) or getattr(body, "prompt", None) or getattr(body, "input", None) or ""
    parts = [text_of(each) for each in begun[:2]] if isinstance(begun, list) else [begun]
    return "/".join(part[:BEGINNING] for part in parts if isinstance(part, str))


def text_of(part: Any) -> Any:
    """The text of a message or an item, of any API, or of the first part of its content."""
    found = part.get("content", part.get("text")) if isinstance(part, dict) else getattr(part, "content", getattr(part, "text", part))
    return text_of(found[0]) if isinstance(found, list) and found else found
