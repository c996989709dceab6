"""Masks: what a request allows is what is left of its row, and a matcher says the same however it came to where it is."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from scipy import stats

from services.compute.backends.backend import RowSearch
from services.compute.backends.torch.backend import TorchBackend
from services.compute.candidates import compiled as cache
from services.compute.candidates import matcher
from services.compute.candidates.constraints import Constraints, Masks
from services.compute.candidates.matcher import replay
from services.compute.candidates.reduction import edit, reduce
from services.compute.candidates.row_mask import allowed_tokens, apply_mask, apply_on_device, bits_of
from services.compute.sequence import Sequence
from shared import grammar
from shared.constraint import Constraint
from shared.errors import Invalid
from shared.grammar import Vocabulary, compile_grammar
from shared.sampling_params import ChainParams, DryParams, SamplingParams
from tests.grammars.generate import EOS, FILES, generate, make_constraints, tokenizer, vocabulary
from tests.waiting import wait_until

VOCAB = FILES.vocab_size
SEARCH = TorchBackend(torch.float32, torch.device("cpu")).row_search
SCHEMA = Constraint(
    "json_schema", json.dumps({"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}})
)
ANY = Constraint("regex", r"(.|\n)*")


def ids_of(mask: Any, size: int = VOCAB) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")[:size]).tolist())


def sequence_of(output: list[int], *, handle: int = 0, num_undecided: int = 0, eos: tuple[int, ...] = EOS, **params: Any) -> Sequence:
    return Sequence(handle, str(handle), [5, *output], 1, SamplingParams(**{"max_tokens": 100, **params}), eos, num_undecided_tokens=num_undecided)


def opened(constraints: Constraints, sequence: Sequence, constraint: Constraint) -> None:
    constraints.open(sequence, constraint)
    wait_until(lambda: [error for _, error in constraints.opened()] == [None], description="the grammar is compiled")


def masks_of(constraints: Constraints, *sequences: Sequence) -> Masks:
    masking = constraints.start(list(sequences))
    assert masking is not None
    return masking.result()


def expected(constraint: Constraint, output: list[int]) -> set[int]:
    """By a matcher of its own."""
    state = compile_grammar(constraint, vocabulary())
    assert state.consume_tokens(output)
    return ids_of(np.frombuffer(state.compute_bitmask(), np.uint8))


@pytest.mark.parametrize("size", [64, 130, 2048, 2049])
@pytest.mark.parametrize("apply_mask", [apply_mask, apply_on_device])
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
    grammar_ids=st.none() | TOKENS, accepts=st.booleans(), allowed=TOKENS, bad=st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=3), max_size=4),
    output=st.lists(st.integers(0, 8), max_size=5), min_tokens=st.integers(0, 6), ignore_eos=st.booleans(), has_stop=st.booleans(),
)  # fmt: skip
def test_what_is_allowed_is_what_the_rules_say(
    grammar_ids: set[int] | None, accepts: bool, allowed: set[int], bad: list[list[int]], output: list[int], min_tokens: int, ignore_eos: bool, has_stop: bool
) -> None:
    stops = (STOP,) if has_stop else ()
    params: dict[str, Any] = {"allowed_token_ids": tuple(allowed), "bad_words_token_ids": tuple(map(tuple, bad)), "stop_token_ids": stops}
    sequence = sequence_of(output, eos=(END,), min_tokens=min_tokens, ignore_eos=ignore_eos, **params)
    is_early = len(output) + 1 <= min_tokens
    completing = {word[-1] for word in bad if len(word) - 1 <= len(output) and output[len(output) - len(word) + 1 :] == word[:-1]}
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
        assert allowed_tokens(sequence, mask, 64) is None
        row = torch.zeros(64)
        edit(row, sequence, SEARCH)
        assert set(torch.isfinite(row).nonzero().flatten().tolist()) == left
    elif left:
        found = allowed_tokens(sequence, mask, 64)
        assert found is not None and ids_of(found, 64) == left
    else:
        with pytest.raises(Invalid, match="no token is left"):
            allowed_tokens(sequence, mask, 64)


@pytest.mark.parametrize("is_greedy", [False, True])
def test_draws_under_a_grammar_have_the_masked_distribution(search: RowSearch, is_greedy: bool) -> None:
    """Chi-square over 20,000 draws at 40 steps of 500 rows."""
    constraints = make_constraints()
    output = tokenizer().encode('[{"b": "').ids
    opened(constraints, sequence_of(output), SCHEMA)
    constraints.matchers = dict.fromkeys(range(500), constraints.matchers[0])
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    mask = masks_of(constraints, sequence_of(output)).by_handle[0]
    left = sorted(ids_of(mask))
    assert 200 < len(left) < VOCAB
    weights = np.zeros(VOCAB)
    weights[left] = np.exp(logits[left].double().numpy())
    wanted = weights / weights.sum() * 20_000
    counts = np.zeros(VOCAB, np.int64)
    for step in range(40):
        params = {"temperature": 0.0 if is_greedy else 1.0}
        sequences = [sequence_of(output, handle=handle, seed=step * 500 + handle, **params) for handle in range(500)]
        rows = reduce(logits.repeat(500, 1), sequences, search, Masks(dict.fromkeys(range(500), mask)))
        counts += np.bincount(rows.chosen, minlength=VOCAB)
    if is_greedy:
        assert counts[max(left, key=lambda token: float(logits[token]))] == 20_000
        return
    assert counts[wanted == 0].sum() == 0
    often = wanted >= 8
    observed, hoped = np.append(counts[often], counts[~often].sum()), np.append(wanted[often], wanted[~often].sum())
    assert stats.chisquare(observed, hoped * observed.sum() / hoped.sum()).pvalue > 1e-4


@pytest.mark.parametrize("chain", [None, ChainParams(typical_p=0.9), ChainParams(top_n_sigma=1.5, xtc_probability=1.0, xtc_threshold=0.01, dynatemp_range=0.5)])
def test_samplers_see_what_the_grammar_leaves(search: RowSearch, chain: ChainParams | None) -> None:
    """Llama.cpp's chain and DRY work on the masked row: as on one whose other logits are minus infinity from the beginning."""
    allowed = np.sort(np.random.default_rng(2).choice(np.arange(6, VOCAB), VOCAB // 4, replace=False))  # not the prompt's token
    logits = torch.randn((4, VOCAB), generator=torch.Generator().manual_seed(5)) * 2
    ban = torch.full((VOCAB,), -torch.inf)
    ban[torch.from_numpy(allowed)] = 0.0
    output = [int(allowed[0]), int(allowed[1]), int(allowed[2]), int(allowed[0]), int(allowed[1])]
    dry = DryParams(3.0, base=1.5, allowed_length=1)
    sequences = [sequence_of(output, handle=handle, seed=handle, dry=dry, chain=chain, logprobs=3, temperature=0.8) for handle in range(4)]
    masked = reduce(logits.clone(), sequences, search, Masks(dict.fromkeys(range(4), bits_of(allowed, VOCAB))))
    plain = reduce(logits + ban, sequences, search)
    assert not masked.failures
    for name in ("counts", "token_ids", "logits", "logsumexp", "kept_mass", "tail_token_ids", "tail_logits", "chosen", "temperatures"):
        assert np.array_equal(getattr(masked, name), getattr(plain, name)), name
    assert set(masked.chosen.tolist()) <= set(allowed.tolist())
    repeated = logits[:, torch.from_numpy(allowed)].double()
    repeated[:, 2] -= 3.0 * 1.5  # the third goes on with a repetition of two
    assert np.allclose(masked.logsumexp, torch.logsumexp(repeated, 1).numpy(), atol=1e-5)


def test_a_row_that_nothing_is_allowed_in_fails_beside_one_with_samplers(search: RowSearch) -> None:
    allowed = bits_of(np.array([7, 9]), VOCAB)
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(6))
    chain = ChainParams(typical_p=0.5)
    sequences = [sequence_of([], handle=0, chain=chain), sequence_of([], handle=1, chain=chain, allowed_token_ids=(8,)), sequence_of([], handle=2)]
    rows = reduce(logits, sequences, search, Masks(dict.fromkeys(range(3), allowed)))
    assert rows.handles.tolist() == [0, 2] and set(rows.chosen.tolist()) <= {7, 9}
    assert {handle: (failure.status, failure.code) for handle, failure in rows.failures.items()} == {1: (400, "nothing_allowed")}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_masks_follow_the_tokens_however_they_come(data: st.DataObject) -> None:
    """Foreseen, confirmed, taken back and replaced: the mask is always that of a matcher which has seen just these tokens."""
    constraints, sequence = make_constraints(), sequence_of([])
    opened(constraints, sequence, SCHEMA)
    for _ in range(data.draw(st.integers(5, 25))):
        move = data.draw(st.sampled_from(["foresee", "foresee", "foresee", "confirm", "truncate", "ask"]))
        output = sequence.token_ids[1:]
        if move == "foresee":
            choices = sorted(expected(SCHEMA, output) - set(EOS))
            if choices:
                sequence.token_ids.append(data.draw(st.sampled_from(choices)))
                sequence.num_undecided_tokens += 1
        elif move == "confirm" and sequence.num_undecided_tokens:
            sequence.num_undecided_tokens -= 1
        elif move == "truncate" and sequence.num_undecided_tokens:
            sequence.drop_tokens(data.draw(st.integers(sequence.num_decided_tokens, sequence.num_tokens - 1)))
        elif move == "ask":
            masks = masks_of(constraints, sequence)
            assert not masks.failures and ids_of(masks.by_handle[0]) == expected(SCHEMA, output)
    output = sequence.token_ids[1:]
    assert ids_of(masks_of(constraints, sequence).by_handle[0]) == expected(SCHEMA, output)
    successor = make_constraints()  # at another replica
    opened(successor, sequence, SCHEMA)
    assert ids_of(masks_of(successor, sequence).by_handle[0]) == expected(SCHEMA, output)


def test_what_one_sequence_wears_out_others_still_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers of one text share the library's lexer, which has limits; a sequence's own fate is what it would be alone."""
    monkeypatch.setattr(grammar, "limits_of", lambda _: LLParserLimits(max_lexer_states=600, verbose_errors=False))
    replayed: list[int] = []

    def counted(constraint: Constraint, known: Vocabulary, output: list[int]) -> LLMatcher:
        replayed.append(len(output))
        return replay(constraint, known, output)

    monkeypatch.setattr(matcher, "replay", counted)
    wide = Constraint("regex", r"(.*a.{14}b.*)|(.*c.{13}d)")
    rng, constraints = np.random.default_rng(1), make_constraints()
    letters = [tokenizer().token_to_id(letter) for letter in "abcdxyz"]
    first = sequence_of([])
    opened(constraints, first, wide)
    for _ in range(60):
        first.token_ids.append(int(rng.choice(letters)))
        assert ids_of(masks_of(constraints, first).by_handle[0]) == expected(wide, first.token_ids[1:])
    assert 0 < len(replayed) < 30
    second = sequence_of(letters[:2], handle=1)
    opened(constraints, second, wide)
    assert ids_of(masks_of(constraints, second).by_handle[1]) == expected(wide, letters[:2])


def test_a_grammar_that_becomes_too_complex_fails_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "limits_of", lambda _: LLParserLimits(max_lexer_states=16, verbose_errors=False))
    constraints, later = make_constraints(), Constraint("regex", r"x{5}(.*a.{14}b.*)", param="guided_regex")
    sequences = [sequence_of(tokenizer().encode("x").ids * count, handle=count) for count in (1, 5)]
    for sequence in sequences:
        opened(constraints, sequence, later)
    masks = masks_of(constraints, *sequences)
    assert list(masks.by_handle) == [1] and list(masks.failures) == [5]
    failure = masks.failures[5]
    assert (failure.status, failure.param, failure.code) == (400, "guided_regex", "constraint_failed") and "too complex" in failure.message


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
