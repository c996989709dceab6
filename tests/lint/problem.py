"""The report of a check, and the root of the checkout that it reads."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Problem:
    """Something wrong in a file of the checkout. Lines are counted from 1; 0 means the whole file."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        place = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{place}:{self.line}: {self.text}" if self.line else f"{place}: {self.text}"


def line_of(path: Path, words: str) -> int:
    """The first line that contains `words`; 0 if none does."""
    return next((number for number, line in enumerate(path.read_text().splitlines(), 1) if words in line), 0)
