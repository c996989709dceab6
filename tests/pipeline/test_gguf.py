"""A GGUF file behind HTTP: text, chat by the template in its metadata or beside it, and a template that never ends."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.model.files import DEMO_MODEL, open_model
from shared.process.errors import StartupError
from tests.conftest import running_redis
from tests.deployment import Deployment
from tests.kernels.families import CONFIGS
from tests.kernels.gguf_files import Kind, Writer

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("gguf")
    torch.manual_seed(0)
    path = Writer(AutoModelForCausalLM.from_config(CONFIGS["llama3"]), folder / "small.gguf").write(
        Kind.F16, chat_template=TEMPLATE
    )
    with running_redis(folder / "redis", redis_binary) as url:
        deployment = Deployment(url, folder, environment={"XDG_CACHE_HOME": str(folder / "cache")})
        try:
            yield deployment.start_all(model=str(path))
        finally:
            deployment.stop()


def test_it_is_called_as_its_file_and_answers_text_and_chat(served: Deployment) -> None:
    assert [card["id"] for card in served.get("/v1/models").json()["data"]] == ["small"]
    body = {"model": "small", "prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = served.post("/v1/completions", body).json()
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 3, "completion_tokens": 5}, "he, ll, o"
    chat = served.post(
        "/v1/chat/completions", {"model": "small", "messages": [{"role": "user", "content": "hell"}], "max_tokens": 3}
    )
    assert chat.status_code == 200 and chat.json()["usage"]["prompt_tokens"] == 2


def test_a_template_that_never_ends_is_one_error_and_the_next_request_is_answered(served: Deployment) -> None:
    def chat(text: str) -> tuple[int, str]:
        answer = served.post(
            "/v1/chat/completions", {"model": "small", "messages": [{"role": "user", "content": text}], "max_tokens": 3}
        )
        return answer.status_code, str(answer.json().get("error"))

    status, error = chat("loop")
    assert status == 400 and "chat template" in error and "takes more than 2 s" in error
    assert chat("hello")[0] == 200


def test_a_template_beside_a_file_goes_before_its_own_and_is_seen_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = Writer(AutoModelForCausalLM.from_config(CONFIGS["llama3"]), tmp_path / "small.gguf").write(
        Kind.F16, chat_template=TEMPLATE
    )

    def rendered() -> str:
        text = AutoTokenizer.from_pretrained(open_model(str(path)).folder).apply_chat_template(
            [{"role": "user", "content": "hello"}], tokenize=False
        )
        assert isinstance(text, str)
        return text

    assert rendered() == "hello"
    for template in ("Say {{ messages[0].content }}", "Say again {{ messages[0].content }}"):
        (tmp_path / "chat_template.jinja").write_text(template)
        assert rendered() == template.replace("{{ messages[0].content }}", "hello")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match=r"chat_template\.jinja can't be read: .*utf-8"):
        open_model(str(path))


def test_a_model_with_a_broken_template_completes_texts(deployment: Deployment, tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "own")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}")
    deployment.start_all(model=folder)
    assert deployment.logs().count("the model's chat template can't be used") == 1
    chat = deployment.post("/v1/chat/completions", {"model": "own", "messages": [{"role": "user", "content": "Hi"}]})
    assert (chat.status_code, chat.json()["error"]["code"], chat.headers["X-Should-Retry"]) == (
        501,
        "chat_template_broken",
        "false",
    )
    assert deployment.post("/v1/completions", {"model": "own", "prompt": "Hi", "max_tokens": 2}).status_code == 200
