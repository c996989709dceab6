"""`penstock chat` on a pseudo-terminal, against the demo pipeline: only a terminal has bracketed
paste, Ctrl-C and a screen. pexpect is the keyboard, pyte the screen."""

import contextlib
import json
import re
import signal
import socket
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pexpect
import pyte
import pytest

from tests.deployment import Deployment
from tests.forge import ForkedProcess
from tests.waiting import wait_until

WIDTH, HEIGHT = 80, 100
MARKED_PASTES = 2004 << 5  # as pyte numbers the terminal's mode
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, home: Path, *arguments: str) -> None:
        environment = {
            "HOME": str(home),
            "TERM": "xterm-256color",
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "PATH": "/usr/bin:/bin",
        }
        command = ["-m", "services.operator.cli", "chat", *arguments]
        self.process = pexpect.spawn(
            sys.executable,
            command,
            env=environment,
            dimensions=(HEIGHT, WIDTH),
            encoding="utf-8",
            timeout=60,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # a shell that began us in the background had it ignored
        )
        self.screen = pyte.Screen(WIDTH, HEIGHT)
        self.process.logfile_read = self
        self._stream = pyte.Stream(self.screen)

    def write(self, text: str) -> None:
        """Takes the command's output from pexpect."""
        self._stream.feed(text)

    def flush(self) -> None:
        """pexpect wants it of a log."""

    def send(self, text: str) -> None:
        self.process.send(text)

    def send_question(self, text: str, compute: ForkedProcess) -> None:
        """Until it waits for the answer, which does not come: compute is stopped."""
        compute.send_signal(signal.SIGSTOP)
        self.send(text + "\r")
        wait_until(self.waits_for_an_answer, description="it waits for the answer")

    def waits_for_an_answer(self) -> bool:
        """Neither the prompt has the keyboard nor a command: keys do not show, but Ctrl-C is a signal."""
        return bool(termios.tcgetattr(self.process.child_fd)[3] & (termios.ECHO | termios.ISIG) == termios.ISIG)

    def lines(self) -> list[str]:
        """The screen as it is now."""
        with contextlib.suppress(pexpect.TIMEOUT, pexpect.EOF):
            self.process.expect(r"\Z never", timeout=0.05)
        return [line.rstrip() for line in self.screen.display]

    def wait_for(self, pattern: str, count: int = 1) -> str:
        """Until so many lines of the screen match; returns the last one."""
        try:
            return wait_until(
                lambda: (
                    found[-1]
                    if len(found := [line for line in self.lines() if re.search(pattern, line)]) >= count
                    else ""
                ),
                description=pattern,
                timeout_s=100,
            )
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *filter(None, self.lines())])) from None

    def is_at_prompt(self) -> bool:
        return [line for line in self.lines() if line][-1:] == [">"]

    def wait_for_prompt(self) -> None:
        """Until it waits for a question."""
        try:
            wait_until(self.is_at_prompt, description="an empty prompt", timeout_s=100)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *filter(None, self.lines())])) from None


@pytest.fixture
def chat(demo: Deployment, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path, "--url", demo.url(), "--temperature", "0")
    terminal.wait_for_prompt()
    yield terminal
    terminal.process.close(force=True)


def test_a_conversation_as_a_person_has_it(chat: Terminal, tmp_path: Path) -> None:
    assert chat.lines()[0].startswith("penstock-demo at http://127.0.0.1:")
    chat.send("What is Penstick?\x1b[D\x1b[D\x1b[D\x7fo\r")  # three steps left over "ck?", and the letter is mended
    assert re.search(r"\[37 tokens · [\d.,]+ tokens/s · TTFT \d+\.\d\d s\]", chat.wait_for(r"\[37 tokens"))
    assert "Penstock is a server for large language models. It runs as a pipeline of" in chat.lines()
    chat.wait_for_prompt()
    chat.send(
        "\x1b[200~Thank\nyou!\x1b[201~"
    )  # a paste of two lines is one question, and is not sent by its line break
    chat.wait_for("^  you!$")
    chat.send("\r")
    chat.wait_for(r"\[\d+ tokens", 2)
    chat.send("/sytem\r")
    chat.wait_for("no command /sytem: did you mean /system\\?")
    chat.send("/system Be brief.\r")
    chat.wait_for("system prompt: Be brief.")
    saved = tmp_path / "saved.json"
    chat.send(f"/save {saved}\r")
    chat.wait_for("written to")
    messages = json.loads(saved.read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [messages[1]["content"], messages[3]["content"]] == ["What is Penstock?", "Thank\nyou!"]
    chat.send("/save " + str(saved) + "\r")
    chat.wait_for("File exists")
    chat.send("/reset\r")
    chat.wait_for("^forgotten$")
    chat.send("/regenerate\r")
    chat.wait_for("there is no answer yet")
    chat.send(CTRL_C)
    chat.wait_for("Ctrl-D or /exit ends the chat")
    history = tmp_path / ".penstock" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600 and "+What is Penstock?\n" in history.read_text()
    chat.send(CTRL_D)
    chat.process.expect(pexpect.EOF)
    chat.process.close()
    assert chat.process.exitstatus == 0


class Holding:
    """A way to the gateway on which an answer stops after its first events, as if the rest were yet to be computed."""

    def __init__(self, url: str, num_events: int) -> None:
        self.num_events = num_events
        self._gateway = httpx.URL(url)
        self._released = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._released.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                gateway = socket.create_connection((self._gateway.host, self._gateway.port or 80))
                threading.Thread(target=self._copy, args=(client, gateway, None), daemon=True).start()
                threading.Thread(target=self._copy, args=(gateway, client, self.num_events), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, num_events: int | None) -> None:
        """Until either end is closed; held once so many events have come this way."""
        found = 0
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(256):
                target.sendall(data)
                found += data.count(b"\n\n")
                if num_events is not None and found >= num_events:
                    self._released.wait()


def test_ctrl_c_stops_an_answer(demo: Deployment, tmp_path: Path) -> None:
    way = Holding(demo.url(), 20)
    chat = Terminal(
        tmp_path, "--url", way.url, "--temperature", "100", "--max-tokens", "900", "--seed", "0"
    )  # a long answer
    try:
        chat.wait_for_prompt()
        chat.send("Go.\r")
        wait_until(
            lambda: len("".join(chat.lines()).rpartition("Go.")[2]) > 20 and chat.waits_for_an_answer(),
            description="some of an answer",
            timeout_s=100,
        )
        chat.send("typed meanwhile" + CTRL_C)
        chat.wait_for(r"^\[stopped\]$")
        chat.send("/reset\r")
        chat.wait_for("^forgotten$")
    finally:
        way.close()
        chat.process.close(force=True)


def test_ctrl_c_again_and_again_ends_no_chat(demo: Deployment, tmp_path: Path) -> None:
    """The first may stop an answer; the next ones come when it has ended, and there is no prompt yet."""
    [compute] = [process for name, process in demo.processes.items() if name.startswith("compute")]
    chat = Terminal(tmp_path, "--url", demo.url(), "--temperature", "100", "--max-tokens", "300", "--seed", "0")
    try:
        chat.wait_for_prompt()
        for _ in range(3):
            chat.send_question("Go.", compute)
            compute.send_signal(signal.SIGCONT)
            for _ in range(30):
                chat.process.kill(signal.SIGINT)
                time.sleep(0.001)
            chat.wait_for_prompt()
        chat.send("/reset\r")
        chat.wait_for("^forgotten$")
    finally:
        compute.send_signal(signal.SIGCONT)
        chat.process.close(force=True)


def test_what_is_pasted_in_mid_answer_is_one_question(demo: Deployment, chat: Terminal) -> None:
    [compute] = [process for name, process in demo.processes.items() if name.startswith("compute")]
    try:
        chat.send_question("What is Penstock?", compute)
        wait_until(lambda: chat.lines() and MARKED_PASTES in chat.screen.mode, description="it asks for marked pastes")
        chat.send("\x1b[200~Thank\n/reset\n" + "x" * 5_000 + "\nyou!\x1b[201~")  # more than a terminal keeps of a line
    finally:
        compute.send_signal(signal.SIGCONT)
    chat.wait_for("^  you!$")
    chat.send(CTRL_C)
    chat.wait_for("Ctrl-D or /exit ends the chat")
    chat.send("/regenerate\r")  # nothing was sent, and nothing forgotten
    chat.wait_for(r"\[37 tokens", 2)


def test_a_full_context_loses_its_oldest_turn(demo: Deployment, tmp_path: Path) -> None:
    chat = Terminal(tmp_path, "--url", demo.url(), "--temperature", "100", "--max-tokens", "10", "--seed", "0")
    try:
        chat.wait_for_prompt()
        chat.send("\x1b[200~" + "What is a turbine? " * 165 + "\x1b[201~\r")  # most of the context of 1,024 tokens
        chat.wait_for(r"cut off: the answer has reached --max-tokens, or the end")
        chat.wait_for_prompt()
        chat.send("Go on, please, and on. " * 10 + "\r")
        chat.wait_for(r"\[the context is full: forgot the oldest turn of this chat\]")
        chat.send(CTRL_C)
        chat.wait_for_prompt()
    finally:
        chat.process.close(force=True)
