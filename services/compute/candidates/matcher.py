"""Matcher: a sequence's place in its grammar; and the filling of masks, in threads.

A matcher's state is a function of its sequence's output tokens, decided and foreseen, and of
nothing else. So it is made again wherever the tokens are (after a crash, at another replica), goes
forward with them, and back where foreseen ones are taken back.

Matchers of one text share what the library has worked out of it. Should that outgrow its limits,
through whoever, a sequence gets a matcher of its own: what ends in an error depends on the
sequence's own tokens.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event

import numpy as np
from llguidance import LLMatcher

from services.compute.candidates.compiled import Grammar
from services.compute.candidates.failures import error_of
from services.compute.candidates.row_mask import num_bytes
from services.compute.sequence import Sequence
from shared.model.arrays import Array
from shared.model.constraint import Constraint
from shared.model.grammar import Vocabulary, compile_grammar
from shared.process.errors import Invalid
from shared.wire.messages import RequestError

# Processor time of a thread: what the machine does meanwhile is not the grammar's fault
SLOW_S = 0.01  # a mask that takes longer is filled before its row runs, and away from the others
GROWTH_S = 0.001  # a mask that takes longer has made new states, which stay
MASK_LIMIT_S = 1.0  # the library's own limits end a mask after a tenth of it
REPLAY_LIMIT_S = 10.0  # 3 µs a token are usual
REPLAY_TOKENS = 64  # between two looks at the clock


@dataclass(slots=True, eq=False)
class Matcher:
    """The loop begins fillings; while one runs, `state` and `token_ids` are the thread's."""

    sequence: Sequence
    constraint: Constraint
    grammar: Grammar
    state: LLMatcher
    token_ids: list[int] = field(default_factory=list)  # of the output, that the state has taken in
    num_decided: int = 0  # of those, that will not be taken back
    filling: "Filling | None" = None  # the last: of the mask that follows token_ids
    seconds: float = 0.0  # that the last mask took
    has_failed: bool = False

    @property
    def is_busy(self) -> bool:
        return self.filling is not None and self.sequence.handle not in self.filling.outcomes

    @property
    def is_slow(self) -> bool:
        return self.seconds > SLOW_S

    def step_to(self, sequence: Sequence) -> "Turn":
        """How it comes to the sequence's last token. What was decided when it was last asked
        stands; what was foreseen then may have come otherwise."""
        first, known = sequence.num_prompt_tokens + self.num_decided, self.token_ids[self.num_decided :]
        present = sequence.token_ids[first:]
        num_same = next((at for at, (one, other) in enumerate(zip(known, present, strict=False)) if one != other), min(len(known), len(present)))
        return Turn(sequence, self, len(known) - num_same, present[num_same:])


@dataclass(frozen=True, slots=True)
class Turn:
    """How a matcher comes to its sequence's last token."""

    sequence: Sequence
    matcher: Matcher
    num_taken_back: int
    new_token_ids: list[int]

    @property
    def is_there(self) -> bool:
        """Whether the mask that was filled last is the one that is wanted."""
        return not self.num_taken_back and not self.new_token_ids and self.matcher.filling is not None

    def take(self, filling: "Filling") -> None:
        """Give the matcher to the filling."""
        matcher, sequence = self.matcher, self.sequence
        del matcher.token_ids[len(matcher.token_ids) - self.num_taken_back :]
        matcher.token_ids.extend(self.new_token_ids)
        matcher.num_decided = min(sequence.num_decided_tokens - sequence.num_prompt_tokens, len(matcher.token_ids))
        matcher.filling = filling


class Filling:
    """Masks that a thread fills, one after the other. An outcome is a mask, [num_bytes(vocab_size)]
    uint8, or why there is none."""

    def __init__(self, turns: list[Turn], vocabulary: Vocabulary, vocab_size: int, slow_lane: ThreadPoolExecutor) -> None:
        self.outcomes: dict[int, Array | RequestError] = {}  # by handle
        self.is_done = Event()
        self._turns = turns
        self._num_turns = len(turns)
        self._vocabulary = vocabulary
        self._rows = np.zeros((len(turns), num_bytes(vocab_size)), np.uint8)
        self._slow_lane = slow_lane
        for turn in turns:
            turn.take(self)

    def run(self) -> None:
        """Fill a mask, in a thread."""
        for turn, row in zip(self._turns, self._rows, strict=True):
            if not self._fill(turn, row):
                self._slow_lane.submit(self._refill, turn, row)

    def _fill(self, turn: Turn, row: Array) -> bool:
        """Whether there is an outcome. There is none where the matcher has to be made again, and
        that takes long."""
        matcher, began = turn.matcher, time.thread_time()
        try:
            if turn.num_taken_back:
                matcher.state.rollback(turn.num_taken_back)
            matcher.state.consume_tokens(turn.new_token_ids)
            matcher.state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if matcher.state.is_error() and matcher.grammar.seconds > SLOW_S:
                return False
            self._judge(matcher, row, began)
            self._end(turn, row, began)
        except BaseException as error:  # whatever it is, a panic in Rust too, it is this row's alone
            self._end(turn, error_of(error), began)
        return True

    def _refill(self, turn: Turn, row: Array) -> None:
        """Catch up and fill a mask, in a thread of the slow lane."""
        began = time.thread_time()
        try:
            self._judge(turn.matcher, row, began)
            self._end(turn, row, began)
        except BaseException as error:
            self._end(turn, error_of(error), began)

    def _judge(self, matcher: Matcher, row: Array, began: float) -> None:
        """Fill the row by a matcher of its own if the shared one is worn out. Raises Invalid for a
        grammar that is too complex."""
        if matcher.state.is_error():
            matcher.state = replay(matcher.constraint, self._vocabulary, matcher.token_ids)
            matcher.state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if matcher.state.is_error():
                raise too_complex(matcher.constraint, " ".join(matcher.state.get_error().replace("<non-verbose/>", "").split()))
        elif (seconds := time.thread_time() - began) > MASK_LIMIT_S:
            raise too_complex(matcher.constraint, f"what may follow took {seconds:.1f} s of processor time to find, and {MASK_LIMIT_S:g} s is the most")

    def _end(self, turn: Turn, outcome: Array | RequestError, began: float) -> None:
        matcher = turn.matcher
        matcher.seconds = time.thread_time() - began
        matcher.has_failed = isinstance(outcome, RequestError)
        if matcher.seconds > GROWTH_S:
            matcher.grammar.seconds += matcher.seconds
        self.outcomes[turn.sequence.handle] = outcome
        if len(self.outcomes) == self._num_turns:
            # they hold the matchers, which hold this: no grammar is to wait for the garbage
            # collector
            self._turns = []
            self.is_done.set()


def replay_some(matcher: Matcher, token_ids: list[int], vocabulary: Vocabulary, slice_s: float) -> None:
    """Take in the output's tokens, as many as the time allows. Raises Invalid for an output that
    the grammar does not allow."""
    began = time.thread_time()
    while len(matcher.token_ids) < len(token_ids):
        some = token_ids[len(matcher.token_ids) : len(matcher.token_ids) + REPLAY_TOKENS]
        if not matcher.state.consume_tokens(some):
            matcher.state = replay(matcher.constraint, vocabulary, token_ids)
            some = token_ids[len(matcher.token_ids) :]
        matcher.token_ids.extend(some)
        if time.thread_time() - began > slice_s:
            return


def replay(constraint: Constraint, vocabulary: Vocabulary, token_ids: list[int]) -> LLMatcher:
    """A matcher that shares nothing with others, after these tokens. Raises Invalid."""
    began, state = time.thread_time(), compile_grammar(constraint, vocabulary)
    for at in range(0, len(token_ids), REPLAY_TOKENS):
        if not state.consume_tokens(token_ids[at : at + REPLAY_TOKENS]):
            reason = " ".join(state.get_error().split())
            raise Invalid(f"the answer can't be held to its constraint: {reason}", param=constraint.param or None, code="constraint_failed")
        if time.thread_time() - began > REPLAY_LIMIT_S:
            raise too_complex(constraint, f"it takes more than {REPLAY_LIMIT_S:g} s of processor time to find its place again")
    return state


def too_complex(constraint: Constraint, reason: str) -> Invalid:
    return Invalid(f"its grammar is too complex here: {reason}", param=constraint.param or None, code="constraint_failed")
