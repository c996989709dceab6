"""Grammars that clients send, checked before their requests are admitted: in helper processes,
within bounds, and each text once."""

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from services.requests.bodies.ignored import tell
from services.requests.text.schemas.prepare import Enforceable
from services.requests.workers.pool import HelperFailed, HelperPool
from shared.model.constraint import Constraint
from shared.process.errors import Invalid, Rejected
from shared.process.plain import pack

CHECK_TIMEOUT_S = 5.0  # of one grammar; those that people write take milliseconds
MAX_OF_TENANT = 64  # texts of one tenant that wait
WITHIN_S = 15.0  # with the wait for its turn: one that is slow may have others before it
MAX_KNOWN = 4096  # verdicts
MAX_CHARACTERS = 16 << 20  # of the verdicts


@dataclass(slots=True)
class Asking:
    """A check under way."""

    task: "asyncio.Task[Enforceable | Invalid]"
    num_waiting: int = 0  # requests


class GrammarChecker:
    """Owns the helpers."""

    def __init__(self, worker: str = "services.requests.workers.grammars.worker") -> None:
        """worker: the module of the helpers."""
        self.helpers = HelperPool(worker, "checking grammars", MAX_OF_TENANT, WITHIN_S, (Enforceable, Constraint))
        self._asking: dict[tuple[str, bytes], Asking] = {}  # by tenant and digest
        self._verdicts: OrderedDict[bytes, Enforceable | Invalid] = OrderedDict()  # by digest, the last used last
        self._size = 0  # characters of the verdicts

    def knows(self, constraint: Constraint) -> bool:
        """Whether its check costs nothing."""
        return digest_of(constraint) in self._verdicts

    async def check(self, constraint: Constraint, tenant_id: str) -> Enforceable:
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

    async def _shared(self, constraint: Constraint, tenant_id: str, digest: bytes) -> Enforceable | Invalid:
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

    async def _judge(self, constraint: Constraint, tenant_id: str, digest: bytes) -> Enforceable | Invalid:
        verdict = await self._ask(constraint, tenant_id)
        if (known := self._verdicts.pop(digest, None)) is not None:  # of another tenant's check of the same text
            self._size -= size_of(known)
        self._verdicts[digest] = verdict
        self._size += size_of(verdict)
        while len(self._verdicts) > 1 and (len(self._verdicts) > MAX_KNOWN or self._size > MAX_CHARACTERS):
            self._size -= size_of(self._verdicts.popitem(last=False)[1])
        return verdict

    async def _ask(self, constraint: Constraint, tenant_id: str) -> Enforceable | Invalid:
        """The verdict, to be remembered. Raises Rejected (503) if the check takes too long, which it may
        not on a machine that is less busy, and Invalid if it ends its process."""
        what = f"{constraint.param or constraint.kind}: this can't be made a grammar"
        try:
            answer = await self.helpers.ask(tenant_id, pack(constraint), limit_s=CHECK_TIMEOUT_S)
        except TimeoutError:
            reason = f"it takes more than {CHECK_TIMEOUT_S:g} s: send it again later, or make it smaller"
            raise Rejected(f"{what}: {reason}", status=503, retry_after_s=1, code="grammar_timeout") from None
        except HelperFailed:
            reason = "it takes more memory than its check may have"
            raise Invalid(f"{what}: {reason}", param=constraint.param or None, code="invalid_grammar") from None
        assert isinstance(answer, Enforceable | Invalid)
        return answer


def size_of(verdict: Enforceable | Invalid) -> int:
    return verdict.size if isinstance(verdict, Enforceable) else len(str(verdict))


def digest_of(constraint: Constraint) -> bytes:
    text = repr((constraint.kind, constraint.text, constraint.is_lenient, constraint.param))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
