"""Grammars that clients send, checked before their requests are admitted: in helper processes, within bounds, and each text once."""

import hashlib
import pickle
from collections import OrderedDict

from services.gateway.helper import HelperFailed
from services.gateway.pool import HelperPool
from shared.constraint import Constraint
from shared.errors import Invalid

CHECK_TIMEOUT_S = 5.0  # of one grammar; those that people write take milliseconds
MAX_KNOWN = 4096  # verdicts


class GrammarChecker:
    """Owns the helpers, which are started by the first grammars."""

    def __init__(self) -> None:
        self.helpers = HelperPool("services.gateway.grammar_worker", "checking grammars")
        self._verdicts: OrderedDict[bytes, Invalid | None] = OrderedDict()  # by digest, the last used last

    def knows(self, constraint: Constraint) -> bool:
        """Whether its check costs nothing."""
        return digest_of(constraint) in self._verdicts

    async def check(self, constraint: Constraint, tenant_id: str) -> None:
        """Raises Invalid (400) for one that can't be held to, Rejected (429, 503) where others wait already."""
        digest = digest_of(constraint)
        if digest not in self._verdicts:
            verdict = await self._ask(constraint, tenant_id)
            self._verdicts[digest] = verdict
            if len(self._verdicts) > MAX_KNOWN:
                self._verdicts.popitem(last=False)
        else:
            self._verdicts.move_to_end(digest)
            verdict = self._verdicts[digest]
        if verdict is not None:
            raise Invalid(str(verdict), param=verdict.param, code=verdict.code, status=verdict.status)

    async def _ask(self, constraint: Constraint, tenant_id: str) -> Invalid | None:
        """The verdict, to be remembered. Raises Invalid for what could not be found out: another time it may be, on a machine that is less busy."""
        try:
            answer = await self.helpers.ask(tenant_id, pickle.dumps(constraint), timeout_s=CHECK_TIMEOUT_S)
        except TimeoutError:
            raise _too_much(constraint, f"it takes more than {CHECK_TIMEOUT_S:g} s") from None
        except HelperFailed:
            raise _too_much(constraint, "it ends the process that compiles it, of which the memory is bounded") from None
        assert answer is None or isinstance(answer, Invalid)
        return answer


def digest_of(constraint: Constraint) -> bytes:
    said = repr((constraint.kind, constraint.text, constraint.is_lenient, constraint.param))
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).digest()


def _too_much(constraint: Constraint, reason: str) -> Invalid:
    return Invalid(f"{constraint.param or constraint.kind}: this can't be made a grammar: {reason}", param=constraint.param or None, code="invalid_grammar")
