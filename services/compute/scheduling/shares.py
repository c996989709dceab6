"""Shares: the time that a step may take while several tenants run in it.

Each sequence of a step waits for the whole step. So a tenant with many sequences would slow down
another's few, though both have their places. Take the tenant whose work in a step costs least: each
other tenant may add half of that cost to the step, or as much work as that tenant has in it, if that
costs more. If all have equally much work, this bounds nothing. If one has much more, its sequences
take turns.

A request that comes in the middle of a step waits for the step's end. So while another tenant is
expected, a tenant that runs alone has shorter steps: its prompts are computed in smaller chunks.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest

from services.compute.scheduling.step_cost import StepCost
from services.compute.sequence import Sequence

# The time that another tenant may add to a step, over the time of the tenant with the least work. A flood
# of requests costs the other stages time, too: at 1, a small request took up to 2.4 times as long, not 2.
ADDED_SHARE = 0.5
PROMPTS_EVERY = 4  # of so many bounded steps, prompts get tokens beyond the bound in one
EXPECTED_S = 30.0  # since its last request, while another request of the tenant is expected
# a step of one tenant while another is expected: s, and in costs of an empty step. A sixth of the time
# then goes to reading the weights
SHORT_STEP_S, SHORT_STEP = 0.05, 6


class Shares:
    """`begin_step` comes first; all other methods concern that step."""

    def __init__(self) -> None:
        self.bound_s: float | None = None  # of the step; None if there is no bound
        self.lightest: str | None = None  # the tenant with the least work
        self.is_prompts_turn = True  # the other tenants' prompts get a block at least
        self.num_awaited_tokens = 0  # kept for that tenant's prompts that wait
        self._cost: StepCost | None = None
        self._num_lightest_tokens = 0
        self._turns: dict[int, int] = {}  # by handle: the number of its last turn
        self._num_turns = 0
        self._num_bounded = 0  # bounded steps
        self._arrivals: dict[str, float] = {}  # by tenant: when its last request came; the latest last

    def arrived(self, tenant_id: str, now: float) -> None:
        """A request of the tenant has come."""
        self._arrivals.pop(tenant_id, None)
        self._arrivals[tenant_id] = now

    def begin_step(
        self, running: list[Sequence], waiting: Mapping[str, int], cost: StepCost | None, max_tokens: int, now: float
    ) -> None:
        """Bound a step of some sequences. waiting: tokens of those that may begin, by tenant. cost: None while
        it is unknown. max_tokens: of any step. now: s, on the clock of `arrived`."""
        while self._arrivals and now - self._arrivals[first := next(iter(self._arrivals))] > EXPECTED_S:
            del self._arrivals[first]
        self.bound_s = self.lightest = None
        self.num_awaited_tokens = 0
        self.is_prompts_turn = True
        if cost is None:
            return
        if len(waiting.keys() | {sequence.request.tenant_id for sequence in running}) < 2:
            if len(self._arrivals) > 1:
                self.bound_s = max(SHORT_STEP_S, SHORT_STEP * cost.fixed_s)
            return
        num_tokens, num_context_tokens = Counter(waiting), Counter(waiting)
        for sequence in running:
            num_tokens[sequence.request.tenant_id] += sequence.num_uncomputed_tokens
            num_context_tokens[sequence.request.tenant_id] += len(sequence.tokens)
        self._num_bounded += 1
        self.is_prompts_turn = self._num_bounded % PROMPTS_EVERY == 0
        wanted = {tenant_id: min(count, max_tokens) for tenant_id, count in num_tokens.items()}
        seconds = {tenant_id: cost.seconds(count, num_context_tokens[tenant_id]) for tenant_id, count in wanted.items()}
        self.lightest = min(seconds, key=seconds.__getitem__)
        alike_s = cost.seconds(len(wanted) * wanted[self.lightest], len(wanted) * num_context_tokens[self.lightest])
        self.bound_s = max(alike_s, (1 + ADDED_SHARE * (len(wanted) - 1)) * seconds[self.lightest])
        self._cost, self._num_lightest_tokens = cost, wanted[self.lightest]
        self.num_awaited_tokens = min(waiting.get(self.lightest, 0), max_tokens)

    def turns(self, decodes: list[Sequence]) -> list[Sequence]:
        """Choose among sequences that are one token behind. All those of the tenant with the least work run.
        The other tenants get one each by turns, as far as the bound allows; the sequence whose last turn
        was longest ago comes first."""
        if self.lightest is None or self._cost is None or self.bound_s is None:
            self._turns.clear()
            return decodes
        by_tenant: dict[str, list[Sequence]] = {}
        for sequence in sorted(decodes, key=lambda decode: self._turns.get(decode.handle, 0)):
            by_tenant.setdefault(sequence.request.tenant_id, []).append(sequence)
        chosen = by_tenant.pop(self.lightest, [])
        num_tokens, num_context_tokens = self._num_lightest_tokens, sum([len(sequence.tokens) for sequence in chosen])
        for sequence in [
            decode for layer in zip_longest(*by_tenant.values()) for decode in layer if decode is not None
        ]:
            num_tokens, num_context_tokens = num_tokens + 1, num_context_tokens + len(sequence.tokens)
            if chosen and self._cost.seconds(num_tokens, num_context_tokens) > self.bound_s:
                break
            chosen.append(sequence)
        latest = {sequence.handle: self._num_turns + number for number, sequence in enumerate(chosen, 1)}
        self._num_turns += len(chosen)
        self._turns = {sequence.handle: self._turns.get(sequence.handle, 0) for sequence in decodes} | latest
        return chosen

    def kept_from(self, sequence: Sequence) -> int:
        """The tokens of the step that are kept from this sequence's prompt."""
        return 0 if sequence.request.tenant_id == self.lightest else self.num_awaited_tokens

    def order(self, sequence: Sequence) -> tuple[bool, float, int]:
        """The order in which prompts get their chunks."""
        return self.lightest is not None and sequence.request.tenant_id != self.lightest, sequence.rank, sequence.handle
