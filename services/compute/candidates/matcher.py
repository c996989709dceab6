"""Matcher: a sequence's place in its grammar; and the filling of masks, in threads.

A matcher's state is a function of its sequence's output tokens, decided and foreseen, and of
nothing else. So it is made again wherever the tokens are (after a crash, at another replica), goes
forward with them, and back where foreseen ones are taken back.

Matchers of one text share what the library has worked out of it. If that outgrows its limits,
because of any of them, a sequence gets a matcher of its own: whether it fails depends on its own
tokens alone.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event

import numpy as np
from llguidance import LLMatcher

from services.compute.candidates.compiled import CompiledGrammar
from services.compute.candidates.failures import error_of
from services.compute.candidates.row_mask import num_bytes
from services.compute.sequence import Prefix, RowKey, Sequence
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
    grammar: CompiledGrammar
    state: LLMatcher
    token_ids: list[int] = field(default_factory=list)  # of the output, that the state has taken in
    num_decided: int = 0  # of those, that will not be taken back
    filling: "Filling | None" = None  # the last: its last mask follows token_ids
    keys: tuple[RowKey, ...] = ()  # of the masks of that filling that are this sequence's
    seconds: float = 0.0  # that the slowest of them took
    stays_slow: bool = False  # a late mask cost too much once
    has_failed: bool = False
    has_slow_drafts: bool = False  # to ask it about them took too long once

    @property
    def is_busy(self) -> bool:
        return self.filling is not None and any(key not in self.filling.outcomes for key in self.keys)

    @property
    def is_slow(self) -> bool:
        return self.stays_slow or self.seconds > SLOW_S

    def step_to(self, prefixes: list[Prefix]) -> "MatcherPath":
        """How it comes to some prefixes of its sequence, each longer than the one
        before. What was decided when it was last asked stands; what was foreseen then may have come
        otherwise."""
        sequence, keys, last = self.sequence, tuple(prefix.key for prefix in prefixes), prefixes[-1].num_tokens
        num_same, end = self._num_same(last), sequence.tokens.num_prompt + len(self.token_ids)
        if num_same == end == last and self.filling is not None and set(keys) <= set(self.keys):
            return MatcherPath(sequence, self, keys, 0, ())
        at, parts = min(num_same, prefixes[0].num_tokens), []
        num_taken_back = end - at
        for prefix in prefixes:
            parts.append(sequence.tokens.ids[at : prefix.num_tokens])
            at = prefix.num_tokens
        return MatcherPath(sequence, self, keys, num_taken_back, tuple(parts))

    def follow(self) -> None:
        """Come to the sequence's last token, in the loop: no mask is wanted. Not while it is busy.
        The state may be in error then."""
        sequence, num_same = self.sequence, self._num_same(len(self.sequence.tokens))
        num_taken_back = sequence.tokens.num_prompt + len(self.token_ids) - num_same
        if not num_taken_back and num_same == len(sequence.tokens):
            return
        self.filling = None  # its masks are those of other tokens
        if num_taken_back:
            self.state.rollback(num_taken_back)
            del self.token_ids[-num_taken_back:]
        if len(sequence.tokens) > num_same:
            self.state.consume_tokens(sequence.tokens.ids[num_same:])
            self.token_ids.extend(sequence.tokens.ids[num_same:])
        self.num_decided = min(sequence.tokens.num_decided - sequence.tokens.num_prompt, len(self.token_ids))

    def _num_same(self, last: int) -> int:
        """How many of the sequence's first `last` tokens the state has taken in, the prompt among
        them."""
        first, known = self.sequence.tokens.num_prompt + self.num_decided, self.token_ids[self.num_decided :]
        present = self.sequence.tokens.ids[first:last]
        return first + next(
            (at for at, (one, other) in enumerate(zip(known, present, strict=False)) if one != other),
            min(len(known), len(present)),
        )


@dataclass(frozen=True, slots=True)
class MatcherPath:
    """How a matcher comes to some prefixes of its sequence, one after the other."""

    sequence: Sequence
    matcher: Matcher
    keys: tuple[RowKey, ...]
    num_taken_back: int
    # by key: the tokens that lead to the prefix from the one before it; empty: the masks that were
    # filled last are those that are wanted
    parts: tuple[list[int], ...]

    @property
    def is_there(self) -> bool:
        return not self.parts

    def take(self, filling: "Filling") -> None:
        """Give the matcher to the filling."""
        matcher, sequence = self.matcher, self.sequence
        del matcher.token_ids[len(matcher.token_ids) - self.num_taken_back :]
        for part in self.parts:
            matcher.token_ids.extend(part)
        matcher.num_decided = min(sequence.tokens.num_decided - sequence.tokens.num_prompt, len(matcher.token_ids))
        matcher.filling, matcher.keys, matcher.seconds = filling, self.keys, 0.0


class Filling:
    """Masks that a thread fills, one after the other. An outcome is a mask, [num_bytes(vocab_size)]
    uint8, or why there is none."""

    def __init__(
        self, turns: list[MatcherPath], vocabulary: Vocabulary, vocab_size: int, slow_lane: ThreadPoolExecutor
    ) -> None:
        self.outcomes: dict[RowKey, Array | RequestError] = {}
        self.is_done = Event()
        self._turns = turns
        self._num_rows = sum(len(turn.keys) for turn in turns)
        self._vocabulary = vocabulary
        self._rows = np.zeros((self._num_rows, num_bytes(vocab_size)), np.uint8)
        self._slow_lane = slow_lane
        for turn in turns:
            turn.take(self)

    def run(self) -> None:
        """Fill the masks, in a thread."""
        rows = iter(self._rows)
        for turn in self._turns:
            some = [next(rows) for _ in turn.keys]
            num_filled = self._fill(turn, some)
            if num_filled < len(some):
                self._slow_lane.submit(self._refill, turn, some, num_filled)

    def _fill(self, turn: MatcherPath, rows: list[Array]) -> int:
        """Returns how many of the turn's masks have outcomes: not the rest where the matcher has to
        be made again, and that takes long."""
        matcher, num_taken_back = turn.matcher, turn.num_taken_back
        for number, (part, row) in enumerate(zip(turn.parts, rows, strict=True)):
            began = time.thread_time()
            try:
                if num_taken_back:
                    matcher.state.rollback(num_taken_back)
                    num_taken_back = 0
                matcher.state.consume_tokens(part)
                matcher.state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                if matcher.state.is_error() and matcher.grammar.seconds > SLOW_S:
                    return number
                self._judge(turn, number, row, began)
                self._end(turn, number, row, began)
            except BaseException as error:  # whatever it is, a panic in Rust too, it is this row's alone
                self._end(turn, number, error_of(error), began)
        return len(rows)

    def _refill(self, turn: MatcherPath, rows: list[Array], first: int) -> None:
        """Fill the turn's masks from the first that has no outcome, in a thread of the slow lane."""
        for number in range(first, len(rows)):
            began = time.thread_time()
            try:
                if number > first:
                    turn.matcher.state.consume_tokens(turn.parts[number])
                    turn.matcher.state.unsafe_compute_mask_ptr(rows[number].ctypes.data, rows[number].nbytes)
                self._judge(turn, number, rows[number], began)
                self._end(turn, number, rows[number], began)
            except BaseException as error:
                self._end(turn, number, error_of(error), began)

    def _judge(self, turn: MatcherPath, number: int, row: Array, began: float) -> None:
        """Fill the row by a matcher of its own if the shared one is worn out. Raises Invalid for a
        grammar that is too complex."""
        matcher = turn.matcher
        if matcher.state.is_error():
            num_behind = sum(map(len, turn.parts[number + 1 :]))
            matcher.state = replay(
                matcher.constraint, self._vocabulary, matcher.token_ids[: len(matcher.token_ids) - num_behind]
            )
            matcher.state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if matcher.state.is_error():
                raise too_complex(
                    matcher.constraint, " ".join(matcher.state.get_error().replace("<non-verbose/>", "").split())
                )
        elif (seconds := time.thread_time() - began) > MASK_LIMIT_S:
            raise too_complex(
                matcher.constraint,
                f"what may follow took {seconds:.1f} s of processor time to find, and {MASK_LIMIT_S:g} s is the most",
            )

    def _end(self, turn: MatcherPath, number: int, outcome: Array | RequestError, began: float) -> None:
        matcher, seconds = turn.matcher, time.thread_time() - began
        matcher.seconds = max(matcher.seconds, seconds)
        matcher.has_failed |= isinstance(outcome, RequestError)
        if seconds > GROWTH_S:
            matcher.grammar.seconds += seconds
        self.outcomes[turn.keys[number]] = outcome
        if len(self.outcomes) == self._num_rows:
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
            raise Invalid(
                f"the answer can't be held to its constraint: {reason}",
                param=constraint.param or None,
                code="constraint_failed",
            )
        if time.thread_time() - began > REPLAY_LIMIT_S:
            raise too_complex(
                constraint, f"it takes more than {REPLAY_LIMIT_S:g} s of processor time to find its place again"
            )
    return state


def too_complex(constraint: Constraint, reason: str) -> Invalid:
    return Invalid(
        f"its grammar is too complex here: {reason}", param=constraint.param or None, code="constraint_failed"
    )
