"""Shares: what a step may cost while several tenants run in it.

Each sequence of a step waits for the whole step. So a tenant with many sequences would slow down
another's few, though both have their places. While T tenants want to run, a step costs at most T
times what a step of the tenant who wants least would cost. If all want the same, that bounds
nothing. If one wants much more, its sequences take turns.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest

from services.compute.scheduling.step_cost import StepCost
from services.compute.sequence import Sequence


class Shares:
    """Call `begin_step` first. All other methods are about that step."""

    def __init__(self) -> None:
        self.bound_s: float | None = None  # of the step; None: nothing bounds it
        self.least: str | None = None  # the tenant who wants least
        self.num_awaited_tokens = 0  # kept for his prompts that wait
        self._cost: StepCost | None = None
        self._num_least_tokens = 0
        self._turns: dict[int, int] = {}  # by handle: the number of its last turn
        self._num_turns = 0

    def begin_step(self, running: list[Sequence], waiting: Mapping[str, int], cost: StepCost | None, most_tokens: int) -> None:
        """Bound a step of some sequences. waiting: tokens of those that may begin, by tenant. cost:
        None while it is unknown. most_tokens: bound of any step."""
        num_tokens, num_context_tokens = Counter(waiting), Counter(waiting)
        for sequence in running:
            num_tokens[sequence.tenant_id] += sequence.num_uncomputed_tokens
            num_context_tokens[sequence.tenant_id] += sequence.num_tokens
        self.bound_s = self.least = None
        self.num_awaited_tokens = 0
        if len(num_tokens) < 2 or cost is None:
            return
        wanted = {tenant_id: min(count, most_tokens) for tenant_id, count in num_tokens.items()}
        seconds = {tenant_id: cost.seconds(count, num_context_tokens[tenant_id]) for tenant_id, count in wanted.items()}
        self.least = min(seconds, key=seconds.__getitem__)
        self.bound_s = len(wanted) * seconds[self.least]
        self._cost, self._num_least_tokens = cost, wanted[self.least]
        self.num_awaited_tokens = min(waiting.get(self.least, 0), most_tokens)

    def turns(self, decodes: list[Sequence]) -> list[Sequence]:
        """Choose among sequences that are one token behind. All of the tenant who wants least run.
        The other tenants get one each by turns, as far as the bound allows; the sequence whose last
        turn was longest ago comes first."""
        if self.bound_s is None or self._cost is None:
            self._turns.clear()
            return decodes
        by_tenant: dict[str, list[Sequence]] = {}
        for sequence in sorted(decodes, key=lambda each: self._turns.get(each.handle, 0)):
            by_tenant.setdefault(sequence.tenant_id, []).append(sequence)
        chosen = by_tenant.pop(self.least or "", [])
        num_tokens, num_context_tokens = self._num_least_tokens, sum([each.num_tokens for each in chosen])
        for sequence in [each for layer in zip_longest(*by_tenant.values()) for each in layer if each is not None]:
            num_tokens, num_context_tokens = num_tokens + 1, num_context_tokens + sequence.num_tokens
            if chosen and self._cost.seconds(num_tokens, num_context_tokens) > self.bound_s:
                break
            chosen.append(sequence)
        latest = {each.handle: self._num_turns + number for number, each in enumerate(chosen, 1)}
        self._num_turns += len(chosen)
        self._turns = {each.handle: self._turns.get(each.handle, 0) for each in decodes} | latest
        return chosen

    def kept_from(self, sequence: Sequence) -> int:
        """Tokens of the step that this sequence's prompt may not have."""
        return 0 if sequence.tenant_id == self.least else self.num_awaited_tokens

    def order(self, sequence: Sequence) -> tuple[bool, float, int]:
        """The order in which prompts get their chunks."""
        return self.least is not None and sequence.tenant_id != self.least, sequence.rank, sequence.handle
