"""How an answer is shown: as it is where output goes to a file or a pipe; as Markdown on a
terminal, drawn while it comes.

What is drawn grows at its end, so of each drawing only the lines that differ from the last are
written, in one go: nothing flickers, and what has scrolled away is not touched.
"""

import math
import re
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, TextIO

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import Heading, Markdown
from rich.text import Text
from rich.theme import Theme

DRAW_EVERY_S = 0.05
# times as long as a drawing took, none follows: a list of a thousand points is one block, and takes its time
DRAWING_SHARE = 5
THEME = Theme({"markdown.code": "bold cyan", "markdown.h1": "bold underline"})  # readable on a light terminal, too
# all but tab and newline: a model must not steer the terminal
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
PADDING = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")  # rich fills lines up, which a copy would have
MARK_PASTES, NO_MARKS = (
    "\x1b[?2004h",
    "\x1b[?2004l",
)  # a terminal puts marks around a paste, which the prompt then knows as one
# <tags> that a model writes are text
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class Display(Protocol):
    """Where an answer goes, piece by piece."""

    def text(self, text: str) -> None: ...

    def reasoning(self, text: str) -> None: ...

    def notice(self, text: str) -> None:
        """A line about the answer, which is no part of it."""

    def passing(self, text: str) -> None:
        """The same, until the answer goes on."""

    def end(self) -> None:
        """The answer is over, or broke off."""


class PlainDisplay:
    """The answer alone, on standard output."""

    def __init__(self, out: TextIO, errors: TextIO) -> None:
        self.out = out
        self.errors = errors
        self._last = "\n"

    def text(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
        self._last = text[-1:] or self._last

    def reasoning(self, text: str) -> None:
        """Not shown: the reader of a pipe wants the answer."""

    def notice(self, text: str) -> None:
        self.errors.write(f"penstock: {text}\n")

    def passing(self, text: str) -> None:
        self.notice(text)

    def end(self) -> None:
        if self._last != "\n":
            self.text("\n")


class TerminalDisplay:
    """Thoughts dim, then the answer as Markdown."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._region: Region | None = None

    def text(self, text: str) -> None:
        self._in(render_markdown, settled_markdown).add(text)

    def reasoning(self, text: str) -> None:
        self._in(render_reasoning, settled_reasoning).add(text)

    def notice(self, text: str) -> None:
        self.end()
        self.console.print(Text(f"[{clean(text)}]", style="dim"))

    def passing(self, text: str) -> None:
        region = self._region or self._in(render_markdown, settled_markdown)
        region.draw(foot=f"[{clean(text)}]")

    def end(self) -> None:
        if self._region is not None:
            self._region.end()
            self._region = None

    def _in(self, render: Callable[[str], RenderableType], settled: Callable[[str], int]) -> "Region":
        """The region that text of this kind goes to: the present one, or a new one below."""
        if self._region is None or self._region.render is not render:
            if self._region is not None:
                self._region.end()
                self.console.print()
            self._region = Region(self.console, render, settled)
        return self._region


class Region:
    """Text at the end of the screen that grows. Between drawings the cursor stands at the end of its last line."""

    def __init__(
        self, console: Console, render: Callable[[str], RenderableType], settled: Callable[[str], int]
    ) -> None:
        """settled: how many characters the first block of a text has, if that will not change any
        more, whatever follows; else 0.
        """
        self.console = console
        self.render = render
        self.settled = settled
        self._text = ""  # what is not settled
        self._lines: list[str] = []  # of it, as they stand on the screen
        self._has_begun = False  # there is a block above
        self._drawn_at = 0.0
        self._pause_s = DRAW_EVERY_S

    def add(self, text: str) -> None:
        self._text += clean(text)
        if time.monotonic() - self._drawn_at >= self._pause_s:
            self.draw()

    def draw(self, foot: str = "") -> None:
        """Bring the screen up to date, with a line below that the next drawing takes away."""
        began_at = time.monotonic()
        while count := self.settled(self._text):
            self._draw_block(self._text[:count])
            self._text = self._text[count:]
            if self._lines:
                self._write("\n")
                self._lines = []
                self._has_begun = True
        self._draw_block(self._text, foot)
        self._drawn_at = time.monotonic()
        self._pause_s = max(DRAW_EVERY_S, DRAWING_SHARE * (self._drawn_at - began_at))

    def end(self) -> None:
        """Draw the rest; the cursor is on a line of its own then."""
        self.draw()
        if self._lines:
            self._write("\n")
        self._lines = []

    def _draw_block(self, text: str, foot: str = "") -> None:
        lines = self._render_lines(self.render(text))
        if foot:
            lines += self._render_lines(Text(foot, style="dim"))
        if lines and self._has_begun:
            lines.insert(0, "")  # between two blocks
        self._replace(lines)

    def _render_lines(self, renderable: RenderableType) -> list[str]:
        with self.console.capture() as capture:
            self.console.print(renderable)
        lines = [PADDING.sub(r"\1", line) for line in capture.get().split("\n")]
        while lines and not Text.from_ansi(lines[-1]).plain.strip():
            lines.pop()
        while lines and not Text.from_ansi(lines[0]).plain.strip():
            lines.pop(0)
        return lines

    def _replace(self, lines: list[str]) -> None:
        """Have these lines stand where the present ones do."""
        old = self._lines
        num_same = next(
            (number for number, (a, b) in enumerate(zip(old, lines, strict=False)) if a != b), min(len(old), len(lines))
        )
        if num_same == len(old) == len(lines):
            return
        if num_same == len(lines) and num_same:
            num_same -= 1  # fewer lines than before: the cursor belongs at the end of the last
        height, width = self.console.height, self.console.width
        # of lines that were drawn for another width, several
        rows = [max(1, math.ceil(Text.from_ansi(line).cell_len / width)) for line in old]
        while num_same < len(old) and sum(rows[num_same:]) > height:
            num_same += 1  # out of reach: it has scrolled away
        new = "\n".join(lines[num_same:])
        if num_same < len(old):
            up = sum(rows[num_same:]) - 1
            self._write("\r" + (f"\x1b[{up}A" if up else "") + "\x1b[J" + new)
        else:
            self._write(("\n" if old and new else "") + new)
        self._lines = lines

    def _write(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()


class LeftHeading(Heading):
    """Not centred."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class ChatMarkdown(Markdown):
    """Markdown as chats have it: a line break is one, and tags are text."""

    elements = Markdown.elements | {"heading_open": LeftHeading}

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme="ansi_dark")
        self.parsed = PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or []:
                if child.type == "softbreak":
                    child.type = "hardbreak"


def render_markdown(text: str) -> RenderableType:
    return ChatMarkdown(text)


def settled_markdown(text: str) -> int:
    """A block at the top level is settled once another follows it: what is appended can change the last one only."""
    starts = [token.map[0] for token in PARSER.parse(text) if token.level == 0 and token.map is not None]
    return sum(len(line) + 1 for line in text.split("\n")[: starts[1]]) if len(starts) > 1 else 0


def render_reasoning(text: str) -> RenderableType:
    return Text(text.strip("\n"), style="dim italic")


def settled_reasoning(text: str) -> int:
    return text.find("\n\n") + 2 if "\n\n" in text.rstrip("\n") else 0


def clean(text: str) -> str:
    """Without what a terminal would take for a command."""
    return text.translate(CONTROLS)


def make_display() -> Display:
    console = make_console()
    return (
        TerminalDisplay(console)
        if console.is_terminal and not console.is_dumb_terminal
        else PlainDisplay(sys.stdout, sys.stderr)
    )


def make_console() -> Console:
    return Console(theme=THEME, highlight=False, markup=False, emoji=False)


@contextmanager
def on_interrupt(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """SIGINT goes to this handler."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def quiet_keyboard() -> Iterator[None]:
    """Keeps what is typed or pasted while an answer comes for the next question, and does not show
    in between. Ctrl-C works.
    """
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = termios.tcgetattr(descriptor)
    silent[3] &= ~(termios.ECHO | termios.ICANON)  # by lines, a terminal would drop what is beyond 4,096 bytes
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    screen = sys.stdout if sys.stdout.isatty() else sys.stderr
    screen.write(MARK_PASTES)
    screen.flush()
    try:
        yield
    finally:
        screen.write(NO_MARKS)
        screen.flush()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
