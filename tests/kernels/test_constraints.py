"""Masks: what a request allows is what is left of its row, and a matcher says the same however it
came to where it is.
"""

import json
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from scipy import stats

from services.compute.backends.backend import RowSearch
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.torch.row_search import ban, ban_on_device
from services.compute.candidates import compiled as cache
from services.compute.candidates import constraints as module
from services.compute.candidates import matcher
from services.compute.candidates.constraints import Constraints, Masks
from services.compute.candidates.edits import apply_edits, edits_of
from services.compute.candidates.matcher import replay
from services.compute.candidates.reduction import reduce
from services.compute.candidates.row_mask import allowed_tokens, bits_of
from services.compute.sequence import Prefix, Request, RowKey, Sequence, Tokens
from shared.model import grammar
from shared.model.constraint import Constraint
from shared.model.files import DEMO_MODEL
from shared.model.grammar import Vocabulary, check_grammar, compile_grammar
from shared.model.sampling_params import ChainParams, DryParams, SamplingParams
from shared.process.errors import Invalid
from shared.wire.messages import RequestError
from tests.examples import examples
from tests.grammars.generate import EOS, FILES, generate, make_constraints, tokenizer, vocabulary
from tests.waiting import wait_until

VOCAB = FILES.vocab_size
SEARCH = TorchBackend(torch.float32, torch.device("cpu")).row_search
SCHEMA = Constraint(
    "json_schema",
    json.dumps(
        {
            "type": "array",
            "items": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        }
    ),
)
ANY = Constraint("regex", r"(.|\n)*")


def ids_of(mask: Any, size: int = VOCAB) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")[:size]).tolist())


def sequence_of(
    output: list[int], *, handle: int = 0, num_undecided: int = 0, eos: tuple[int, ...] = EOS, **params: Any
) -> Sequence:
    return Sequence(
        Request(handle, str(handle), SamplingParams(**{"max_tokens": 100, **params}), eos),
        Tokens([5, *output], 1, num_undecided=num_undecided),
    )


def opened(constraints: Constraints, sequence: Sequence, constraint: Constraint) -> None:
    constraints.open(sequence, constraint)
    wait_until(lambda: [error for _, error in constraints.opened()] == [None], description="the grammar is compiled")


def masks_of(constraints: Constraints, *sequences: Sequence) -> Masks:
    masking = constraints.start([sequence.prefix() for sequence in sequences])
    assert masking is not None
    return masking.result()


def mask_of(constraints: Constraints, sequence: Sequence) -> Any:
    return masks_of(constraints, sequence).by_row[sequence.prefix().key]


def expected(constraint: Constraint, output: list[int]) -> set[int]:
    """Ids that a matcher of its own allows."""
    state = compile_grammar(constraint, vocabulary())
    assert state.consume_tokens(output)
    return ids_of(np.frombuffer(state.compute_bitmask(), np.uint8))


@pytest.mark.parametrize("size", [64, 130, 2048, 2049])
@pytest.mark.parametrize("apply_mask", [lambda row, mask: ban(row[None], np.zeros(1, np.int64), [mask]), ban_on_device])
def test_a_mask_leaves_what_it_has_and_nothing_else(size: int, apply_mask: Any) -> None:
    rng = np.random.default_rng(size)
    chosen = np.sort(rng.choice(size, size // 3, replace=False))
    row = torch.from_numpy(rng.normal(size=size).astype(np.float32))
    before = row.clone()
    apply_mask(row, bits_of(chosen, size))
    others = np.setdiff1d(np.arange(size), chosen)
    assert torch.equal(row[chosen], before[chosen]) and (row[others] == -torch.inf).all()
    row[others[0]] = torch.nan
    apply_mask(row, bits_of(chosen, size))
    assert row[others[0]].isnan()


TOKENS = st.sets(st.integers(2, 63), max_size=20)
END, STOP = 1, 2


@given(
    grammar_ids=st.none() | TOKENS,
    accepts=st.booleans(),
    allowed=TOKENS,
    bad=st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=3), max_size=4),
    output=st.lists(st.integers(0, 8), max_size=5),
    min_tokens=st.integers(0, 6),
    ignore_eos=st.booleans(),
    has_stop=st.booleans(),
)
def test_what_is_allowed_is_what_the_rules_say(
    grammar_ids: set[int] | None,
    accepts: bool,
    allowed: set[int],
    bad: list[list[int]],
    output: list[int],
    min_tokens: int,
    ignore_eos: bool,
    has_stop: bool,
) -> None:
    stops = (STOP,) if has_stop else ()
    params: dict[str, Any] = {
        "allowed_token_ids": tuple(allowed),
        "bad_words_token_ids": tuple(map(tuple, bad)),
        "stop_token_ids": stops,
    }
    sequence = sequence_of(output, eos=(END,), min_tokens=min_tokens, ignore_eos=ignore_eos, **params)
    is_early = len(output) + 1 <= min_tokens
    completing = {
        word[-1] for word in bad if len(word) - 1 <= len(output) and output[len(output) - len(word) + 1 :] == word[:-1]
    }
    everything = set(range(64))
    if grammar_ids is None:
        left = everything - ({END, *stops} if is_early else set())
        mask = None
    else:
        left = grammar_ids | ({END, *stops} if accepts else set())
        if accepts and (is_early or ignore_eos) and left - {END, *stops}:
            left -= {END, *stops}
        mask = bits_of(np.array(sorted(grammar_ids | ({END} if accepts else set())), np.int64), 64)
    left -= completing
    left &= allowed or everything
    if grammar_ids is None and not allowed:
        assert allowed_tokens(sequence.prefix(), mask, 64) is None
        row = torch.zeros(64)
        apply_edits(row[None], {0: edits_of(sequence.prefix(), None, 64)}, SEARCH)
        assert set(torch.isfinite(row).nonzero().flatten().tolist()) == left
    elif left:
        found = allowed_tokens(sequence.prefix(), mask, 64)
        assert found is not None and ids_of(found, 64) == left
    else:
        with pytest.raises(Invalid, match="no token is left"):
            allowed_tokens(sequence.prefix(), mask, 64)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_greedy", [False, True])
def test_draws_under_a_grammar_have_the_masked_distribution(search: RowSearch, is_greedy: bool) -> None:
    """Chi-square over 20,000 draws at 40 steps of 500 rows."""
    constraints = make_constraints()
    output = tokenizer().encode('[{"b": "').ids
    opened(constraints, sequence_of(output), SCHEMA)
    constraints.matchers = dict.fromkeys(range(500), constraints.matchers[0])
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    mask = mask_of(constraints, sequence_of(output))
    left = sorted(ids_of(mask))
    assert 200 < len(left) < VOCAB
    weights = np.zeros(VOCAB)
    weights[left] = np.exp(logits[left].double().numpy())
    wanted = weights / weights.sum() * 20_000
    counts = np.zeros(VOCAB, np.int64)
    for step in range(40):
        params = {"temperature": 0.0 if is_greedy else 1.0}
        sequences = [sequence_of(output, handle=handle, seed=step * 500 + handle, **params) for handle in range(500)]
        rows = reduce(
            logits.repeat(500, 1), sequences, search, Masks({sequence.prefix().key: mask for sequence in sequences})
        )
        counts += np.bincount(rows.chosen, minlength=VOCAB)
    if is_greedy:
        assert counts[max(left, key=lambda token: float(logits[token]))] == 20_000
        return
    assert counts[wanted == 0].sum() == 0
    often = wanted >= 8
    observed, hoped = np.append(counts[often], counts[~often].sum()), np.append(wanted[often], wanted[~often].sum())
    assert stats.chisquare(observed, hoped * observed.sum() / hoped.sum()).pvalue > 1e-4


@pytest.mark.parametrize(
    "chain",
    [
        None,
        ChainParams(typical_p=0.9),
        ChainParams(top_n_sigma=1.5, xtc_probability=1.0, xtc_threshold=0.01, dynatemp_range=0.5),
    ],
)
def test_samplers_see_what_the_grammar_leaves(search: RowSearch, chain: ChainParams | None) -> None:
    """Llama.cpp's chain and DRY work on the masked row: as on one whose other logits are minus
    infinity from the beginning.
    """
    allowed = np.sort(
        np.random.default_rng(2).choice(np.arange(6, VOCAB), VOCAB // 4, replace=False)
    )  # not the prompt's token
    logits = torch.randn((4, VOCAB), generator=torch.Generator().manual_seed(5)) * 2
    ban = torch.full((VOCAB,), -torch.inf)
    ban[torch.from_numpy(allowed)] = 0.0
    output = [int(allowed[0]), int(allowed[1]), int(allowed[2]), int(allowed[0]), int(allowed[1])]
    dry = DryParams(3.0, base=1.5, allowed_length=1)
    sequences = [
        sequence_of(output, handle=handle, seed=handle, dry=dry, chain=chain, logprobs=3, temperature=0.8)
        for handle in range(4)
    ]
    masked = reduce(
        logits.clone(),
        sequences,
        search,
        Masks({sequence.prefix().key: bits_of(allowed, VOCAB) for sequence in sequences}),
    )
    plain = reduce(logits + ban, sequences, search)
    assert not masked.failures
    for name in (
        "counts",
        "token_ids",
        "logits",
        "logsumexp",
        "num_kept",
        "tail_mass",
        "tail_token_ids",
        "tail_logits",
        "chosen",
        "temperatures",
    ):
        assert np.array_equal(getattr(masked, name), getattr(plain, name)), name
    assert set(masked.chosen.tolist()) <= set(allowed.tolist())
    repeated = logits[:, torch.from_numpy(allowed)].double()
    repeated[:, 2] -= 3.0 * 1.5  # the third goes on with a repetition of two
    assert np.allclose(masked.logsumexp, torch.logsumexp(repeated, 1).numpy(), atol=1e-5)


def test_a_row_that_nothing_is_allowed_in_fails_beside_one_with_samplers(search: RowSearch) -> None:
    allowed = bits_of(np.array([7, 9]), VOCAB)
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(6))
    chain = ChainParams(typical_p=0.5)
    sequences = [
        sequence_of([], handle=0, chain=chain),
        sequence_of([], handle=1, chain=chain, allowed_token_ids=(8,)),
        sequence_of([], handle=2),
    ]
    rows = reduce(logits, sequences, search, Masks({sequence.prefix().key: allowed for sequence in sequences}))
    assert rows.handles.tolist() == [0, 2] and set(rows.chosen.tolist()) <= {7, 9}
    assert {key: (failure.status, failure.code) for key, failure in rows.failures.items()} == {
        (1, 1): (400, "nothing_allowed")
    }


def check_masks(constraints: Constraints, prefixes: list[Prefix]) -> None:
    """The masks of several tokens of one sequence are filled together."""
    masking = constraints.start(prefixes)
    assert masking is not None
    masks = masking.result()
    assert not masks.failures and not masks.late and list(masks.by_row) == [prefix.key for prefix in prefixes]
    for prefix in prefixes:
        assert ids_of(masks.by_row[prefix.key]) == expected(SCHEMA, prefix.sequence.tokens.ids[1 : prefix.num_tokens])


@examples(40)
@given(data=st.data())
def test_masks_follow_the_tokens_however_they_come(data: st.DataObject) -> None:
    """Foreseen, confirmed, taken back and replaced: the mask is always that of a matcher which has
    seen just these tokens.
    """
    constraints, sequence = make_constraints(), sequence_of([])
    opened(constraints, sequence, SCHEMA)
    for _ in range(data.draw(st.integers(5, 25))):
        move = data.draw(st.sampled_from(["foresee", "foresee", "foresee", "confirm", "truncate", "ask"]))
        output = sequence.tokens.ids[1:]
        if move == "foresee":
            choices = sorted(expected(SCHEMA, output) - set(EOS))
            if choices:
                sequence.tokens.foresee(data.draw(st.sampled_from(choices)))
        elif move == "confirm" and sequence.tokens.num_undecided:
            sequence.tokens.confirm()
        elif move == "truncate" and sequence.tokens.num_undecided:
            sequence.tokens.truncate(data.draw(st.integers(sequence.tokens.num_decided, len(sequence.tokens) - 1)))
        elif move == "ask":
            first = data.draw(st.integers(sequence.tokens.num_decided, len(sequence.tokens)))
            check_masks(
                constraints, [Prefix(sequence, num_tokens) for num_tokens in range(first, len(sequence.tokens) + 1)]
            )
    output = sequence.tokens.ids[1:]
    assert ids_of(mask_of(constraints, sequence)) == expected(SCHEMA, output)
    successor = make_constraints()  # at another replica
    opened(successor, sequence, SCHEMA)
    assert ids_of(mask_of(successor, sequence)) == expected(SCHEMA, output)


def worn_out_soon(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the library's lexer few states. Returns the list that gets the length of each output that is replayed."""
    monkeypatch.setattr(grammar, "limits_of", lambda _: LLParserLimits(max_lexer_states=600, verbose_errors=False))
    replayed: list[int] = []

    def counted(constraint: Constraint, known: Vocabulary, output: list[int]) -> LLMatcher:
        replayed.append(len(output))
        return replay(constraint, known, output)

    monkeypatch.setattr(matcher, "replay", counted)
    return replayed


def test_what_one_sequence_wears_out_others_still_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers of one text share the library's lexer, which has limits; a sequence's own fate is
    what it would be alone.
    """
    replayed, wide = worn_out_soon(monkeypatch), Constraint("regex", r"(.*a.{14}b.*)|(.*c.{13}d)")
    rng, constraints = np.random.default_rng(1), make_constraints()
    letters = [tokenizer().token_to_id(letter) for letter in "abcdxyz"]
    first = sequence_of([])
    opened(constraints, first, wide)
    for _ in range(60):
        first.tokens.append(int(rng.choice(letters)))
        assert ids_of(mask_of(constraints, first)) == expected(wide, first.tokens.ids[1:])
    assert 0 < len(replayed) < 30
    second = sequence_of(letters[:2], handle=1)
    opened(constraints, second, wide)
    assert ids_of(mask_of(constraints, second)) == expected(wide, letters[:2])


@pytest.mark.parametrize("compiling_s", [0.0, 1.0])
def test_masks_of_several_tokens_outlive_what_is_worn_out(monkeypatch: pytest.MonkeyPatch, compiling_s: float) -> None:
    """The matcher is made again in the middle of them; where its grammar took long, in the slow lane."""
    replayed, wide = worn_out_soon(monkeypatch), Constraint("regex", r"(.*a.{14}b.*)|(.*c.{13}d)")
    rng, constraints = np.random.default_rng(1), make_constraints()
    letters = [tokenizer().token_to_id(letter) for letter in "abcdxyz"]
    sequence = sequence_of([int(rng.choice(letters)) for _ in range(70)])
    opened(constraints, Sequence(sequence.request, Tokens(sequence.tokens.ids[:1])), wide)
    constraints.matchers[0].sequence = sequence
    constraints.matchers[0].grammar.seconds = compiling_s
    for first in (1, 11, 31, 36, 51, 61):
        masking = constraints.start([Prefix(sequence, num_tokens) for num_tokens in range(first, first + 10)])
        assert masking is not None
        masks = masking.result()
        assert not masks.failures and not masks.late
        for key, mask in masks.by_row.items():
            assert ids_of(mask) == expected(wide, sequence.tokens.ids[1 : key.position])
    assert replayed


def test_a_grammar_that_becomes_too_complex_fails_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "limits_of", lambda _: LLParserLimits(max_lexer_states=16, verbose_errors=False))
    constraints, later = make_constraints(), Constraint("regex", r"x{5}(.*a.{14}b.*)", param="guided_regex")
    sequences = [sequence_of(tokenizer().encode("x").ids * count, handle=count) for count in (1, 5)]
    for sequence in sequences:
        opened(constraints, sequence, later)
    masks = masks_of(constraints, *sequences)
    assert list(masks.by_row) == [(1, 2)] and list(masks.failures) == [(5, 6)]
    failure = masks.failures[RowKey(5, 6)]
    assert (failure.status, failure.param, failure.code) == (
        400,
        "guided_regex",
        "constraint_failed",
    ) and "too complex" in failure.message


def test_one_text_is_compiled_once_and_the_texts_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def counted(constraint: Constraint, known: Vocabulary) -> LLMatcher:
        compiled.append(constraint.text)
        return compile_grammar(constraint, known)

    monkeypatch.setattr(cache, "compile_grammar", counted)
    monkeypatch.setattr(cache, "MAX_KEPT", 2)
    constraints = make_constraints()
    for handle, text in enumerate(["a+", "b+", "a+", "c+", "a+", "b+"]):
        opened(constraints, sequence_of([], handle=handle), Constraint("regex", text))
        constraints.forget(handle)
    assert compiled == ["a+", "b+", "c+", "b+"]
    assert not constraints.matchers and not constraints.opening


def test_a_tokenizer_that_can_not_be_read_is_read_again_and_no_client_sees_its_path(tmp_path: Path) -> None:
    constraints = Constraints(partial(grammar.load_vocabulary, tmp_path, VOCAB, EOS), VOCAB)

    def error() -> RequestError | None:
        constraints.open(sequence_of([], handle=1), Constraint("regex", "a+"))
        [(_, found)] = wait_until(constraints.opened, description="it is compiled, or not")
        constraints.forget(1)
        return found

    missing = error()
    assert missing is not None and (missing.code, missing.status) == ("tokenizer_unreadable", 503)
    assert str(tmp_path) not in missing.message
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    assert error() is None


def test_a_log_that_breaks_its_constraint_is_an_error_of_its_request() -> None:
    constraints, sequence = make_constraints(), sequence_of(tokenizer().encode("never").ids)
    constraints.open(sequence, SCHEMA)
    [(_, error)] = wait_until(constraints.opened, description="it is compiled")
    assert error is not None and error.code == "constraint_failed"


def test_an_answer_is_the_same_alone_and_among_others() -> None:
    asked = [SCHEMA, None, Constraint("choice", '["a", "abc", "xyz"]'), SCHEMA, ANY, None]
    together = generate(asked, temperature=1.2, seed=11, max_tokens=60)
    for number, constraint in enumerate(asked):
        assert generate([constraint], temperature=1.2, seed=11 + number, max_tokens=60) == [together[number]]


def test_a_grammar_that_allows_everything_changes_nothing() -> None:
    """Special tokens apart, which no text spells."""
    for temperature in (0.0, 0.8):
        [free], [held] = (generate([each], temperature=temperature, seed=2, max_tokens=60) for each in (None, ANY))
        assert held.token_ids == free.token_ids


class Held:
    """A state that fills no mask until it may, and then the one of another."""

    def __init__(self, state: LLMatcher) -> None:
        self.state = state
        self.may_go_on = threading.Event()

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        assert self.may_go_on.wait(60)
        self.state.unsafe_compute_mask_ptr(address, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)


class Broken:
    """A state that the library gives up on."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name}: the library is broken")


def test_a_row_whose_mask_is_late_sits_out_and_the_others_go_on() -> None:
    constraints = make_constraints()
    letters = [tokenizer().token_to_id(letter) for letter in "ab"]
    slow, other = sequence_of([], handle=1), sequence_of([], handle=2)
    for sequence in (slow, other):
        opened(constraints, sequence, ANY)
    held = Held(constraints.matchers[1].state)
    constraints.matchers[1].state = cast(LLMatcher, held)
    masking = constraints.start([slow.prefix()])
    assert masking is not None and masking.result(0.0).late == {(1, 1)}
    constraints.hold_back([1])
    for letter in letters:  # nobody waits for it
        other.tokens.append(letter)
        assert constraints.sitting_out() == {1}
        assert ids_of(mask_of(constraints, other)) == expected(ANY, other.tokens.ids[1:])
    held.may_go_on.set()
    wait_until(lambda: not constraints.sitting_out(), description="its mask is there")
    assert ids_of(mask_of(constraints, slow)) == expected(ANY, [])


def test_a_row_whose_masks_take_long_has_them_filled_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "SLOW_S", -1.0)
    constraints, sequence = make_constraints(), sequence_of([])
    opened(constraints, sequence, SCHEMA)
    masks_of(constraints, sequence)
    constraints.hold_back([0])
    for letter in tokenizer().encode('[{"a"').ids:
        sequence.tokens.append(letter)
        assert constraints.sitting_out() == {0}
        wait_until(lambda: not constraints.sitting_out(), description="its mask is there")
        masking = constraints.start([sequence.prefix()])
        assert masking is not None and masking.filling is None
        assert ids_of(masking.result(0.0).by_row[sequence.prefix().key]) == expected(SCHEMA, sequence.tokens.ids[1:])


def test_a_row_that_was_late_may_have_its_masks_filled_before_it_runs_for_life() -> None:
    """However fast some of them are."""
    constraints, sequence = make_constraints(), sequence_of([])
    opened(constraints, sequence, SCHEMA)
    masks_of(constraints, sequence)
    constraints.hold_back([0], for_life=True)
    for letter in tokenizer().encode('[{"a"').ids:
        sequence.tokens.append(letter)
        constraints.matchers[0].seconds = 0.0
        assert constraints.sitting_out() == {0}
        wait_until(lambda: not constraints.sitting_out(), description="its mask is there")


def test_whatever_goes_wrong_with_a_matcher_is_its_row_s_alone() -> None:
    constraints = make_constraints()
    sequences = [sequence_of([], handle=handle) for handle in range(3)]
    for sequence in sequences:
        opened(constraints, sequence, ANY)
    masks_of(constraints, *sequences)
    constraints.matchers[1].state = cast(LLMatcher, Broken())
    for sequence in sequences:
        sequence.tokens.append(tokenizer().token_to_id("a"))
    masks = masks_of(constraints, *sequences)
    assert sorted(masks.by_row) == [(0, 2), (2, 2)] and list(masks.failures) == [(1, 2)]
    assert "is broken" in masks.failures[RowKey(1, 2)].message


@pytest.mark.parametrize("text", ["(a{1000}){1000}", "a{1000000}", "((a{100}){100}){20}", "(a{1,1000}b{1,1000}){1000}"])
def test_a_short_text_is_little_work(text: str) -> None:
    """Processor time, so that a busy machine changes nothing: without a bound some take a second and 200 MB."""
    began = time.thread_time()
    state = compile_grammar(Constraint("regex", text), vocabulary())
    letter: int = tokenizer().encode("a").ids[0]
    for _ in range(3):
        state.consume_tokens([letter])
        state.compute_bitmask()
    assert time.thread_time() - began < 0.25


@pytest.mark.parametrize("kind", ["regex", "lark", "json_schema"])
def test_a_repetition_that_costs_too_much_is_refused_before_anything_runs(kind: Any) -> None:
    pattern = "(a{1000}){1000}"
    text = {
        "regex": pattern,
        "lark": f"start: X\nX: /{pattern}/\n",
        "json_schema": json.dumps({"type": "string", "pattern": f"^{pattern}$"}),
    }[kind]
    with pytest.raises(Invalid, match="too many expressions"):
        check_grammar(Constraint(kind, text))


def test_large_grammars_that_people_write_still_pass() -> None:
    names = [f"property_{number}" for number in range(600)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "pattern": "^[a-z]{1,40}$", "maxLength": 200} for name in names},
    }
    for constraint in (
        Constraint("json_schema", json.dumps(schema)),
        Constraint("json_schema", json.dumps({"enum": [f"value number {number}" for number in range(8000)]})),
        Constraint("choice", json.dumps([f"choice {number}" for number in range(16_000)])),
        Constraint("json_schema", json.dumps({"type": "string", "maxLength": 100_000})),
        Constraint("lark", 'start: <|im_start|> "a"\n'),
    ):
        check_grammar(constraint)


def test_what_is_kept_of_grammars_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = make_constraints()
    for handle in range(6):
        opened(constraints, sequence_of([], handle=handle), Constraint("regex", f"a{{{handle + 1}}}"))
        constraints.matchers[handle].grammar.seconds = 0.03  # 11.5 MiB
    for handle in range(6):
        constraints.forget(handle)
    assert len(constraints.grammars.kept) == 6
    monkeypatch.setattr(cache, "MAX_KEPT_BYTES", 40 << 20)
    opened(constraints, sequence_of([], handle=9), Constraint("regex", "b+"))
    assert len(constraints.grammars.kept) == 4
    constraints.matchers[9].grammar.seconds = 0.1  # it has grown
    constraints.forget(9)
    assert all(each.text != "b+" for each in constraints.grammars.kept)


def test_a_grammar_that_failed_its_row_is_not_kept() -> None:
    constraints, sequence = make_constraints(), sequence_of([])
    opened(constraints, sequence, ANY)
    assert len(constraints.grammars.kept) == 1
    constraints.matchers[0].state = cast(LLMatcher, Broken())
    assert masks_of(constraints, sequence).failures
    constraints.forget(0)
    assert not constraints.grammars.kept


def test_an_answer_that_takes_many_slices_to_replay_is_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "REPLAY_TOKENS", 2)
    constraints, sequence = make_constraints(), sequence_of(tokenizer().encode('[{"a": 12, "b": "x').ids)
    monkeypatch.setattr(module, "REPLAY_SLICE_S", 1e-9)
    opened(constraints, sequence, SCHEMA)
    assert ids_of(mask_of(constraints, sequence)) == expected(SCHEMA, sequence.tokens.ids[1:])
