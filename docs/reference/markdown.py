"""The Markdown that the generated pages share."""

import re
import textwrap
from collections.abc import Sequence

WIDTH = 100  # columns of prose
HEAD = "<!-- Written from the code by `make docs`. Do not edit: change the code, and run it again. -->\n\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table. Cells may hold anything but line breaks."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(escaped(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def escaped(cell: str) -> str:
    """A cell's text on one line. A bar would end the cell, in code too; outside of code, < would begin HTML."""
    parts = " ".join(cell.split()).replace("|", "\\|").split("`")
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))


def paragraph(text: str) -> str:
    """Prose, wrapped. A line that would begin a list is escaped."""
    wrapped = textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)
    return re.sub(r"(?m)^([-+*]) ", r"\\\1 ", wrapped) + "\n"


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def sentence(text: str) -> str:
    """A description as it stands in a table: it begins with a capital letter, unless it begins with a name."""
    first = text.split(maxsplit=1)[0] if text else ""
    return text[0].upper() + text[1:] if first.isalpha() and first.islower() else text
