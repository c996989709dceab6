"""The grammars of the sequences that run: compiled beside the loop, kept at each sequence's last token, and asked for masks while the model computes.

A matcher's state is a function of its sequence's output tokens, decided and foreseen, and of nothing else. So it is made anew wherever the tokens are (after
a crash, at another replica), goes forward with them, and back where foreseen ones are taken back.

Matchers of one text share what the library has worked out of it. Should that outgrow its limits, through whoever, a sequence gets a matcher of its own: what
ends in an error depends on the sequence's own tokens.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from llguidance import LLMatcher

from services.compute.candidates.failures import error_of
from services.compute.candidates.row_mask import num_bytes
from services.compute.sequence import Array, Sequence
from shared.constraint import Constraint
from shared.errors import Invalid
from shared.grammar import Vocabulary, compile_grammar
from shared.messages import RequestError

MAX_COMPILED = 256  # grammars that are kept for those that come with the same text
MAX_COMPILED_TEXT = 8 << 20  # characters, of all of them
NUM_COMPILERS = 2


@dataclass(slots=True)
class Matcher:
    """A sequence's place in its grammar."""

    constraint: Constraint
    state: LLMatcher
    token_ids: list[int] = field(default_factory=list)  # of the output, that the state has taken in
    num_decided: int = 0  # of those, that will not be taken back


@dataclass(frozen=True, slots=True)
class Masks:
    """What the grammars of one step's sequences allow."""

    by_handle: dict[int, Array] = field(default_factory=dict)  # [num_bytes(vocab_size)] uint8 each
    failures: dict[int, RequestError] = field(default_factory=dict)  # whose grammars can't say it, and why


@dataclass(frozen=True, slots=True)
class Turn:
    """How a matcher comes to its sequence's last token."""

    handle: int
    matcher: Matcher
    num_taken_back: int
    new_token_ids: list[int]


class Constraints:
    """Its methods belong to the loop; what they start runs in threads."""

    def __init__(self, load: Callable[[], Vocabulary], vocab_size: int) -> None:
        """load: called once, in a thread, when the first constraint comes."""
        self.vocab_size = vocab_size
        self.matchers: dict[int, Matcher] = {}  # by handle
        self.opening: dict[int, tuple[Sequence, Future[Matcher]]] = {}  # by handle: sequences that wait for their grammars
        self._load = load
        self._vocabulary: Future[Vocabulary] | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()  # at their beginnings, the last used last
        self._num_characters = 0
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, "compile-grammar")
        self._masker = ThreadPoolExecutor(1, "mask")

    def open(self, sequence: Sequence, constraint: Constraint) -> None:
        """Have the sequence's grammar compiled; `opened` says when it is there."""
        if self._vocabulary is None:
            self._vocabulary = self._compilers.submit(self._load)
        known = self._compiled.get(key_of(constraint))
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        self.opening[sequence.handle] = (sequence, self._compilers.submit(open_matcher, constraint, known, self._vocabulary, output))

    def opened(self) -> list[tuple[Sequence, RequestError | None]]:
        """The sequences whose grammars have come since; and those whose grammars can't, and why: they are to be forgotten."""
        done = [(sequence, future) for sequence, future in self.opening.values() if future.done()]
        found: list[tuple[Sequence, RequestError | None]] = []
        for sequence, future in done:
            error = future.exception()
            if error is None:
                del self.opening[sequence.handle]
                self.matchers[sequence.handle] = matcher = future.result()
                self._keep(matcher)
                found.append((sequence, None))
            else:
                found.append((sequence, error_of(error)))
        return found

    def start(self, sequences: Iterable[Sequence]) -> "Future[Masks] | None":
        """Begin with the masks of the tokens that follow these sequences; None: none of them has a grammar."""
        turns = [self._turn(sequence, matcher) for sequence in sequences if (matcher := self.matchers.get(sequence.handle)) is not None]
        if not turns:
            return None
        assert self._vocabulary is not None
        return self._masker.submit(fill_masks, turns, self._vocabulary.result(), self.vocab_size)

    def forget(self, handle: int) -> None:
        """The sequence has ended."""
        self.matchers.pop(handle, None)
        _, future = self.opening.pop(handle, (None, None))
        if future is not None:
            future.cancel()

    def _turn(self, sequence: Sequence, matcher: Matcher) -> Turn:
        """What was decided when the matcher was last asked stands; what was foreseen then may have come otherwise."""
        first, known = sequence.num_prompt_tokens + matcher.num_decided, matcher.token_ids[matcher.num_decided :]
        present = sequence.token_ids[first:]
        num_same = next((at for at, (one, other) in enumerate(zip(known, present, strict=False)) if one != other), min(len(known), len(present)))
        turn = Turn(sequence.handle, matcher, len(known) - num_same, present[num_same:])
        matcher.token_ids[matcher.num_decided + num_same :] = turn.new_token_ids
        matcher.num_decided = min(sequence.num_decided_tokens - sequence.num_prompt_tokens, len(matcher.token_ids))
        return turn

    def _keep(self, matcher: Matcher) -> None:
        key = key_of(matcher.constraint)
        if key not in self._compiled:
            beginning = matcher.state.deep_copy()
            beginning.reset()
            self._compiled[key] = beginning
            self._num_characters += len(matcher.constraint.text)
        self._compiled.move_to_end(key)
        while len(self._compiled) > MAX_COMPILED or self._num_characters > MAX_COMPILED_TEXT:
            oldest, _ = self._compiled.popitem(last=False)
            self._num_characters -= len(oldest.text)


def key_of(constraint: Constraint) -> Constraint:
    """What the grammar depends on."""
    return replace(constraint, param="")


def open_matcher(constraint: Constraint, known: LLMatcher | None, vocabulary: "Future[Vocabulary]", token_ids: list[int]) -> Matcher:
    """A matcher after these tokens. known: the grammar, if it is compiled already. Raises Invalid."""
    state = known.deep_copy() if known is not None else compile_grammar(constraint, vocabulary.result())
    if not state.consume_tokens(token_ids):
        state = replay(constraint, vocabulary.result(), token_ids)
    return Matcher(constraint, state, list(token_ids), len(token_ids))


def replay(constraint: Constraint, vocabulary: Vocabulary, token_ids: list[int]) -> LLMatcher:
    """A matcher that shares nothing with others, after these tokens. Raises Invalid."""
    state = compile_grammar(constraint, vocabulary)
    if not state.consume_tokens(token_ids):
        raise Invalid(
            f"the answer can't be held to its constraint: {' '.join(state.get_error().split())}", param=constraint.param or None, code="constraint_failed"
        )
    return state


def fill_masks(turns: list[Turn], vocabulary: Vocabulary, vocab_size: int) -> Masks:
    """Bring the matchers to their sequences' last tokens, and ask them what may follow."""
    masks = Masks()
    rows = np.zeros((len(turns), num_bytes(vocab_size)), np.uint8)
    for row, turn in zip(rows, turns, strict=True):
        state = turn.matcher.state
        if turn.num_taken_back:
            state.rollback(turn.num_taken_back)
        state.consume_tokens(turn.new_token_ids)
        state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        try:
            if state.is_error():
                turn.matcher.state = state = replay(turn.matcher.constraint, vocabulary, turn.matcher.token_ids)
                state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                if state.is_error():
                    reason = " ".join(state.get_error().replace("<non-verbose/>", "").split())
                    raise Invalid(f"its grammar is too complex here: {reason}", param=turn.matcher.constraint.param or None, code="constraint_failed")
            masks.by_handle[turn.handle] = row
        except Exception as error:  # whatever it is, it is this row's alone
            masks.failures[turn.handle] = error_of(error)
    return masks
