"""However a stage ends, it says what it has to say, and its process does not go through the interpreter's
taking down of modules: OpenSSL dies there with SIGSEGV where a thread speaks with Redis.
"""

import os
import subprocess
import sys

import pytest

from shared.process.worker import QUESTION

STAGE = """
import atexit, signal, sys, threading, time
import redis
from shared.process.errors import Recoverable, StartupError
from shared.process.stage_settings import StageSettings
from shared.wire.stage import Stage, run_stage

class Noisy:
    def __del__(self):  # as bindings that report when the interpreter takes the modules down
        print("reported", file=sys.stderr)

noisy = Noisy()
atexit.register(lambda: print("exit function"))
stage = Stage("sampler", StageSettings(redis_url=sys.argv[1]), model="m")

def main():
    stage.join()
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    sys.stdout.write("not flushed ")
    raise_ = {raise_}
    if raise_ is not None:
        raise raise_

run_stage(main)
"""


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        ("None", 0, ""),
        ("Recoverable('stopped')", 0, ""),
        ("redis.AuthenticationError('WRONGPASS')", 1, "penstock: "),
        ("StartupError('no')", 2, "penstock: no\n"),
        ("SystemExit(3)", 3, ""),
        ("KeyError('x')", 1, "KeyError: 'x'"),
    ],
)
def test_a_stage_ends_with_all_that_it_has_to_say_and_without_the_noise_of_modules(
    error: str, code: int, words: str, redis_url: str
) -> None:
    command = [sys.executable, "-c", STAGE.replace("{raise_}", error), redis_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and done.stdout == "not flushed thread\nexit function\n", done
    assert words in done.stderr and "reported" not in done.stderr


TEMPLATE = b'{"template": "{{ x }}", "limit_s": 20.0}'
HELPERS = [
    ("services.tokenizer.template_worker", QUESTION.pack(20.0, len(TEMPLATE)) + TEMPLATE),
    ("services.requests.workers.grammars.worker", QUESTION.pack(1.0, 0)),
]


@pytest.mark.parametrize(("helper", "question"), HELPERS)
def test_a_helper_whose_stage_has_gone_says_nothing(helper: str, question: bytes) -> None:
    """As when a stage ends while it starts: its helper's first answer has no reader."""
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error"}  # as a tokenizer has it
    process = subprocess.Popen(
        [sys.executable, "-m", helper],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(question, timeout=120)
    assert said == b""
