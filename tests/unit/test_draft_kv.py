"""A draft model's own cache is said to hold only what was written there for these tokens, whatever
became of blocks and sequences meanwhile.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.admission import make_admission
from services.compute.scheduling.new_step import NewStep
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.speculation.draft_kv import OwnKV
from shared.model.sampling_params import SamplingParams

NUM_BLOCKS, BLOCK_SIZE = 24, 4
PROMPTS = [
    [1, 1, 1, 1, 2, 2, 2, 2, 3],
    [1, 1, 1, 1, 2, 2, 2, 2, 3, 3],
    [1, 1, 1, 1, 2, 2, 2, 3],
    [4, 5, 6],
    [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 1],
]
ACTIONS = ("begin", "step", "step", "draft", "draft", "preempt", "finish")


class Slots:
    """A cache in whose slots stands the whole prefix that a key follows from, and OwnKV beside it."""

    def __init__(self) -> None:
        self.kv = OwnKV(NUM_BLOCKS, BLOCK_SIZE)
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def check(self, sequence: Sequence) -> int:
        known = self.kv.num_known(sequence)
        assert known < len(sequence.tokens)
        for at in range(known):
            assert self.slots[sequence.kv.block_table[at // BLOCK_SIZE], at % BLOCK_SIZE] == tuple(
                sequence.tokens.ids[: at + 1]
            )
        return known

    def write(self, sequence: Sequence, first: int, last: int) -> None:
        for at in range(first, last):
            self.slots[sequence.kv.block_table[at // BLOCK_SIZE], at % BLOCK_SIZE] = tuple(
                sequence.tokens.ids[: at + 1]
            )
        self.kv.wrote(sequence, first, last)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), max_size=60))
def test_what_is_known_is_there(actions: list[tuple[str, int]]) -> None:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(
        blocks, make_admission("paged", blocks, confidence=0.9), max_num_seqs=4, max_batched_tokens=32
    )
    slots, num_begun = Slots(), 0
    for action, number in actions:
        running = list(scheduler.running.values())
        chosen = running[number % len(running)] if running else None
        if action == "begin":
            prompt = PROMPTS[number % len(PROMPTS)]
            group = "group" if number % 3 == 0 else None
            scheduler.add(
                Sequence(
                    Request(
                        num_begun,
                        str(num_begun),
                        SamplingParams(max_tokens=20),
                        group_id=group and f"{group}{len(prompt)}",
                    ),
                    Tokens(list(prompt)),
                )
            )
            num_begun += 1
        elif action == "step":
            for key in batch.sampled if (batch := scheduler.schedule()) is not None else ():
                sequence = scheduler.get(key.handle)
                scheduler.append(sequence, 7 + (number + len(sequence.tokens)) % 3)
                if sequence.tokens.num_output == 20:
                    scheduler.finish(sequence, is_complete=True)
        elif chosen is not None and action == "preempt":
            scheduler._preempt(chosen, NewStep())
        elif chosen is not None and action == "finish":
            scheduler.finish(chosen)
        elif chosen is not None and chosen.num_uncomputed_tokens == 1 and not chosen.kv.has_shared_tail:
            draft(scheduler, slots, chosen, number)


def draft(scheduler: Scheduler, slots: Slots, sequence: Sequence, number: int) -> None:
    """As chains do: catch up, write some drafts of which a step's tokens may repeat the first, and withdraw them."""
    count, num_tokens = number % 6, len(sequence.tokens)
    if scheduler.block_manager.copies or not scheduler.block_manager.grow(sequence, num_tokens + count):
        return
    slots.write(sequence, slots.check(sequence), num_tokens)
    for place in range(count):
        sequence.tokens.foresee(7 + (number + num_tokens) % 3 if place == 0 else 7)
        slots.write(sequence, num_tokens + place, num_tokens + place + 1)
    scheduler.truncate(sequence, num_tokens)
    assert slots.check(sequence) == num_tokens - 1
