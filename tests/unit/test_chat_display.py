"""An answer on a terminal, whatever pieces it came in: the bytes go to a real terminal emulator (pyte)."""

import io

import pyte
import pytest

from services.operator.chat import display
from services.operator.chat.display import PlainDisplay, TerminalDisplay, make_console, settled_markdown

ANSWER = """# Rivers

A river is water that runs to the sea. It is
**long**, and it *bends* where the ground is `soft`.

- the Rhine
- the Danube, which is a good deal longer than one line of a narrow terminal has room for
- <b>the Elbe</b>

| river | length in km |
|-------|--------------|
| Rhine | 1,230        |

```python
def flow(metres: int) -> int:

    return metres * 2
```

1. first
2. second

The end."""

SHOWN = [
    "Rivers",
    "",
    "A river is water that runs to the sea.",
    "It is",
    "long, and it bends where the ground is",
    "soft.",
    "",
    " • the Rhine",
    " • the Danube, which is a good deal",
    "   longer than one line of a narrow",
    "   terminal has room for",
    " • <b>the Elbe</b>",
]


class Terminal:
    """A display, and the screen that it draws on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int = 40, height: int = 24) -> None:
        for name, value in (
            ("TERM", "xterm-256color"),
            ("COLUMNS", str(width)),
            ("LINES", str(height)),
            ("FORCE_COLOR", "1"),
        ):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(display, "DRAW_EVERY_S", 0.0)
        monkeypatch.setattr(display, "DRAWING_SHARE", 0.0)
        self.output = io.StringIO()
        console = make_console()
        console.file = self.output
        self.display = TerminalDisplay(console)
        self.width = width

    def lines(self, height: int = 200) -> list[str]:
        """Lines of a screen that nothing scrolls off."""
        screen = pyte.Screen(self.width, height)
        screen.set_mode(pyte.modes.LNM)
        pyte.Stream(screen).feed(self.output.getvalue())
        lines = [line.rstrip() for line in screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines


@pytest.mark.parametrize("size", [2, 31])
def test_an_answer_looks_the_same_whatever_pieces_it_came_in(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    whole = Terminal(monkeypatch)
    whole.display.text(ANSWER)
    whole.display.end()
    assert whole.lines()[: len(SHOWN)] == SHOWN
    pieces = Terminal(monkeypatch)
    for start in range(0, len(ANSWER), size):
        pieces.display.text(ANSWER[start : start + size])
    pieces.display.end()
    assert pieces.lines() == whole.lines()
    assert "" not in [a for a, b in zip(whole.lines(), whole.lines()[1:], strict=False) if a == b], (
        "one empty line between blocks, never two"
    )


def test_what_does_not_change_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    words = [f"word{number}" for number in range(100)]
    for word in words:
        terminal.display.text(word + " ")
    terminal.display.end()
    assert terminal.output.getvalue().count("word0 ") <= 6, "the first line is drawn while it grows, and then no more"
    assert " ".join(terminal.lines()).split() == words


def test_thoughts_stand_above_the_answer_and_a_passing_line_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    terminal.display.reasoning("Hm.\n\nLet me")
    terminal.display.reasoning(" see.")
    terminal.display.text("It is ")
    terminal.display.passing("connection lost")
    assert terminal.lines()[-1] == "[connection lost]"
    terminal.display.text("so.")
    terminal.display.end()
    terminal.display.notice("3 tokens")
    assert terminal.lines() == ["Hm.", "", "Let me see.", "", "It is so.", "[3 tokens]"]


def test_a_model_does_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    for piece in ("safe\x1b", "[2J\x1b]0;title\x07", "\x9b31m\r\b"):
        terminal.display.text(piece)
    terminal.display.end()
    terminal.display.notice("error: \x1b[31mred")
    assert terminal.lines() == ["safe[2J]0;title31m", "[error: [31mred]"]


def test_lines_that_have_scrolled_away_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, height=5)
    items = [f"- item {number}\n" for number in range(40)]
    for item in items:
        terminal.display.text(item)
    terminal.display.end()
    assert terminal.lines() == [f" • item {number}" for number in range(40)]


def test_settled_is_all_before_the_last_block() -> None:
    assert settled_markdown("one") == 0
    assert settled_markdown("one\n\ntwo") == 5
    assert settled_markdown("- a\n\n  b\n") == 0
    assert settled_markdown("```\na\n\nb") == 0


def test_a_pipe_gets_the_answer_alone() -> None:
    out, errors = io.StringIO(), io.StringIO()
    plain = PlainDisplay(out, errors)
    plain.reasoning("Hm.")
    plain.text("**It** is ")
    plain.passing("connection lost")
    plain.text("so.")
    plain.end()
    assert out.getvalue() == "**It** is so.\n" and errors.getvalue() == "penstock: connection lost\n"
