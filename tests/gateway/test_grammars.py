"""The check of clients' grammars: bounded in time, memory and number, in a process that can die; a verdict is asked for once."""

import asyncio
import os
import pickle
from typing import Any

import pytest

from services.gateway import grammar_worker, grammars
from services.gateway.grammars import GrammarChecker
from shared.constraint import Constraint
from shared.errors import Invalid, Rejected

GOOD, BAD = Constraint("regex", "a+", "guided_regex"), Constraint("regex", "[", "guided_regex")


async def verdict(checker: GrammarChecker, constraint: Constraint) -> str:
    """Its code; empty: it may run."""
    try:
        await checker.check(constraint)
    except Invalid as error:
        assert error.param == constraint.param and error.status == 400
        return str(error.code)
    return ""


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        checker = GrammarChecker()
        assert await verdict(checker, BAD) == "invalid_grammar"
        first = checker.helper._process
        with monkeypatch.context() as patch:
            patch.setattr(grammars, "CHECK_TIMEOUT_S", 0.0)
            with pytest.raises(Invalid, match="more than 0 s"):
                await checker.check(GOOD)
        assert first is not None and await first.wait() != 0
        assert await verdict(checker, GOOD) == ""  # what was not found out is asked again
        await checker.helper.stop()

    asyncio.run(run())


def test_a_verdict_is_asked_for_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(grammars, "MAX_KNOWN", 2)
        checker = GrammarChecker()
        asked: list[str] = []
        ask = checker.helper.ask

        async def counted(*question: bytes, timeout_s: float) -> object:
            asked.extend(pickle.loads(each).text for each in question)
            return await ask(*question, timeout_s=timeout_s)

        monkeypatch.setattr(checker.helper, "ask", counted)
        other = Constraint("regex", "b+", "guided_regex")
        found = [await verdict(checker, each) for each in (GOOD, BAD, GOOD, other, GOOD, BAD)]
        assert found == ["", "invalid_grammar", "", "", "", "invalid_grammar"]
        assert asked == ["a+", "[", "b+", "["]
        await checker.helper.stop()

    asyncio.run(run())


def test_those_who_wait_are_bounded_and_each_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(grammars, "MAX_WAITING", 3)
        checker = GrammarChecker()
        asked = [checker.check(Constraint("regex", "x" * number)) for number in range(1, 6)]
        outcomes: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
        assert [each.constraint.text for each in outcomes[:3]] == ["x", "xx", "xxx"] and all(
            isinstance(each, Rejected) and each.status == 503 for each in outcomes[3:]
        )
        await checker.check(Constraint("regex", "xxxx"))
        await checker.helper.stop()

    asyncio.run(run())


def test_a_check_that_ends_its_process_is_its_own_request_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        checker = GrammarChecker()
        await checker.check(GOOD)
        with pytest.raises(Invalid, match="memory is bounded"):
            await checker.check(Deadly("regex", "c+"))
        assert await verdict(checker, BAD) == "invalid_grammar"
        await checker.helper.stop()

    asyncio.run(run())


class Deadly(Constraint):
    """Ends the process that reads it, as running out of memory does."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (7,)


def test_the_worker_passes_what_compiles_and_refuses_what_does_not() -> None:
    grammar_worker.answer(pickle.dumps(GOOD))
    with pytest.raises(Invalid):
        grammar_worker.answer(pickle.dumps(BAD))
