"""AnswerChecker: holds answers against what of their schemas could not be enforced, at their end,
in a helper process with bounds."""

import pickle
from collections.abc import Sequence
from typing import Any

from services.requests.helpers.helper import Helper, HelperFailed

CHECK_TIMEOUT_S = 2.0  # of one answer
MAX_WAITING = 32  # answers, one after the other
MAX_TEXT = 1 << 20  # characters
NOT_CHECKED = "not checked: "


class AnswerChecker:
    """Owns the helper, which is started by the first answer."""

    def __init__(self) -> None:
        self.helper = Helper("services.requests.grammars.answer_worker")
        self._num_waiting = 0

    async def check(self, checks: Sequence[Sequence[str]], content: str, calls: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """List where an answer breaks its schemas: path, message, and the function whose arguments
        it is about; empty: it is valid. What could not be found out in time is said, too: an answer
        is never held back for it.

        checks: of the response's record; calls: name and arguments of each.
        """
        schemas = {each[0]: each[1] for each in checks}
        asked = [(name, schemas[name], text) for name, text in calls if name in schemas]
        asked += [("", schemas[""], content)] if "" in schemas and not calls else []
        if not asked:
            return []
        if sum(len(text) for _, _, text in asked) > MAX_TEXT:
            return [unchecked("it is too long")]
        if self._num_waiting >= MAX_WAITING:
            return [unchecked("the gateway is busy")]
        self._num_waiting += 1
        try:
            found: Any = await self.helper.ask(pickle.dumps(asked), timeout_s=CHECK_TIMEOUT_S)
        except TimeoutError:
            return [unchecked(f"it takes more than {CHECK_TIMEOUT_S:g} s")]
        except HelperFailed:
            return [unchecked("it ends the process that checks it")]
        finally:
            self._num_waiting -= 1
        problems: list[dict[str, Any]] = found
        return problems


def unchecked(reason: str) -> dict[str, Any]:
    return {"path": "$", "message": NOT_CHECKED + reason}
