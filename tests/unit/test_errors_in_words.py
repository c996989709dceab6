"""A refusal of the operating system is told in a line of words: no number, no traceback, and the path once."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from shared.process.errors import words_of

NOWHERE = "http://127.0.0.1:9"  # nobody listens there


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOTDIR, "Not a directory", "/tmp/x"), "Not a directory"),
        (OSError(errno.EXDEV, "Invalid cross-device link", "/a", None, "/b"), "Invalid cross-device link"),
        (RuntimeError("[Errno 111] Connection refused"), "Connection refused"),
        (RuntimeError("[Errno -2] Name or service not known"), "Name or service not known"),
        (redis.ConnectionError("Error 111 connecting to 127.0.0.1:9. Connection refused."), "Connection refused."),
        (ValueError("a line: 'quoted'"), "a line: 'quoted'"),
        (ValueError("two\nlines"), "two"),
        (ValueError("x is wrong:\n    ValueError: 1 is odd\nmore"), "x is wrong: ValueError: 1 is odd"),
        (ValueError("x:\n"), "x:"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_is_told_in_words(error: Exception, words: str) -> None:
    assert words_of(error) == words


COMMANDS = {
    "a hub that can't be reached": (
        ["pull", "some/model"],
        "some/model can't be fetched from the hub: Connection refused (is there a network?",
    ),
    "a model folder under a file": (["pull", "smollm2-135m"], "file/.penstock/models/smollm2-135m: Not a directory"),
    "a data folder under a file": (
        ["up", "--model", "demo", "--data-dir", "{file}/x"],
        "--data-dir {file}/x: Not a directory",
    ),
    "keys in a folder that can't be": (
        ["keys", "add", "me", "--keys-file", "/proc/none/x"],
        "/proc/none/x can't be written: No such file or directory",
    ),
    "no Redis": (["status", "--redis-url", "redis://127.0.0.1:9"], "is Penstock up? (Connection refused.)"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_can_t_says_why_in_a_line(name: str, tmp_path: Path) -> None:
    arguments, words = COMMANDS[name]
    file = tmp_path / "file"
    file.touch()
    home = file if name == "a model folder under a file" else tmp_path
    command = [sys.executable, "-m", "services.operator.cli", *(each.format(file=file) for each in arguments)]
    environment = os.environ | {"HOME": str(home), "HF_ENDPOINT": NOWHERE, "NO_PROXY": "*"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if not line.startswith("fetching ")]
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert words.format(file=file) in said[0] and re.search(r"Errno|Error \d|Traceback", done.stderr) is None, said
