"""Tokens against a model: a list of what is decided, and a list of what is not, each with its kind."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.compute.sequence import PENDING, Tokens
from tests.examples import examples
from tests.unit.sequences import counted

TOKEN = st.integers(0, 5)


class Reference:
    """Tokens, as plain lists: `undecided` holds pairs of a token and its kind."""

    def __init__(self, prompt: list[int]) -> None:
        self.decided, self.undecided, self.is_ending = prompt, list[tuple[int, str]](), False

    @property
    def ids(self) -> list[int]:
        return [*self.decided, *(token_id for token_id, _ in self.undecided)]

    def count(self, kind: str) -> int:
        return sum(own == kind for _, own in self.undecided)

    def append(self, token_id: int) -> None:
        self.decided.append(token_id)

    def add(self, kind: str, token_ids: list[int]) -> None:
        self.undecided += [(token_id, kind) for token_id in token_ids]

    def settle(self, token_id: int, num_standing: int) -> None:
        open_drafts = [token for token, kind in self.undecided if kind == "draft"]
        self.is_ending &= num_standing == len(open_drafts)
        self.undecided = [each for each in self.undecided if each[1] not in ("draft", "pending")]
        self.add("true draft", open_drafts[:num_standing])
        self.add("foreseen", [token_id])

    def confirm(self) -> None:
        self.decided.append(self.undecided.pop(0)[0])
        self.is_ending &= bool(self.undecided)

    def truncate(self, num_tokens: int) -> None:
        del self.undecided[num_tokens - len(self.decided) :]
        self.is_ending = False


class TokensMachine(RuleBasedStateMachine):
    tokens: Tokens
    reference: Reference

    @initialize(prompt=st.lists(TOKEN, min_size=1, max_size=90), num_output=st.integers(0, 9))
    def start(self, prompt: list[int], num_output: int) -> None:
        self.tokens = Tokens([*prompt, *range(num_output)], len(prompt))
        self.reference = Reference([*prompt, *range(num_output)])

    @rule(token_id=TOKEN)
    @precondition(lambda self: not self.reference.undecided)
    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.reference.append(token_id)

    @rule(token_ids=st.lists(TOKEN, min_size=1, max_size=4))
    @precondition(lambda self: not self.reference.count("pending"))
    def draft(self, token_ids: list[int]) -> None:
        self.tokens.draft(token_ids)
        self.reference.add("draft", token_ids)

    @rule()
    @precondition(lambda self: not self.reference.count("pending"))
    def launch(self) -> None:
        self.tokens.foresee()
        self.reference.add("pending", [PENDING])

    @rule(token_id=TOKEN)
    @precondition(lambda self: not self.reference.count("pending") and not self.reference.count("draft"))
    def foresee(self, token_id: int) -> None:
        self.tokens.foresee(token_id)
        self.reference.add("foreseen", [token_id])

    @rule(token_id=TOKEN, data=st.data())
    @precondition(lambda self: self.reference.count("pending"))
    def settle(self, token_id: int, data: st.DataObject) -> None:
        num_standing = data.draw(st.integers(0, self.reference.count("draft")))
        self.tokens.settle(token_id, num_standing=num_standing)
        self.reference.settle(token_id, num_standing)

    @rule()
    def end(self) -> None:
        self.tokens.end()
        self.reference.is_ending = True

    @rule()
    @precondition(
        lambda self: self.reference.undecided and self.reference.undecided[0][1] in ("foreseen", "true draft")
    )
    def confirm(self) -> None:
        self.tokens.confirm()
        self.reference.confirm()

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        num_tokens = data.draw(st.integers(len(self.reference.decided), len(self.reference.ids)))
        self.tokens.truncate(num_tokens)
        self.reference.truncate(num_tokens)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        """Counts and history are kept from one question to the next, whatever came between."""
        num_tokens, num_prompt = data.draw(st.integers(1, len(self.reference.ids))), self.tokens.num_prompt
        known = self.reference.ids[:num_tokens]
        assert counted(self.tokens.seen_counts(num_tokens)) == Counter(each for each in known if each != PENDING)
        assert counted(self.tokens.output_counts(num_tokens)) == Counter(
            each for each in known[num_prompt:] if each != PENDING
        )
        assert self.tokens.history(num_tokens).tolist() == known

    @invariant()
    def agrees_with_the_reference(self) -> None:
        if hasattr(self, "tokens"):
            tokens, reference = self.tokens, self.reference
            assert tokens.ids == reference.ids and len(tokens) == len(reference.ids)
            assert (tokens.num_decided, tokens.num_undecided) == (len(reference.decided), len(reference.undecided))
            assert tokens.num_output == len(reference.ids) - tokens.num_prompt
            assert tokens.num_drafts == reference.count("draft")
            assert tokens.num_undecided_steps == len(reference.undecided) - reference.count("true draft")
            assert tokens.is_pending == bool(reference.count("pending"))
            assert tokens.is_ending == reference.is_ending
            places = [
                place for place, (_, kind) in enumerate(reference.undecided, tokens.num_decided) if kind == "true draft"
            ]
            assert list(tokens.foreseen_drafts) == places


TestTokens = TokensMachine.TestCase
TestTokens.settings = examples(60, stateful_step_count=40)


def test_a_verb_out_of_turn_is_an_error() -> None:
    tokens = Tokens([1, 2])
    tokens.foresee()
    with pytest.raises(AssertionError):
        tokens.foresee()
    with pytest.raises(AssertionError):
        tokens.draft([1])
    with pytest.raises(AssertionError):
        tokens.append(1)
    with pytest.raises(AssertionError):
        tokens.confirm()
    with pytest.raises(AssertionError):
        tokens.settle(3, num_standing=1)
    with pytest.raises(AssertionError):
        tokens.truncate(1)
    assert tokens.ids == [1, 2, PENDING]
