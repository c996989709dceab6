"""Tenants share compute's places: a flood of one costs another little, in however many sequences it
comes, and urgency counts wherever it waits.
"""

import itertools

import pytest

from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.offline import run_step
from services.compute.scheduling.scheduler import Scheduler
from services.compute.scheduling.shares import ADDED_SHARE, EXPECTED_S, PROMPTS_EVERY, SHORT_STEP_S
from services.compute.scheduling.step_cost import StepCost
from services.compute.sequence import Request, Sequence, Tokens
from shared.model.sampling_params import SamplingParams

STEP_S = 0.02
PROMPT, FLOOD_TOKENS, SMALL_TOKENS = 50, 200, 8


class Server:
    """Steps of STEP_S; notes how many steps each small request waits for its first token."""

    def __init__(self, strategy: str = "predicted", *, num_blocks: int = 4000, max_num_seqs: int = 64) -> None:
        blocks = BlockManager(num_blocks, 16)
        self.num_steps = 0
        self.scheduler = Scheduler(
            blocks,
            make_admission(strategy, blocks),
            max_num_seqs=max_num_seqs,
            max_batched_tokens=512,
            clock=lambda: self.num_steps * STEP_S,
        )
        self.handles = itertools.count(1)

    def ask(
        self,
        tenant_id: str,
        num_tokens: int,
        *,
        priority: int = 0,
        group_id: str | None = None,
        prompt: int | None = None,
    ) -> Sequence:
        handle = next(self.handles)
        params, now = SamplingParams(max_tokens=num_tokens), self.num_steps * STEP_S
        request = Request(
            handle, str(handle), params, priority=priority, tenant_id=tenant_id, arrived_at=now, group_id=group_id
        )
        asked = Sequence(request, Tokens([prompt or handle] * PROMPT))
        self.scheduler.add(asked)
        return asked

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            run_step(self.scheduler, lambda _, sequences: [7] * len(sequences))
            self.num_steps += 1

    def steps_to_first_token(self, asked: Sequence) -> int:
        began = self.num_steps
        while not asked.tokens.num_output:
            self.run(1)
            assert self.num_steps - began < 5000
        return self.num_steps - began

    def ask_each_second(self, tenant_id: str, *, count: int = 10, priority: int = 0) -> list[int]:
        """How long each waited for its first token, in steps."""
        waits = []
        for _ in range(count):
            waits.append(self.steps_to_first_token(self.ask(tenant_id, SMALL_TOKENS, priority=priority)))
            self.run(int(1 / STEP_S))
        return waits


def flood(server: Server, *, n: int) -> None:
    """150 requests, or 60 with n choices."""
    for number in range(150 if n == 1 else 60):
        for _ in range(n):
            server.ask("a", FLOOD_TOKENS, group_id=f"g{number}" if n > 1 else None, prompt=1000 + number)


@pytest.mark.parametrize("n", [1, 8])
def test_a_flood_of_one_tenant_costs_another_no_more_than_its_own_latency_again(n: int) -> None:
    alone = max(Server().ask_each_second("b"))
    server = Server()
    flood(server, n=n)
    server.run(20)
    assert len(server.scheduler.running) == server.scheduler.max_num_seqs
    waits = server.ask_each_second("b", count=6)
    assert server.scheduler.waiting, "the flood is not over"
    assert max(waits) <= 2 * alone + 1
    assert server.scheduler.num_preemptions <= len(waits), "one place for each, and no churn"


@pytest.mark.parametrize("n", [1, 8])
def test_the_urgent_pass_a_flood_of_their_own_tenant(n: int) -> None:
    alone = max(Server().ask_each_second("a"))
    server = Server()
    flood(server, n=n)
    server.run(20)
    assert max(server.ask_each_second("a", priority=-33)) <= 2 * alone + 1


def test_two_floods_share_the_places() -> None:
    server = Server(max_num_seqs=8)
    for tenant_id in ("a", "b"):
        for _ in range(60):
            server.ask(tenant_id, 20)
    server.run(65)
    shares = [
        sum(each.request.tenant_id == tenant_id for each in server.scheduler.running.values())
        for tenant_id in ("a", "b")
    ]
    assert shares == [4, 4]


def test_a_tenant_alone_has_every_place_in_the_order_of_arrival() -> None:
    server = Server(max_num_seqs=8)
    asked = [server.ask("a", 20) for _ in range(20)]
    server.run(1)
    assert [*server.scheduler.running] == [each.handle for each in asked[:8]]
    server.run(200)
    assert all(each.is_finished for each in asked) and not server.scheduler.num_preemptions


def test_who_waits_long_enough_begins_however_many_others_come() -> None:
    """A tenant with a place, beside a stream of tenants with none: each of its places is worth aging_s of waiting."""
    server = Server(max_num_seqs=2)
    server.scheduler.aging_s = 1.0
    server.ask("a", 10_000)
    server.run(1)
    second = server.ask("a", 10)
    for number in range(200):
        server.ask(f"tenant-{number}", 10)
        server.run(5)
    assert second.tokens.num_output


def test_a_strategy_that_never_preempts_does_not_do_so_for_a_tenant() -> None:
    server = Server("reserve")
    flood(server, n=1)
    server.run(20)
    server.ask("b", SMALL_TOKENS)
    server.run(400)
    assert server.scheduler.num_preemptions == 0


COST = StepCost(fixed_s=0.002, per_token_s=0.0002, per_context_token_s=0.0)


def costly(server: Server) -> Server:
    """Its steps cost what COST says, and it knows that."""
    server.scheduler.step_cost.cost = COST
    return server


def run_costly(server: Server, num_steps: int) -> list[float]:
    """Each step's cost, in seconds."""
    seconds = []

    def decide(_: object, sequences: list[Sequence]) -> list[int]:
        return [7] * len(sequences)

    for _ in range(num_steps):
        before = {each.handle: each.kv.num_computed for each in server.scheduler.running.values()}
        run_step(server.scheduler, decide)
        server.num_steps += 1
        computed = sum(each.kv.num_computed - before.get(each.handle, 0) for each in server.scheduler.running.values())
        seconds.append(COST.seconds(computed, 0))
    return seconds


def test_a_crowd_adds_half_to_the_steps_of_a_small_tenant_and_nobody_starves() -> None:
    server = costly(Server())
    crowd = [server.ask("a", 5000) for _ in range(60)]
    run_costly(server, 10)
    small = server.ask("b", 400)
    run_costly(server, 2)
    before = [each.tokens.num_output for each in crowd]
    seconds = run_costly(server, 300)
    assert small.tokens.num_output == 302, "it is in every step"
    assert max(seconds) <= (1 + ADDED_SHARE) * COST.seconds(1, 0) + 1e-9
    gained = [each.tokens.num_output - first for each, first in zip(crowd, before, strict=True)]
    assert max(gained) - min(gained) <= 1, "the others take turns"
    share = int(ADDED_SHARE * COST.seconds(1, 0) / COST.per_token_s + 1e-9)
    assert sum(gained) >= 300 * share - len(gained), "and have all that the bound leaves"


def test_tenants_who_want_the_same_bound_each_other_by_nothing() -> None:
    server = costly(Server())
    asked = [server.ask(tenant_id, 1000) for tenant_id in "abcd" for _ in range(16)]
    run_costly(server, 20)
    before = [each.tokens.num_output for each in asked]
    run_costly(server, 50)
    assert {each.tokens.num_output - first for each, first in zip(asked, before, strict=True)} == {50}


def test_a_long_prompt_leaves_another_tenants_stream_most_of_the_time() -> None:
    server = costly(Server())
    stream = server.ask("b", 400)
    run_costly(server, 3)
    crowd = [server.ask("a", 4) for _ in range(20)]
    seconds = run_costly(server, 40)
    assert stream.tokens.num_output == 43
    assert max(seconds) <= (1 + ADDED_SHARE) * COST.seconds(1, 0) + 16 * COST.per_token_s + 1e-9, (
        "now and then, a prompt gets a block"
    )
    assert sum(seconds) / 40 <= (1 + ADDED_SHARE) * COST.seconds(1, 0) + 16 / PROMPTS_EVERY * COST.per_token_s + 1e-9
    assert sum(each.is_finished for each in crowd) * PROMPT >= 16 * 40 / PROMPTS_EVERY - PROMPT, (
        "they never stand still for long"
    )


def test_steps_of_prompts_are_short_while_another_tenant_is_expected() -> None:
    cost = StepCost(fixed_s=0.005, per_token_s=0.0005, per_context_token_s=0.0)

    def longest_step(others_ago_s: float, *, is_crowd_there: bool = False) -> int:
        """Tokens. is_crowd_there: no request comes after the other tenant's."""
        server = Server()
        server.scheduler.step_cost.cost = cost
        crowd = [server.ask("a", 4) for _ in range(40)] if is_crowd_there else []
        server.ask("b", 1)
        server.run(2)
        server.num_steps += round(others_ago_s / STEP_S)
        crowd = crowd or [server.ask("a", 4) for _ in range(20)]
        computed = []
        for _ in range(4):
            before = sum(each.kv.num_computed for each in crowd)
            server.run(1)
            computed.append(sum(each.kv.num_computed for each in crowd) - before)
        return max(computed)

    assert 16 < longest_step(EXPECTED_S / 2) <= cost.tokens_within(SHORT_STEP_S, 0)
    assert longest_step(EXPECTED_S * 2) == 512, "the scheduler's bound"
    assert 16 < longest_step(EXPECTED_S / 2, is_crowd_there=True) <= cost.tokens_within(SHORT_STEP_S, 0)
    assert longest_step(EXPECTED_S * 2, is_crowd_there=True) == 512, (
        "the clock alone says that he is not to be expected"
    )


def test_a_tenants_first_prompt_goes_before_the_prompts_of_a_crowd() -> None:
    server = costly(Server())
    for _ in range(30):
        server.ask("a", 4)
    run_costly(server, 2)
    assert server.steps_to_first_token(server.ask("b", 4)) == 1
