"""What is known of a model before anything is started: how to ask it, and that it can't be served."""

import json
import shutil
from pathlib import Path

import pytest

from services.launcher import example
from shared.model_files import DEMO_MODEL, open_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint without a chat template, and with nothing wrong."""
    shutil.copytree(DEMO_MODEL, tmp_path / "small")
    (tmp_path / "small" / "chat_template.jinja").unlink()
    return tmp_path / "small"


def test_the_example_is_a_chat_where_the_model_has_a_template(folder: Path) -> None:
    assert example(open_model("demo"))[0] == "/v1/chat/completions"
    path, body = example(open_model(str(folder)))
    assert path == "/v1/completions" and json.loads(body)["model"] == "small"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ messages[0].content }}"}))
    assert example(open_model(str(folder)))[0] == "/v1/chat/completions"
