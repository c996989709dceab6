"""The check of clients' grammars: bounded in time, memory and number, in processes that can die;
and a tenant's own wait.
"""

import asyncio

import pytest

from services.requests.context import RequestContext
from services.requests.prepare import constraint_for
from services.requests.store.admission.admission import Admission
from services.requests.store.client import connect
from services.requests.store.files.storage import Storage
from services.requests.store.files.store import FileStore
from services.requests.store.tenants.limits import Caller
from services.requests.store.tenants.tenant import Tenant
from services.requests.workers import pool
from services.requests.workers.grammars import checker as grammars
from services.requests.workers.grammars import worker as grammar_worker
from services.requests.workers.grammars.checker import GrammarChecker
from services.requests.workers.images.fetch import ImageFetcher
from services.requests.workers.images.reader import ImageReader
from shared.model.constraint import Constraint, Kind
from shared.process.errors import Invalid, Rejected
from shared.process.plain import pack, unpack
from shared.process.settings import GatewaySettings
from shared.wire.stage import Stage
from tests.unit.test_helpers import quick_are_all_but

GOOD, BAD = Constraint("regex", "a+", "guided_regex"), Constraint("regex", "[", "guided_regex")


async def verdict(checker: GrammarChecker, constraint: Constraint) -> str:
    """Its code; empty: it may run."""
    try:
        await checker.check(constraint, "")
    except Invalid as error:
        assert error.param == constraint.param and error.status == 400
        return str(error.code)
    return ""


WORKER = "tests.gateway.grammars_that_last"


def lasting(number: int) -> Constraint:
    return Constraint("regex", f"lasting{{{number}}}")


async def until_running(checker: GrammarChecker, tenant: str) -> None:
    async with asyncio.timeout(120):
        while not any(each.began_at and each.tenant_id == tenant for each in checker.helpers._running.values()):
            await asyncio.sleep(0.01)


def test_a_grammar_that_takes_too_long_may_come_again_and_the_next_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        checker = GrammarChecker(WORKER)
        assert await verdict(checker, BAD) == "invalid_grammar"
        monkeypatch.setattr(grammars, "CHECK_TIMEOUT_S", 0.3)
        with pytest.raises(Rejected, match=r"more than 0\.3 s") as refusal:
            await checker.check(lasting(1), "")
        assert (refusal.value.status, refusal.value.code) == (503, "grammar_timeout")
        monkeypatch.undo()
        assert await verdict(checker, GOOD) == ""
        await checker.helpers.stop()

    asyncio.run(run())


def test_a_verdict_is_asked_for_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(grammars, "MAX_KNOWN", 2)
        checker = GrammarChecker(WORKER)
        asked: list[str] = []
        ask = checker.helpers.ask

        async def counted(tenant_id: str, *question: bytes, limit_s: float) -> object:
            asked.extend(unpack(each, (Constraint,)).text for each in question)
            return await ask(tenant_id, *question, limit_s=limit_s)

        monkeypatch.setattr(checker.helpers, "ask", counted)
        other = Constraint("regex", "b+", "guided_regex")
        found = [await verdict(checker, each) for each in (GOOD, BAD, GOOD, other, GOOD, BAD)]
        assert found == ["", "invalid_grammar", "", "", "", "invalid_grammar"]
        assert asked == ["a+", "[", "b+", "["]
        assert checker.knows(GOOD) and not checker.knows(other)
        await checker.helpers.stop()

    asyncio.run(run())


def test_a_schema_waits_for_no_other_s_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant sends 99 that never end, as does another; a third one's is checked while they last."""
    monkeypatch.setattr(grammars, "CHECK_TIMEOUT_S", 600.0)
    monkeypatch.setattr(grammars, "WITHIN_S", 600.0)
    quick_are_all_but(monkeypatch, ("hostile", "second"))

    async def run() -> None:
        checker = GrammarChecker(WORKER)
        hostile = [asyncio.create_task(checker.check(lasting(number), "hostile")) for number in range(99)]
        await until_running(checker, "hostile")
        await checker.check(GOOD, "honest")
        refused = [task.exception() for task in hostile if task.done()]
        assert len(refused) == 99 - pool.SIZE - grammars.MAX_OF_TENANT
        assert all(isinstance(each, Rejected) and each.status == 429 for each in refused)
        hostile.append(asyncio.create_task(checker.check(lasting(100), "second")))
        for text in ("b+", "c+"):
            await checker.check(Constraint("regex", text), "honest")
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)
        await checker.check(Constraint("regex", "d+"), "hostile")
        await checker.helpers.stop()

    asyncio.run(run())


def test_without_keys_a_schema_waits_for_no_other_request_s_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "CHECK_TIMEOUT_S", 600.0)
    monkeypatch.setattr(grammars, "WITHIN_S", 600.0)

    async def run() -> None:
        checker = GrammarChecker(WORKER)
        lasts = [asyncio.create_task(checker.check(lasting(number), "")) for number in range(20)]
        while len(checker.helpers._running) < pool.SIZE:
            await asyncio.sleep(0.01)
        for text in ("a+", "b+", "c+"):
            await checker.check(Constraint("regex", text), "")
        assert not any(task.done() for task in lasts)
        for task in lasts:
            task.cancel()
        await asyncio.gather(*lasts, return_exceptions=True)
        await checker.helpers.stop()

    asyncio.run(run())


def test_requests_with_one_text_share_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "WITHIN_S", 600.0)

    async def run() -> None:
        checker = GrammarChecker(WORKER)
        both = [asyncio.create_task(checker.check(lasting(1), "")) for _ in range(2)]
        await until_running(checker, "")
        many = [asyncio.create_task(checker.check(GOOD, "")) for _ in range(200)]
        both[0].cancel()
        await asyncio.gather(both[0], return_exceptions=True)
        assert [task for task in both if not task.done()], "the other one still waits for it"
        both[1].cancel()
        assert {each.constraint for each in await asyncio.gather(*many)} == {GOOD}
        await asyncio.gather(both[1], return_exceptions=True)
        assert not checker._asking
        await checker.helpers.stop()

    asyncio.run(run())


def test_tenants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "WITHIN_S", 600.0)

    async def run() -> None:
        checker = GrammarChecker(WORKER)
        order: list[str] = []

        async def check(tenant: str, text: str) -> None:
            await checker.check(Constraint("regex", text), tenant)
            order.append(tenant)

        await asyncio.gather(check("many", "x"), check("few", "y"))  # both helpers have started
        order.clear()
        many = [asyncio.create_task(check("many", f"a{number}")) for number in range(8)]
        few = [asyncio.create_task(check("few", f"b{number}")) for number in range(2)]
        await asyncio.gather(*few)
        assert order.count("many") < 8
        await asyncio.gather(*many)
        await checker.helpers.stop()

    asyncio.run(run())


def test_who_waits_too_long_may_come_again_and_who_goes_away_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "CHECK_TIMEOUT_S", 600.0)
    monkeypatch.setattr(grammars, "WITHIN_S", 600.0)

    async def run() -> None:
        checker = GrammarChecker(WORKER)
        checker.helpers.quick_s = 600.0
        busy = [asyncio.create_task(checker.check(lasting(number), f"tenant {number}")) for number in range(pool.SIZE)]
        for number in range(pool.SIZE):
            await until_running(checker, f"tenant {number}")
        gone = asyncio.create_task(checker.check(GOOD, "gone"))
        await asyncio.sleep(0)
        gone.cancel()
        checker.helpers.within_s = 0.2
        with pytest.raises(Rejected) as refusal:
            await checker.check(GOOD, "late")
        assert refusal.value.status == 503 and refusal.value.retry_after_s == 1
        assert not checker.helpers._waiting
        busy[0].cancel()
        await asyncio.gather(busy[0], return_exceptions=True)
        checker.helpers.within_s = 600.0
        await checker.check(GOOD, "late")
        busy[1].cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        assert not checker.helpers._running and len(checker.helpers._free) == pool.SIZE
        await checker.helpers.stop()

    asyncio.run(run())


def test_a_check_that_ends_its_process_is_its_own_request_s_error() -> None:
    async def run() -> None:
        checker = GrammarChecker(WORKER)
        await checker.check(GOOD, "")
        with pytest.raises(Invalid, match="more memory than its check may have"):
            await checker.check(Constraint("regex", "deadly"), "")
        assert await verdict(checker, BAD) == "invalid_grammar"
        await checker.helpers.stop()

    asyncio.run(run())


def test_the_worker_passes_what_compiles_and_refuses_what_does_not() -> None:
    grammar_worker.answer(pack(GOOD))
    with pytest.raises(Invalid):
        grammar_worker.answer(pack(BAD))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("gbnf", "root ::= missing", "line 1, column 10: there is no rule missing"),
        ("gbnf", 'other ::= "a"', "there is no rule root"),
        ("gbnf", 'root ::= "a', "line 1, column 10: the text that begins here has no end"),
        ("structural_tag", "x", "not JSON"),
        ("structural_tag", '"x"', "an object"),
    ],
)
def test_whatever_is_wrong_in_a_grammar_is_its_own_error_and_ends_no_helper(kind: Kind, text: str, words: str) -> None:
    with pytest.raises(Invalid, match=words) as raised:
        grammar_worker.answer(pack(Constraint(kind, text, "guided_grammar")))
    assert raised.value.param == "guided_grammar"


def test_a_grammar_is_charged_before_it_is_tried_and_its_request_once(redis_url: str) -> None:
    tenant = Tenant("t", "t", requests_per_minute=2)
    settings = GatewaySettings(redis_url=redis_url)

    async def run() -> None:
        stage, client, checker = Stage("gateway", settings), connect(settings), GrammarChecker(WORKER)
        files = FileStore(client, Storage(settings.files_url))
        admission = Admission(stage, client, settings)

        async def ask(constraint: Constraint) -> Caller:
            caller = Caller(tenant)
            context = RequestContext(
                settings=settings,
                stage=stage,
                client=client,
                home=client,
                grammars=checker,
                images=ImageReader(files, ImageFetcher([]), 1 << 20),
                admission=admission,
                caller=caller,
            )
            await constraint_for(context, constraint)
            return caller

        caller = await ask(GOOD)
        assert caller.headers["x-ratelimit-remaining-requests"] == "1"
        charge = caller.charge(10, 5, 1)
        assert charge is not None and (charge.requests, charge.tokens) == (0, 10), (
            "its tokens are charged with what is handed over"
        )
        with pytest.raises(Invalid):
            await ask(BAD)
        with pytest.raises(Rejected) as refusal:
            await ask(lasting(1))
        assert refusal.value.status == 429 and not checker.helpers._running
        assert not (await ask(GOOD)).is_counted, "what is known costs no work"
        await checker.helpers.stop()
        await client.aclose()
        stage.transport.close()

    asyncio.run(run())
