"""Helper processes: what they may, what they see, and whose turn it is."""

import asyncio
import os
import pickle
import pwd
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest
from pydantic import BaseModel

from services.gateway import bodies
from services.gateway.http.bodies import models, names_of
from services.requests.bodies.content import Content, GivenImage
from services.requests.bodies.parse import parse
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody
from services.requests.store.modules.schemas import PromptModulesBody
from services.requests.workers.grammars import answers
from services.requests.workers.grammars.answers import AnswerChecker
from services.requests.workers.pool import SIZE, HelperFailed, HelperPool
from shared.process.errors import Invalid, Rejected
from shared.process.helper import HelperProcess, HelperStuck
from shared.process.plain import Unreadable, pack, unpack
from shared.process.worker import QUESTION, REPLY, Outcome

MODULE = "tests.unit.helper_of_tests"
SLOW = '{"type": "string", "pattern": "^(a+)+$"}'


def with_pool(use: Callable[[HelperPool], Awaitable[None]], within_s: float = 60.0) -> None:
    async def run() -> None:
        pool = HelperPool(MODULE, "testing", 64, within_s)
        try:
            await use(pool)
        finally:
            await pool.stop()

    asyncio.run(run())


def test_a_helper_knows_nothing_of_its_owner_and_may_do_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://:secret@127.0.0.1")

    async def use(pool: HelperPool) -> None:
        async def ask(question: str) -> Any:
            return await pool.ask("", question.encode(), limit_s=30)

        seen = await ask("environment")
        assert all(name.startswith(("PYTHON", "LD_", "DYLD_", "LC_", "OMP", "OPENBLAS")) for name in seen), seen.keys()
        assert await ask("core") == (0, 0)
        assert await ask("files 8") < 64
        assert await ask("pipes") == 1, "its own to its parent, and no other"
        for question in (f"memory {128 << 20}", "files 100", "deadly"):
            with pytest.raises(HelperFailed):
                await ask(question)
        assert await ask("look") == ["look"], "of what was asked before, it has seen nothing"

    with_pool(use)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_helper_of_a_user_starts_no_process() -> None:
    user = pwd.getpwnam("nobody").pw_uid
    question = b"child"
    asked = QUESTION.pack(30.0, len(question)) + question
    with subprocess.Popen(
        [sys.executable, "-m", MODULE, str(user)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(asked)
        process.stdin.flush()
        assert REPLY.unpack(process.stdout.read(REPLY.size))[0] == Outcome.DIED
        process.stdin.close()
        assert b"BlockingIOError" in process.stderr.read()


def test_an_answer_is_read_without_running_code() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("exit 1",)

    for data in (pickle.dumps(Evil()), pack(Content(("a",))), b"", b"\xc1", pack([1]) + b"x"):
        with pytest.raises(Unreadable):
            unpack(data)
    with pytest.raises(Unreadable):
        unpack(pack(GivenImage("x")).replace(b"is_low", b"is_lax"), (Content,))

    async def use(pool: HelperPool) -> None:
        found: Any = await pool.ask("", b"arrays", limit_s=30)
        assert (
            found["b"] == (1, ("x", [None]))
            and (found["a"] == np.arange(6).reshape(2, 3)).all()
            and found["a"].dtype == np.int32
        )
        refusal = await pool.ask("", b"invalid", limit_s=30)
        assert isinstance(refusal, Invalid) and (str(refusal), refusal.param, refusal.code, refusal.status) == (
            "no",
            "p",
            "c",
            404,
        )
        assert await pool.ask("", b"forged", limit_s=30) == b"", (
            "neither the pool's questions nor its answers are a child's"
        )
        assert await pool.ask("", b"look", limit_s=30) == ["look"]

    with_pool(use)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (
            ChatCompletionBody,
            b'{"model":"m","beside":1,"messages":[{"role":"user","content":[{"type":"text","text":"a"},'
            b'{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}],"more":2}],'
            b'"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}},{"type":"web_search"}],"logit_bias":{"5":1}}',
        ),
        (CompletionBody, b'{"model":"m","prompt":[[1,2],[3]],"structured_outputs":{"regex":"a"}}'),
        (PromptModulesBody, b'{"modules":[{"name":"a","text":"x"},{"union":[{"name":"b","text":"y"}]}]}'),
    ],
    ids=["chat", "completion", "modules"],
)
def test_a_body_comes_back_as_it_was_parsed(kind: Any, content: bytes) -> None:
    body = parse(kind, content)
    classes: tuple[type, ...] = (*models(BaseModel), Content, GivenImage)
    found = unpack(pack(bodies.answer(names_of(kind) + content)), classes)
    assert (
        type(found) is kind
        and found.model_fields_set == body.model_fields_set
        and found.passed_over == body.passed_over
    )
    assert repr(found) == repr(body) and repr(found.__pydantic_private__) == repr(body.__pydantic_private__)
    if kind is ChatCompletionBody:
        assert found.messages[0].content.parts == body.messages[0].content.parts
        assert found.calling().forced() == body.calling().forced()


def test_what_takes_long_is_answered_where_the_helper_may_not_raise_its_priority() -> None:
    """As it is for all users but root, in a process that was begun at a niceness."""
    code = f"""
import asyncio
from services.requests.workers.pool import HelperPool

async def ask() -> None:
    pool = HelperPool({MODULE!r}, "testing", 64, 60.0)
    await pool.ask("", b"sleep 0.3", limit_s=30)
    await pool.stop()

asyncio.run(ask())
"""
    dropped = ["setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice"] if os.geteuid() == 0 else []
    done = subprocess.run(["nice", "-n", "5", *dropped, sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_value_that_is_nested_too_deep_is_unreadable_and_ends_no_process() -> None:
    packed = b""
    for _ in range(500):
        packed = msgpack.packb(msgpack.ExtType(1, packed))
    with pytest.raises(Unreadable, match="deeper than 16 levels"):
        unpack(packed)
    with pytest.raises(ValueError, match="64 bits"):
        pack([1 << 70])


async def all_are_at_work(pool: HelperPool) -> None:
    async with asyncio.timeout(60):
        while len([each for each in pool._running.values() if each.began_at]) < SIZE:
            await asyncio.sleep(0.01)


def test_one_tenant_has_all_helpers_until_others_come(tmp_path: Path) -> None:
    async def use(pool: HelperPool) -> None:
        both = [asyncio.create_task(pool.ask("", f"wait {tmp_path / 'go'}".encode(), limit_s=90)) for _ in range(SIZE)]
        await all_are_at_work(pool)
        (tmp_path / "go").touch()
        await asyncio.gather(*both)

    with_pool(use)


def quick_are_all_but(monkeypatch: pytest.MonkeyPatch, tenants: Collection[str]) -> None:
    """Questions of other tenants never count as slow: on a busy machine a quick one takes long, too."""
    left_s = HelperPool._left_s
    monkeypatch.setattr(
        HelperPool, "_left_s", lambda pool, asked: left_s(pool, asked) if asked.tenant_id in tenants else 3600.0
    )


def test_what_is_slow_gives_its_helper_back_and_still_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_are_all_but(monkeypatch, "abcd")

    async def use(pool: HelperPool) -> None:
        slow = [
            asyncio.create_task(pool.ask(tenant, f"wait {tmp_path / 'go'}".encode(), limit_s=90)) for tenant in "abcd"
        ]
        await all_are_at_work(pool)
        for _ in range(5):
            await pool.ask("e", b"look", limit_s=30)
        (tmp_path / "go").touch()
        await asyncio.gather(*slow)

    with_pool(use)


def test_the_time_counts_from_the_asking_on() -> None:
    async def use(pool: HelperPool) -> None:
        pool.begin_to_start()
        await asyncio.gather(*pool._starting)
        began = time.monotonic()
        found = await asyncio.gather(
            *(pool.ask(f"{number}", b"sleep 60", limit_s=1.0) for number in range(20)), return_exceptions=True
        )
        assert {type(each) for each in found} == {TimeoutError, Rejected}
        assert time.monotonic() - began < 20, "not one after the other"
        pool.within_s = 60.0
        assert await pool.ask("", b"look", limit_s=30) == ["look"]

    with_pool(use, within_s=1.0)


def test_a_tenant_s_slow_checks_hold_no_other_s_answer_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "CHECK_TIMEOUT_S", 3600.0)  # the order is what counts
    quick_are_all_but(monkeypatch, "a")

    async def run() -> None:
        checker = AnswerChecker()
        checker.helpers = replace(checker.helpers, module="tests.unit.answers_in_front")
        slow = [asyncio.create_task(checker.check("a", [("", SLOW)], f'"{"a" * 60}!"', [])) for _ in range(31)]
        await asyncio.sleep(0)
        for _ in range(3):
            [problem] = await checker.check("b", [("", '{"uniqueItems": true}')], "[1, 1]", [])
            assert problem["message"] == "uniqueItems does not hold" and not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert (await checker.check("b", [("", "{}")], "[" * 100_000, []))[0][
            "message"
        ] == "not checked: it is nested deeper than 128 levels"
        await checker.helpers.stop()

    asyncio.run(asyncio.wait_for(run(), 300))


def test_a_kept_child_answers_until_one_of_its_questions_ends_it() -> None:
    helper = HelperProcess(MODULE, "kept")

    def ask(question: str, limit_s: float = 30.0) -> Any:
        return helper.ask(question.encode(), limit_s, 120.0)

    assert ask("look") == ["look"] and ask("look") == ["look", "look"]
    with pytest.raises(EOFError):
        ask("deadly")
    assert ask("look") == ["look"]
    with pytest.raises(TimeoutError):
        ask("sleep 60", 0.1)
    with pytest.raises(TimeoutError):
        ask("profiled")
    assert ask(f"pipes {'x' * (1 << 20)}") == 2, "its own to its parent, and no other"
    helper.stop()


def test_a_helper_that_stands_still_is_killed_whether_it_reads_or_not() -> None:
    helper = HelperProcess(MODULE, "kept")
    assert helper.ask(b"look", 30.0, 120.0) == ["look"]
    for question in (b"look", b"look " + b"x" * (1 << 20)):
        [process] = [each for each in psutil.Process().children() if MODULE in each.cmdline()]
        process.suspend()
        with pytest.raises(HelperStuck):
            helper.ask(question, 30.0, 0.2)
        assert helper.ask(b"look", 30.0, 120.0) == ["look"]
    helper.stop()
