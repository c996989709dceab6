"""Grammars that clients send, checked before their requests are admitted: in a helper process, within bounds, and each text once."""

import hashlib
import pickle
from collections import OrderedDict

from services.gateway.helper import Helper, HelperFailed
from services.gateway.ignored import tell
from services.gateway.schemas.prepare import Prepared
from shared.constraint import Constraint
from shared.errors import Invalid, Rejected

CHECK_TIMEOUT_S = 5.0  # of one grammar; those that people write take milliseconds
MAX_WAITING = 64  # checks, one after the other
MAX_KNOWN = 4096  # verdicts
MAX_CHARACTERS = 16 << 20  # of the verdicts


class GrammarChecker:
    """Owns the helper, which is started by the first grammar."""

    def __init__(self) -> None:
        self.helper = Helper("services.gateway.grammar_worker")
        self._verdicts: OrderedDict[bytes, Prepared | Invalid] = OrderedDict()  # by digest, the last used last
        self._size = 0  # characters
        self._num_waiting = 0

    async def check(self, constraint: Constraint) -> Prepared:
        """What of it is enforced; what is not, the answer's header names. Raises Invalid (400) for one that can't be held to, Rejected (503) while too many are
        being checked."""
        digest = hashlib.sha256(repr((constraint.kind, constraint.text, constraint.is_lenient, constraint.param)).encode("utf-8", "surrogatepass")).digest()
        if digest not in self._verdicts:
            if self._num_waiting >= MAX_WAITING:
                raise Rejected("the gateway is busy with checking grammars", status=503, retry_after_s=1)
            self._num_waiting += 1
            try:
                self._verdicts[digest] = await self._ask(constraint)
                self._size += size_of(self._verdicts[digest])
            finally:
                self._num_waiting -= 1
            while len(self._verdicts) > 1 and (len(self._verdicts) > MAX_KNOWN or self._size > MAX_CHARACTERS):
                self._size -= size_of(self._verdicts.popitem(last=False)[1])
        self._verdicts.move_to_end(digest)
        verdict = self._verdicts[digest]
        if isinstance(verdict, Invalid):
            raise Invalid(str(verdict), param=verdict.param, code=verdict.code, status=verdict.status)
        tell(*verdict.ignored)
        return verdict

    async def _ask(self, constraint: Constraint) -> Prepared | Invalid:
        """The verdict, to be remembered. Raises Invalid for what could not be found out: another time it may be, on a machine that is less busy."""
        try:
            answer = await self.helper.ask(pickle.dumps(constraint), timeout_s=CHECK_TIMEOUT_S)
        except TimeoutError:
            raise _too_much(constraint, f"it takes more than {CHECK_TIMEOUT_S:g} s") from None
        except HelperFailed:
            raise _too_much(constraint, "it ends the process that compiles it, of which the memory is bounded") from None
        assert isinstance(answer, Prepared | Invalid)
        return answer


def size_of(verdict: Prepared | Invalid) -> int:
    return verdict.size if isinstance(verdict, Prepared) else len(str(verdict))


def _too_much(constraint: Constraint, reason: str) -> Invalid:
    return Invalid(f"{constraint.param or constraint.kind}: this can't be made a grammar: {reason}", param=constraint.param or None, code="invalid_grammar")
