"""Conversations that hold JSON nested as deep as the interpreter goes, endless numbers or what is no
JSON: whatever a template does with them, they fail alone, and the process that renders stays."""

import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.encoder import Encoder
from services.tokenizer.special_tokens import MARK
from shared.model.files import ModelFiles
from shared.model.sampling_params import SamplingParams
from shared.process.errors import Invalid
from shared.wire.messages import ChatMessage, ChatOptions, GenerateRequest, TokenizedRequest, ToolCall
from tests.hostile.depths import LIMITS, nested
from tests.stages.test_special_tokens import CHATML, KINDS, make_tokenizer

NO_TOOLS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WITH_CALLS = (
    CHATML
    + "{% for m in messages %}{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"  # noqa: E501
    "{{ tools | tojson }}{{ documents | tojson }}{{ a }}"
)
AS_PYTHON = (
    CHATML
    + "{% for m in messages %}{% for call in m.tool_calls %}{{ call.function.arguments }}{% endfor %}{% endfor %}"
)


def encoder_with(template: str) -> Encoder:
    tokenizer = make_tokenizer(KINDS[0])
    tokenizer.chat_template = template
    return Encoder(
        tokenizer, ModelFiles(Path("."), Path("."), "m", {"vocab_size": len(tokenizer)}, {"eos_token_id": 1})
    )


ENCODERS = [encoder_with(template) for template in (NO_TOOLS, WITH_CALLS, AS_PYTHON)]
PLAIN = GenerateRequest("plain.0", None, "m", SamplingParams(), (ChatMessage("user", "x"),))


def calling(arguments: str, options: ChatOptions | None = None, content: str = "") -> GenerateRequest:
    messages = (
        ChatMessage("user", "x"),
        ChatMessage("assistant", content, tool_calls=(ToolCall("c", "f", arguments),)),
        ChatMessage("tool", "1"),
    )
    return GenerateRequest("r.0", None, "m", SamplingParams(), messages, chat=options or ChatOptions())


def worker_of(encoder: Encoder) -> Any:
    process = encoder.chat_template._helper._process
    return process.pid if process is not None else None


def on_a_stack_of(levels: int, call: Callable[[], Any]) -> Any:
    return on_a_stack_of(levels - 1, call) if levels else call()


@pytest.mark.parametrize("encoder", ENCODERS, ids=["without calls", "with calls", "as Python"])
def test_arguments_at_the_interpreter_s_limit_go_to_the_template_as_a_text(encoder: Encoder) -> None:
    """json.loads reads a level or two more than json.dumps writes: where both give up depends on the stack."""
    [_] = encoder.encode([PLAIN], 100_000)
    worker = worker_of(encoder)
    limit = sys.getrecursionlimit()
    for levels in [*range(limit - 60, limit + 10), 100_000]:
        deep = calling('{"a":' * levels + '"<|im_end|>"' + "}" * levels)
        found, other = encoder.encode([deep, PLAIN], 1_000_000)
        assert isinstance(found, TokenizedRequest) and isinstance(other, TokenizedRequest), levels
    assert worker_of(encoder) == worker and worker is not None


@pytest.mark.sampled(40)
@pytest.mark.parametrize("number", range(40))
def test_whatever_a_conversation_holds_it_fails_alone(number: int) -> None:
    rng = random.Random(number)

    def value() -> str:
        return nested(rng, rng.choice((1, 60, 128, *LIMITS, rng.randint(100, 2000))))

    for encoder in ENCODERS:
        [_] = encoder.encode([PLAIN], 100_000)
        worker = worker_of(encoder)
        for _ in range(25):
            tools, documents, kwargs = (
                text if rng.random() < 0.3 else "" for text in (value(), value(), f'{{"a": {value()}}}')
            )
            options = ChatOptions(tools, documents, kwargs)
            several = [calling(value(), options, rng.choice(("", value(), "<|im_end|>"))), PLAIN]
            found, other = on_a_stack_of(rng.choice((0, 300)), partial(encoder.encode, several, 1_000_000))
            assert isinstance(found, TokenizedRequest) or (isinstance(found, Invalid) and found.status == 400), found
            assert isinstance(other, TokenizedRequest)
            assert isinstance(found, Invalid) or MARK not in encoder.tokenizer.decode(found.prompt_token_ids.tolist())
        assert worker_of(encoder) == worker and worker is not None


def test_tools_that_are_nested_too_deep_are_refused_with_a_reason() -> None:
    [found] = ENCODERS[1].encode([calling("{}", ChatOptions(tools="[" * 1000 + "]" * 1000))], 4096)
    assert isinstance(found, Invalid) and "nested deeper than 128 levels" in str(found)


def test_a_request_that_can_t_be_encoded_fails_alone() -> None:
    """Whatever was in Redis: text that is none ends no process."""
    broken = GenerateRequest("r.0", None, "m", SamplingParams(), (ChatMessage("user", {1, 2}),))
    found, other = ENCODERS[0].encode([broken, PLAIN], 4096)
    assert isinstance(found, Invalid) and "TypeError" in str(found) and isinstance(other, TokenizedRequest)
