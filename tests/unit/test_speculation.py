"""Sources of drafts, and how many are taken: no text depends on it, only time."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.compute.sequence import Sequence
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from services.compute.speculation.control import MARGIN, DraftControl, DraftKind, StepTime
from services.compute.speculation.model_free import MAX_POOLS, POOL_GRADES, Lookup, PredictionProposer
from services.compute.speculation.ngrams import LONGEST, NO_TOKEN, NgramIndex
from services.compute.speculation.proposer import MAX_GRADE, Drafts, Wanted
from shared.model.prediction import PredictionFollower
from tests.examples import examples
from tests.unit.sequences import make_sequence

KIND = DraftKind("lookup", 0)


# --- n-grams


@given(
    tokens=st.lists(st.integers(0, 3), max_size=80),
    context=st.lists(st.integers(0, 3), max_size=6),
    capacity=st.sampled_from([16, 256]),
)
def test_a_match_is_one_and_none_in_reach_is_longer(tokens: list[int], context: list[int], capacity: int) -> None:
    index = NgramIndex(capacity)
    for start in range(0, len(tokens), 7):
        index.add(tokens[start : start + 7])
    place, length = index.find(context)
    kept = range(max(0, len(tokens) - capacity), len(tokens))
    lengths = {at: matching(tokens[kept.start : at + 1], context) for at in kept[:-1]}
    if place >= 0:
        assert 1 <= length == lengths[place]
        assert index.read(place, 5) == tokens[place + 1 : place + 6]
    found = [each for each in lengths.values() if each >= 1]
    # of one pair the last places are looked at, and places of other pairs may be among them
    assert len(found) > 3 or len(tokens) > 16 or length == max(found, default=0)


def matching(tokens: list[int], context: list[int]) -> int:
    """How many last tokens the two have in common."""
    return next(
        (at for at, (one, other) in enumerate(zip(reversed(tokens), reversed(context), strict=False)) if one != other),
        min(len(tokens), len(context)),
    )


def test_an_index_holds_a_bounded_number_of_bytes() -> None:
    index = NgramIndex(1024)
    index.add([at % 251 for at in range(100)])
    assert index.num_bytes == 256 * 28
    index.add([at % 251 for at in range(50_000)])
    assert index.num_bytes == 1024 * 28
    assert index.find([100, 101, 102])[1] == 3 and index.read(index.find([100, 101, 102])[0], 2) == [103, 104]


def test_texts_are_apart() -> None:
    index = NgramIndex(64)
    index.add([1, 2, 3, NO_TOKEN, 4, 5])
    assert index.read(index.find([1, 2])[0], 9) == [3]
    assert index.find([3, 4]) == (4, 1), "of the 4 alone"


def test_a_token_alone_is_found_where_it_stood_last_with_one_behind_it() -> None:
    index = NgramIndex(16)
    index.add([7, 1, 7, 2, 7])
    assert index.find([9, 7]) == (2, 1) and index.read(2, 1) == [2]
    index.add(list(range(20, 36)))
    assert index.find([9, 7]) == (-1, 0), "it has left the index"


# --- lookup


def proposed(lookup: Lookup, sequence: Sequence, most: int = 8) -> Drafts | None:
    return lookup.propose({sequence.handle: Wanted(sequence, most)}).get(sequence.handle)


def test_what_followed_before_is_proposed_and_a_loop_goes_on() -> None:
    lookup = Lookup()
    assert proposed(lookup, make_sequence(1, [5, 6, 7, 8, 9, 5, 6], 99), 3) == Drafts([7, 8, 9], 1)
    assert proposed(lookup, make_sequence(2, [1, 2, 3, 1, 2, 3, 1, 2], 99), 6) == Drafts([3, 1, 2, 3, 1, 2], 3)
    assert proposed(lookup, make_sequence(3, [1, 2, 3], 99)) is None
    assert proposed(lookup, make_sequence(4, [1], 99)) is None


def test_what_is_foreseen_is_matched_and_what_came_otherwise_is_not_remembered() -> None:
    lookup, sequence = Lookup(), make_sequence(1, [1, 2, 3, 4, 1], 99)
    sequence.tokens.foresee(2)
    assert proposed(lookup, sequence, 2) == Drafts([3, 4], 1)
    sequence.tokens.truncate(5)
    sequence.tokens.ids += [9, 1, 2]
    assert proposed(lookup, sequence, 2) == Drafts([3, 4], 1)
    sequence.tokens.ids += [7, 1, 9]
    assert proposed(lookup, sequence, 2) == Drafts([1, 2], 1)


def end(lookup: Lookup, handle: int, answer: list[int], **fields: Any) -> None:
    """A request that was answered so."""
    sequence = make_sequence(handle, [50, 51], 99, **fields)
    proposed(lookup, sequence)
    sequence.tokens.ids += answer
    lookup.forget(handle)


@pytest.mark.parametrize("other", [{"tenant_id": "b"}, {"tenant_id": "a", "cache_salt": "s"}])
def test_a_pool_is_one_tenant_s_and_one_salt_s(other: dict[str, Any]) -> None:
    lookup = Lookup()
    end(lookup, 1, [1, 2, 3, 4, 5], tenant_id="a")
    assert proposed(lookup, make_sequence(2, [9, 1, 2], 99, tenant_id="a"), 9) == Drafts([3, 4, 5], POOL_GRADES + 1)
    assert proposed(lookup, make_sequence(3, [9, 1, 2], 99, **other)) is None
    for handle in (2, 3, 77):
        lookup.forget(handle)
    assert len(lookup._pools) == 1


def test_pools_and_grades_are_bounded() -> None:
    lookup = Lookup()
    for number in range(MAX_POOLS + 9):
        end(lookup, number, [1, 2, 3], tenant_id=str(number))
    assert len(lookup._pools) == MAX_POOLS and not lookup._own
    end(lookup, 1, list(range(40)), tenant_id="x")
    found = proposed(lookup, make_sequence(2, list(range(LONGEST + 5)), 99, tenant_id="x"))
    assert found is not None and found.grade == MAX_GRADE


# --- prediction


def follow(prediction: list[int], answer: list[int]) -> PredictionFollower:
    follower = PredictionFollower(prediction)
    for token_id in answer:
        follower.take(token_id)
    return follower


def test_an_answer_is_followed_along_its_prediction() -> None:
    text = list(range(100, 130))
    assert follow(text, []).expected(3) == [100, 101, 102]
    assert follow(text, text[:9]).expected(2) == [109, 110] and follow(text, text[:9]).num_accepted == 9
    changed = follow(text, [*text[:5], 1, 2, *text[5:9]])
    assert changed.expected(2) == [109, 110] and changed.num_accepted == 9, "something was inserted"
    left_out = follow(text, [*text[:5], *text[11:14]])
    assert left_out.expected(2) == [114, 115] and (left_out.num_accepted, left_out.num_rejected) == (8, 22), (
        "something was left out"
    )
    assert follow(text, [*text[:5], 1, 2, 3, *text[6:9]]).expected(1) == [109], "something was changed"
    assert follow(text, [*text, 7, 7, 7]).expected(9) == []


@given(
    prediction=st.lists(st.integers(0, 4), max_size=60),
    answer=st.lists(st.integers(0, 4), max_size=60),
    most=st.integers(1, 9),
)
def test_no_token_of_a_prediction_counts_twice(prediction: list[int], answer: list[int], most: int) -> None:
    follower = follow(prediction, answer)
    assert 0 <= follower.num_accepted <= min(len(prediction), len(answer) + len(answer)) and follower.num_rejected >= 0
    sequence = make_sequence(1, [9, 9], 99, prediction=prediction)
    proposer, decided = PredictionProposer(), len(answer) // 2
    sequence.tokens.ids += answer[:decided]
    proposer.propose({1: Wanted(sequence, most)})
    for token_id in answer[decided:]:
        sequence.tokens.foresee(token_id)
    found = proposer.propose({1: Wanted(sequence, most)})
    assert found.get(1, Drafts([])).token_ids == follower.expected(most), (
        "foreseen tokens are followed, and can be taken back"
    )
    sequence.tokens.truncate(2 + decided)
    again = proposer.propose({1: Wanted(sequence, most)})
    assert again.get(1, Drafts([])).token_ids == follow(prediction, answer[:decided]).expected(most)


# --- how many drafts pay


def timed(seconds_of: dict[int, float]) -> DraftControl:
    """Steps of so many tokens took so long."""
    control = DraftControl()
    for _ in range(30):
        for count, seconds in seconds_of.items():
            control.timed(batch_of(1, count - 1), seconds)
    return control


def batch_of(num_decodes: int, num_drafts: int) -> ScheduledBatch:
    rows = [BatchRow(handle, (1,), 9, (0,), range(1), 5) for handle in range(num_decodes - 1)]
    last = BatchRow(99, (1,) * (1 + num_drafts), 9, (0,), range(1 + num_drafts), 5)
    return ScheduledBatch((*rows, last), num_decodes)


def test_a_step_s_time_is_fitted_and_what_is_not_measured_is_expected() -> None:
    time = StepTime()
    assert not time.is_known
    for _ in range(50):
        time.observe(1, 0.010, has_drafts=False)
    assert time.seconds(1) == pytest.approx(0.010, rel=0.01) and time.per_token_s == pytest.approx(0.0008, rel=0.02)
    for _ in range(50):
        time.observe(1, 0.010, has_drafts=False)
        time.observe(9, 0.034, has_drafts=True)
        time.observe(17, 0.058, has_drafts=True)
        time.observe(1000, 9.0, has_drafts=True) if _ == 10 else None
    assert time.per_token_s == pytest.approx(0.003, rel=0.1) and time.seconds(1) == pytest.approx(0.010, rel=0.05)


def test_nothing_is_drafted_before_a_step_was_timed() -> None:
    assert DraftControl().choose({1: (KIND, 9)}, 1) == {} and DraftControl().best_length("draft", [1], 1, 9, 0.0) == 0


@pytest.mark.parametrize(("stood", "least", "most"), [(0, 0, 0), (4, 2, 8), (16, 12, 16)])
def test_the_length_follows_what_stands(stood: int, least: int, most: int) -> None:
    control = timed({1: 0.0067, 8: 0.0118})  # of a real model
    for _ in range(60):
        control.learn(1, KIND, 16, stood)
    assert least <= control.choose({1: (KIND, 16)}, 1).get(1, 0) <= most


def test_where_tokens_are_dear_only_sure_drafts_are_taken() -> None:
    """As at 64 streams."""
    control = DraftControl()
    for _ in range(30):
        control.timed(batch_of(64, 0), 0.064)
        control.timed(batch_of(48, 16), 0.064)
    for _ in range(60):
        control.learn(1, KIND, 8, 6)
        control.learn(2, DraftKind("grammar", 0), 8, 8)
    chosen = control.choose({1: (KIND, 8), 2: (DraftKind("grammar", 0), 8)}, 64)
    assert chosen.get(1, 0) == 0


def test_who_has_no_drafts_is_delayed_by_a_quarter_at_most() -> None:
    control = timed({1: 0.010, 5: 0.014})
    for _ in range(60):
        control.learn(1, KIND, 16, 16)
    alone, beside = control.choose({1: (KIND, 16)}, 1)[1], control.choose({1: (KIND, 16)}, 2)[1]
    time = control.step_time
    assert alone == 16 and time.drafting_s + beside * time.per_token_s <= 0.25 * time.seconds(2)


def test_what_fails_is_given_up_and_tried_again_later() -> None:
    control = timed({1: 0.010, 9: 0.018})
    tries = []
    for step in range(600):
        count = control.choose({1: (KIND, 16)}, 1).get(1, 0)
        if count:
            tries.append(step)
            control.learn(1, KIND, count, 0)
    assert tries[0] == 0 and len(tries) < 60, "a draft that fails costs a tenth of a step"
    assert tries[-1] > 300, "circumstances change"
    control.forget(1)
    assert control.chance(2, KIND) < 0.4, "others are expected to fare likewise"


@given(
    chances=st.lists(st.floats(0, 1), min_size=1, max_size=8), per_token=st.floats(1e-5, 1e-2), seed=st.integers(0, 99)
)
@examples(50)
def test_what_is_chosen_pays(chances: list[float], per_token: float, seed: int) -> None:
    rng = random.Random(seed)
    control = DraftControl()
    for _ in range(20):
        count = rng.randrange(1, 40)
        control.timed(batch_of(1, count - 1), 0.005 + per_token * count)
    offers = {}
    for handle, chance in enumerate(chances):
        offers[handle] = DraftKind(str(handle), 0), rng.randrange(1, 17)
        for _ in range(40):
            control.learn(handle, offers[handle][0], 1, int(rng.random() < chance))
    chances_now = {handle: control.chance(handle, kind) for handle, (kind, _) in offers.items()}
    chosen = control.choose(offers, len(chances) + 1)
    assert all(0 < count <= offers[handle][1] for handle, count in chosen.items())
    if chosen:
        time = control.step_time
        tokens = (
            len(chances)
            + 1
            + sum(chances_now[handle] ** place for handle, count in chosen.items() for place in range(1, count + 1))
        )
        seconds = time.seconds(len(chances) + 1) + time.drafting_s + sum(chosen.values()) * time.per_token_s
        assert tokens / seconds > MARGIN * (len(chances) + 1) / time.seconds(len(chances) + 1)


def test_a_model_s_drafts_are_asked_for_where_their_own_time_pays() -> None:
    control = timed({1: 0.0132, 5: 0.0160})
    for _ in range(60):
        control.learn(1, DraftKind("self", 0), 4, 4)
    assert control.best_length("self", [1], 1, 8, 0.0044) >= 3
    assert control.best_length("self", [1], 1, 8, 0.0130) == 0


def test_a_model_that_is_sure_is_tried_where_half_a_chance_would_not_pay() -> None:
    """Its worth is measured then."""
    found = []
    for control in (DraftControl(), DraftControl(frozenset({"self"}))):
        for num_tokens in (1, 2, 1, 3):
            control.step_time.observe(num_tokens, 0.1 + 0.005 * (num_tokens - 1), has_drafts=False)
        found.append(control.best_length("self", [1], 1, 4, 0.045))
    assert found[0] == 0 < found[1]
    for _ in range(20):
        control.learn(1, DraftKind("self", 0), 1, 0)
    assert control.best_length("self", [1], 1, 4, 0.045) == 0
