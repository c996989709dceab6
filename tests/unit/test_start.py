"""Before anything is started: how to ask a model, and that it can't be served; and stages that
can't run, before and after they could.
"""

import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from services.jobs.worker import be_brief
from services.operator.launcher import STARTUP_ERROR, Child, Launcher, example
from services.operator.lifeline import Lifeline
from shared.model.files import DEMO_MODEL, open_model
from shared.process.errors import StartupError
from shared.process.settings import UpSettings
from shared.wire.replica import Replica
from tests.deployment import free_port


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint without a chat template, and with nothing wrong."""
    shutil.copytree(DEMO_MODEL, tmp_path / "small")
    (tmp_path / "small" / "chat_template.jinja").unlink()
    return tmp_path / "small"


def compute(**others: Any) -> Replica:
    return Replica("compute", "compute-1", "host", 1, 0.0, **others)


def test_the_example_is_a_chat_where_the_model_has_a_template(folder: Path) -> None:
    assert example(open_model("demo"), compute())[0] == "/v1/chat/completions"
    path, body = example(open_model(str(folder)), compute())
    assert path == "/v1/completions" and json.loads(body)["model"] == "small"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ messages[0].content }}"}))
    assert example(open_model(str(folder)), compute())[0] == "/v1/chat/completions"
    for others, expected in (({"is_encoder": True}, "/v1/embeddings"), ({"labels": ("a", "b")}, "/v1/classify")):
        path, body = example(open_model(str(folder)), compute(**others))
        assert path == expected and json.loads(body)["model"] == "small" and json.loads(body)["input"]


def test_what_can_not_be_served_is_refused_before_anything_starts(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"num_attention_heads": 0}, "config.json: num_attention_heads is 0, not a positive number"),
        ({"vocab_size": None}, "config.json: vocab_size is None, not a positive number"),
        (
            {"text_config": {"vocab_size": None}, "vocab_size": None},
            "config.json: vocab_size is None, not a positive number",
        ),
        ({"vocab_size": "many"}, "config.json: vocab_size is 'many', not a positive number"),
        ({"num_hidden_layers": True}, "config.json: num_hidden_layers is True, not a positive number"),
        ({"dtype": "float99"}, "config.json: dtype is 'float99', which is no dtype that is known"),
        ({"torch_dtype": 16}, "config.json: torch_dtype is 16, which is no dtype that is known"),
        ({"eos_token_id": 1 << 20}, "config.json: eos_token_id is 1048576, which names no token of the vocabulary"),
        (
            {"eos_token_id": [1, "two"]},
            "config.json: eos_token_id is [1, 'two'], which names no token of the vocabulary",
        ),
        ({"quantization_config": [1]}, "config.json: quantization_config is not an object"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(StartupError, match=re.escape(message)):
            open_model(str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": None, "quantization_config": None}))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    open_model(str(folder))  # stages that read no weights need none
    with pytest.raises(StartupError, match=r"holds no \*\.safetensors; pytorch_model.bin is a pickle"):
        open_model(str(folder), weights=True)
    (folder / "config.json").unlink()
    with pytest.raises(StartupError, match="holds no config.json"):
        open_model(str(folder), weights=True)


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_stage_that_can_not_run_as_configured_ends_all_before_the_pipeline_was_ready_only(
    tmp_path: Path, is_announced: bool
) -> None:
    """Later it is a Redis, or a file of keys, that is away for a while: what serves goes on, and
    the stage is tried again.
    """
    launcher = Launcher(UpSettings(data_dir=tmp_path), is_announced=is_announced)
    launcher.lifeline = Lifeline(tmp_path)
    child = Child("stage", lambda: subprocess.Popen([sys.executable, "-c", f"raise SystemExit({STARTUP_ERROR})"]))
    launcher.stages.append(child)
    launcher._keep_alive()
    first = child.process
    assert first is not None and first.wait(60) == STARTUP_ERROR
    launcher._keep_alive()
    assert (launcher.is_stopping, launcher.exit_code) == ((False, 0) if is_announced else (True, STARTUP_ERROR))
    assert (child.process is None) == is_announced, "it waits for its next try"
    for file in (launcher.lifeline._own, launcher.lifeline._shared):
        file.close()


def test_there_are_as_many_replicas_of_a_stage_as_are_asked_for(tmp_path: Path) -> None:
    launcher = Launcher(
        UpSettings(data_dir=tmp_path, model=["demo"], port=free_port(), samplers=2, tokenizers=3, jobs=2)
    )
    launcher._prepare()
    assert [child.name for child in launcher.stages] == [
        "sampler",
        "sampler-2",
        "tokenizer",
        "tokenizer-2",
        "tokenizer-3",
        "compute",
        "gateway",
    ]
    assert [child.name for child in launcher.jobs] == ["jobs", "jobs-2"]
    for file in (launcher.lifeline._own, launcher.lifeline._shared):
        file.close()


def test_a_worker_that_redis_refuses_says_so_in_a_line() -> None:
    for error, has_trace in (
        (redis.ResponseError("MISCONF Errors writing to the AOF file"), False),
        (ValueError("a mistake of ours"), True),
    ):
        record = logging.LogRecord(
            "celery.worker", logging.CRITICAL, "", 0, "Unrecoverable error: %r", (error,), (type(error), error, None)
        )
        assert be_brief(record) and bool(record.exc_info) == has_trace
        assert record.getMessage().startswith(
            "Unrecoverable" if has_trace else "redis can't serve, ending the process: MISCONF"
        )
