"""Grammars that clients send, checked before their requests are admitted: in helper processes,
within bounds, and each text once."""

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from services.requests.bodies.ignored import tell
from services.requests.text.schemas.prepare import Prepared
from services.requests.workers.pool import HelperFailed, HelperPool
from shared.model.constraint import Constraint
from shared.process.errors import Invalid
from shared.process.plain import pack

CHECK_TIMEOUT_S = 5.0  # of one grammar; those that people write take milliseconds
MAX_OF_TENANT = 64  # texts of one tenant that wait
WITHIN_S = 15.0  # with the wait for its turn: one that is slow may have others before it
MAX_KNOWN = 4096  # verdicts
MAX_CHARACTERS = 16 << 20  # of the verdicts


@dataclass(slots=True)
class Asking:
    """A check under way."""

    task: "asyncio.Task[Prepared | Invalid]"
    num_waiting: int = 0  # requests


class GrammarChecker:
    """Owns the helpers."""

    def __init__(self, worker: str = "services.requests.workers.grammars.worker") -> None:
        """worker: the module of the helpers."""
        self.helpers = HelperPool(worker, "checking grammars", MAX_OF_TENANT, WITHIN_S, (Prepared, Constraint))
        self._asking: dict[tuple[str, bytes], Asking] = {}  # by tenant and digest
        self._verdicts: OrderedDict[bytes, Prepared | Invalid] = OrderedDict()  # by digest, the last used last
        self._size = 0  # characters of the verdicts

    def knows(self, constraint: Constraint) -> bool:
        """Whether its check costs nothing."""
        return digest_of(constraint) in self._verdicts

    async def check(self, constraint: Constraint, tenant_id: str) -> Prepared:
        """The constraint as it is enforced; the answer's header names the rest. Raises Invalid
        (400) for one that can't be held to, Rejected (429, 503) where others wait already."""
        digest = digest_of(constraint)
        if digest not in self._verdicts:
            verdict = await self._shared(constraint, tenant_id, digest)
        else:
            self._verdicts.move_to_end(digest)
            verdict = self._verdicts[digest]
        if isinstance(verdict, Invalid):
            raise Invalid(str(verdict), param=verdict.param, code=verdict.code, status=verdict.status)
        tell(*verdict.ignored)
        return verdict

    async def _shared(self, constraint: Constraint, tenant_id: str, digest: bytes) -> Prepared | Invalid:
        """One check for all requests of a tenant that bring the same text at once. It ends when the
        last of them has gone."""
        key = (tenant_id, digest)
        if key not in self._asking:
            self._asking[key] = Asking(asyncio.create_task(self._judge(constraint, tenant_id, digest)))
        asking = self._asking[key]
        asking.num_waiting += 1
        try:
            return await asyncio.shield(asking.task)
        finally:
            asking.num_waiting -= 1
            if not asking.num_waiting and self._asking.get(key) is asking:
                del self._asking[key]
                asking.task.cancel()

    async def _judge(self, constraint: Constraint, tenant_id: str, digest: bytes) -> Prepared | Invalid:
        verdict = await self._ask(constraint, tenant_id)
        if (known := self._verdicts.pop(digest, None)) is not None:  # of another tenant's check of the same text
            self._size -= size_of(known)
        self._verdicts[digest] = verdict
        self._size += size_of(verdict)
        while len(self._verdicts) > 1 and (len(self._verdicts) > MAX_KNOWN or self._size > MAX_CHARACTERS):
            self._size -= size_of(self._verdicts.popitem(last=False)[1])
        return verdict

    async def _ask(self, constraint: Constraint, tenant_id: str) -> Prepared | Invalid:
        """The verdict, to be remembered. A schema that is not strict gets a second, shorter check.
        Raises Invalid for what could not be found out: another time it may be, on a machine that is
        less busy."""
        try:
            return await self._ask_once(constraint, tenant_id, is_shallow=False)
        except Invalid:
            if not constraint.is_lenient:
                raise
        return await self._ask_once(constraint, tenant_id, is_shallow=True)

    async def _ask_once(self, constraint: Constraint, tenant_id: str, *, is_shallow: bool) -> Prepared | Invalid:
        try:
            answer = await self.helpers.ask(tenant_id, pack((constraint, is_shallow)), limit_s=CHECK_TIMEOUT_S)
        except TimeoutError:
            raise _too_much(constraint, f"it takes more than {CHECK_TIMEOUT_S:g} s") from None
        except HelperFailed:
            raise _too_much(constraint, "it ends the process that compiles it, of which the memory is bounded") from None
        assert isinstance(answer, Prepared | Invalid)
        return answer


def size_of(verdict: Prepared | Invalid) -> int:
    return verdict.size if isinstance(verdict, Prepared) else len(str(verdict))


def digest_of(constraint: Constraint) -> bytes:
    said = repr((constraint.kind, constraint.text, constraint.is_lenient, constraint.param))
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).digest()


def _too_much(constraint: Constraint, reason: str) -> Invalid:
    return Invalid(f"{constraint.param or constraint.kind}: this can't be made a grammar: {reason}", param=constraint.param or None, code="invalid_grammar")
