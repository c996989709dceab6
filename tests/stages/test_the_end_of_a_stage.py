"""However a stage ends, none of its threads is left that speaks with Redis: OpenSSL dies with
SIGSEGV where one does while the interpreter goes away.
"""

import gc
import os
import subprocess
import sys
import threading

import pytest
import redis

from shared.process.errors import Recoverable, StartupError
from shared.process.stage_settings import StageSettings
from shared.process.worker import QUESTION
from shared.wire import registry
from shared.wire.registry import Heartbeat
from shared.wire.stage import Stage, run_stage


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (Recoverable("stopped"), 0), (redis.AuthenticationError("WRONGPASS"), 1), (StartupError("no"), 2)],
)
def test_no_heartbeat_outlives_its_stage(
    error: Exception | None, code: int, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)  # of this process, which goes on
    monkeypatch.setattr(registry, "END_TIMEOUT_S", 60.0)
    stage = Stage("sampler", StageSettings(redis_url=redis_url), model="m")

    def main() -> None:
        stage.join()
        assert [thread for thread in threading.enumerate() if isinstance(thread, Heartbeat)]
        if error is not None:
            raise error

    with pytest.raises(SystemExit) as ended:
        run_stage(main)
    assert ended.value.code == code
    assert not [thread for thread in threading.enumerate() if isinstance(thread, Heartbeat)]
    stage.transport.close()
    stage._heartbeat.transport.close()


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
