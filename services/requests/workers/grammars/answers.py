"""AnswerChecker: checks finished answers against schemas that could not be enforced in full, in helper
processes with bounds."""

from collections.abc import Sequence
from typing import Any

from services.requests.bodies.fields import MAX_SEQUENCES
from services.requests.workers.pool import HelperFailed, HelperPool
from shared.process.errors import Rejected
from shared.process.plain import pack

CHECK_TIMEOUT_S = 2.0  # from the asking on: an answer waits no longer
QUICK_S = 0.05  # most take 0.02
MAX_OF_TENANT = 2 * MAX_SEQUENCES  # answers of one tenant that wait: those of a request may end together
MAX_TEXT = 1 << 20  # characters
NOT_CHECKED = "not checked: "


class AnswerChecker:
    """Owns the helpers, which are started by the first request whose answer will be checked."""

    def __init__(self) -> None:
        self.helpers = HelperPool(
            "services.requests.workers.grammars.answer_worker",
            "checking answers",
            MAX_OF_TENANT,
            CHECK_TIMEOUT_S,
            quick_s=QUICK_S,
        )

    async def check(
        self, tenant_id: str, checks: Sequence[Sequence[str]], content: str, calls: Sequence[tuple[str, str]]
    ) -> list[dict[str, Any]]:
        """List where an answer breaks its schemas: path, message, and the function whose arguments
        it is about; empty if it is valid. A check that takes longer than CHECK_TIMEOUT_S is in the
        list, too: no answer is held back for longer.

        checks: of the response's record; calls: name and arguments of each.
        """
        schemas = {each[0]: each[1] for each in checks}
        asked = [(name, schemas[name], text) for name, text in calls if name in schemas]
        asked += [("", schemas[""], content)] if "" in schemas and not calls else []
        if not asked:
            return []
        if sum(len(text) for _, _, text in asked) > MAX_TEXT:
            return [unchecked("it is too long")]
        try:
            found: Any = await self.helpers.ask(tenant_id, pack(asked), limit_s=CHECK_TIMEOUT_S)
        except TimeoutError:
            return [unchecked(f"it takes more than {CHECK_TIMEOUT_S:g} s")]
        except HelperFailed:
            return [unchecked("it ends the process that checks it")]
        except Rejected:
            return [unchecked("the gateway is busy")]
        problems: list[dict[str, Any]] = found
        return problems


def unchecked(reason: str) -> dict[str, Any]:
    return {"path": "$", "message": NOT_CHECKED + reason}
