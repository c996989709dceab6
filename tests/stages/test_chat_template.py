"""A chat template is a program that came with the model: whatever it does, it is one request's error, and soon."""

import threading
import time
from dataclasses import dataclass, field

import psutil
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from services.tokenizer import chat_template
from services.tokenizer.chat_template import SLOW, ChatTemplate
from shared.process.errors import Invalid, StartupError
from shared.wire.messages import ChatMessage, ChatOptions

LOOP = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% "
    "endfor %}"
)
SOON_S = 200.0  # a few seconds of the processor, on a machine that is busy; the loop takes days
# What the user says chooses what the template does.
TEMPLATE = (
    "{% set word = messages[0].content %}{% set n = word|length %}"  # n: what Jinja can't compute while it compiles
    "{% if word == 'loop' %}"
    + LOOP
    + "{% elif word == 'power' %}{{ n ** (n ** 99) }}{% elif word == 'memory' %}{{ 'x' * (n * 900000000) }}"
    "{% elif word == 'long' %}{{ 'x' * (n * 10000000) }}{% elif word == 'raise' %}{{ raise_exception('roles must "
    "alternate') }}"
    "{% elif word == 'escape' %}{{ messages.__class__.__mro__[1].__subclasses__() }}{% else %}{{ bos_token }}{{ word "
    "}}{% endif %}"
)


@dataclass
class Texts:
    chat_template: str | None = TEMPLATE
    special_tokens_map: dict[str, str] = field(default_factory=lambda: {"bos_token": "<s>"})

    def get_chat_template(self) -> str | None:
        return self.chat_template


def say(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", text),)


def test_what_a_template_does_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a worker that has seen the others; those that take long and can't be interrupted get a new one."""
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 0.5)
    template = ChatTemplate(Texts())
    assert template.render([say("warm")]) == ["<s>warm"]
    for word, reason in (
        ("loop", "takes more than 0.5 s"),
        ("raise", "roles must alternate"),
        ("escape", "unsafe"),
        ("long", "40000000 characters"),
        ("memory", "too much memory"),
        ("power", "takes more than 0.5 s"),
    ):
        began = time.monotonic()
        before, failed, after = template.render([say("before"), say(word), say("after \ud83d")])
        assert (before, after) == ("<s>before", "<s>after \ud83d"), word
        assert isinstance(failed, Invalid) and reason in str(failed) and failed.code == "chat_template_error"
        assert time.monotonic() - began < SOON_S


def test_what_the_machine_does_meanwhile_is_not_the_template_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 0.3)
    before = set(psutil.Process().children())
    template = ChatTemplate(Texts())
    template.render([say("warm")])
    [worker] = set(psutil.Process().children()) - before
    worker.suspend()
    resume = threading.Timer(0.6, worker.resume)
    resume.start()
    assert template.render([say("held up")]) == ["<s>held up"]
    resume.join()


def test_a_worker_that_stands_still_is_not_the_template_s_fault_either(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children())
    template = ChatTemplate(Texts())
    template.render([say("warm")])
    [worker] = set(psutil.Process().children()) - before
    worker.suspend()
    monkeypatch.setattr(chat_template, "ANSWER_TIMEOUT_S", 0.1)
    [away] = template.render([say("nobody answers")])
    assert isinstance(away, Invalid) and (away.code, away.status) == ("chat_template_unavailable", 503)
    monkeypatch.undo()
    assert template.render([say("another does")]) == ["<s>another does"]


def test_a_batch_of_loops_ends_soon_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 0.1)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    template = ChatTemplate(Texts())
    template.render([say("warm")])
    began = time.monotonic()
    found = template.render([say("loop")] * 12)
    assert all(isinstance(each, Invalid) for each in found) and time.monotonic() - began < SOON_S
    assert template.render([say("again")]) == ["<s>again"]
    del template
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_conversation_that_takes_long_is_slow_where_others_wait_and_costs_no_worker() -> None:
    before = set(psutil.Process().children())
    template = ChatTemplate(Texts(), is_quick=True)
    assert template.render([say("warm")]) == ["<s>warm"]
    workers = set(psutil.Process().children()) - before
    assert template.render([say("loop"), say("next"), say("loop")]) == [SLOW, "<s>next", SLOW]
    assert set(psutil.Process().children()) - before == workers
    assert template.render([say("power"), say("next")]) == [SLOW, "<s>next"], "what Python can't interrupt is killed"


def test_a_request_s_own_template_is_named_when_it_takes_too_long() -> None:
    [found] = ChatTemplate(Texts()).render([say("Hi")], [ChatOptions(chat_template=LOOP)])
    assert isinstance(found, Invalid) and (found.status, found.param) == (400, "chat_template")
    assert "the request's chat_template refuses these messages: it takes more than 2 s" in str(found)


@pytest.mark.parametrize("text", ["{{ nothing.at.all }}", "{% include 'x' %}"])
def test_a_template_that_fails_is_an_error_of_the_request(text: str) -> None:
    [found] = ChatTemplate(Texts(text)).render([say("Hi")])
    assert isinstance(found, Invalid) and found.status == 400


def test_templates_by_name_without_a_default_are_one_line() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0})),
        chat_template={"tool_use": "{{ messages }}", "rag": "{{ messages }}"},
    )
    with pytest.raises(StartupError, match="can't be chosen: This model has multiple chat templates with no default"):
        ChatTemplate(tokenizer)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fine so far\n{% for x in", "line 2: unexpected 'end of template'"),
        ("{{ messages | no_such_filter }}", "No filter named 'no_such_filter'"),
    ],
)
def test_a_broken_template_is_said_once_at_the_start_and_blames_no_message(
    text: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    template = ChatTemplate(Texts(text))
    template.start()
    assert [record.levelname for record in caplog.records] == ["ERROR"] and problem in caplog.text
    for found in template.render([say("Hi"), say("again")]):
        assert isinstance(found, Invalid) and (found.status, found.param, found.code) == (
            501,
            None,
            "chat_template_broken",
        )
        assert problem in str(found) and "use /v1/completions" in str(found)
    assert len(caplog.records) == 1


def test_where_the_worker_does_not_start_the_words_of_a_template_count_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chat_template, "WORKER", "services.tokenizer.of_no_name")
    text = "{{ tools }} <tool_call> {{ messages[0].tool_calls | tojson }}"
    assert ChatTemplate(Texts(text)).parsers("auto", "auto") == {"tool_calls": "hermes"}
    *starts, last = (record.getMessage() for record in caplog.records)
    assert len(starts) == chat_template.NUM_TRIES and all("did not start" in each for each in starts)
    assert "could not be tried" in last and last.endswith("tool_calls=hermes")


def test_a_model_without_a_template_says_so() -> None:
    [found] = ChatTemplate(Texts(None)).render([say("Hi")])
    assert isinstance(found, Invalid) and found.code == "no_chat_template"


def test_the_worker_knows_nothing_of_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://:secret@127.0.0.1")
    before = set(psutil.Process().children())
    template = ChatTemplate(Texts())
    template.render([say("warm")])
    [worker] = set(psutil.Process().children()) - before
    for process in (worker, *worker.children()):
        assert not any("secret" in value for value in process.environ().values())
    assert len(worker.children()) == 1, "the child is kept"
