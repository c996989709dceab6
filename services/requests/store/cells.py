"""Cells: pipelines side by side, each in a Redis of its own, or in a slot of its own in a cluster."""

import hashlib
import re
from dataclasses import dataclass

from shared.process.errors import StartupError
from shared.process.settings import RequestSettings
from shared.wire.redis_urls import parse_named, wrong_url

HOME = "home"
CELL = re.compile(r"([a-z0-9-]{1,16})=([a-z+]+://\S+)")


@dataclass(frozen=True, slots=True)
class Cell:
    """A pipeline's place."""

    name: str
    redis_url: str

    @property
    def mark(self) -> str:
        """The end of the ids of its responses."""
        return hashlib.blake2b(self.name.encode(), digest_size=2).hexdigest()


def cells_of(settings: RequestSettings) -> list[Cell]:
    """The cells, home first. Raises StartupError for one that is none, and for two that could not be
    told apart. URLs may hold passwords, so it names none."""
    cells = [Cell(HOME, settings.redis_url)]
    for number, said in enumerate(settings.cell, 1):
        if (found := CELL.fullmatch(said)) is None:
            example = (
                "NAME=REDIS_URL is, as in b=redis://10.0.0.6:6379/0; a name has up to 16 small letters, digits and "
                "hyphens"
            )
            raise StartupError(f"--cell: number {number} is no cell: {example}")
        cell = Cell(found[1], found[2])
        try:
            parse_named(cell.redis_url)
        except ValueError as error:
            raise StartupError(f"--cell {cell.name}: not a Redis URL: {wrong_url(cell.redis_url, error)}") from None
        if any(cell.mark == other.mark for other in cells):
            raise StartupError(
                f"--cell {cell.name}: another cell has this name, or one whose responses could not be told from its own"
            )
        if (like := next((other for other in cells if other.redis_url == cell.redis_url), None)) is not None:
            raise StartupError(f"--cell {cell.name}: it has the Redis of the cell {like.name}")
        cells.append(cell)
    return cells
