"""The grammars of the sequences that run: compiled in threads, and asked for masks while the
model computes.

No step waits for one row's mask longer than the budget that its loop gives. A row whose mask is
late sits out: its sequence runs again when the mask is there, and gets the same text. A matcher
whose masks take long is asked before its row runs, in threads of its own.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from llguidance import LLMatcher

from services.compute.candidates.compiled import CompiledGrammar, GrammarCache
from services.compute.candidates.failures import error_of
from services.compute.candidates.matcher import Filling, Matcher, MatcherPath, replay_some
from services.compute.sequence import Prefix, RowKey, Sequence
from shared.model.arrays import Array
from shared.model.constraint import Constraint
from shared.model.grammar import Vocabulary
from shared.wire.messages import RequestError

NUM_MASKERS = 2  # one goes on while the other is at a mask that takes long for the first time
NUM_SLOW_MASKERS = 2
NUM_REPLAYERS = 1
SLOW_DRAFTS_S = 0.005  # of processor time, that a question about drafts may take
REPLAY_SLICE_S = 0.05  # of processor time; sequences that need more take turns


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of the tokens that the grammars of one step's sequences allow."""

    by_row: dict[RowKey, Array] = field(default_factory=dict)  # [num_bytes(vocab_size)] uint8 each
    # whose grammars can't say it, and why
    failures: dict[RowKey, RequestError] = field(default_factory=dict)
    late: frozenset[RowKey] = frozenset()  # rows whose masks are still being filled


@dataclass(slots=True)
class PendingMatcher:
    """A sequence that waits for its matcher."""

    sequence: Sequence
    constraint: Constraint
    compiling: Future[CompiledGrammar]
    matcher: Matcher | None = None
    replaying: Future[None] | None = None


@dataclass(frozen=True, slots=True)
class Masking:
    """The masks of a step, under way."""

    matchers: dict[RowKey, Matcher]
    filling: Filling | None  # of those whose masks were not there
    stale: frozenset[RowKey]  # rows whose matchers are still at earlier tokens

    def result(self, timeout_s: float | None = None) -> Masks:
        """The masks that are there after this time; None: all of them."""
        if self.filling is not None:
            self.filling.is_done.wait(timeout_s)
        masks, late = Masks(), set(self.stale)
        for key, matcher in self.matchers.items():
            outcome = (
                matcher.filling.outcomes.get(key) if matcher.filling is not None and key not in self.stale else None
            )
            if outcome is None:
                late.add(key)
            elif isinstance(outcome, RequestError):
                masks.failures[key] = outcome
            else:
                masks.by_row[key] = outcome
        return Masks(masks.by_row, masks.failures, frozenset(late))


class Constraints:
    """The grammars of this replica's sequences. The methods belong to the loop; what they start
    runs in threads."""

    def __init__(self, load: Callable[[], Vocabulary], vocab_size: int) -> None:
        """load: as GrammarCache takes it."""
        self.vocab_size = vocab_size
        self.grammars = GrammarCache(load)
        self.matchers: dict[int, Matcher] = {}  # by handle
        self.opening: dict[int, PendingMatcher] = {}  # by handle: sequences that wait for their grammars
        # by handle: those whose masks come before their rows run
        self.late: dict[int, Matcher] = {}
        # handles without drafts until they have run: other drafts would want other masks, late again
        self._undrafted: set[int] = set()
        self._maskers = ThreadPoolExecutor(NUM_MASKERS, "mask")
        self._slow_maskers = ThreadPoolExecutor(NUM_SLOW_MASKERS, "slow-mask")
        self._replayers = ThreadPoolExecutor(NUM_REPLAYERS, "replay")

    def open(self, sequence: Sequence, constraint: Constraint) -> None:
        """Have the sequence's grammar compiled; `opened` says when it is there."""
        self.opening[sequence.handle] = PendingMatcher(
            sequence, constraint, self.grammars.get(constraint, self._running())
        )

    def opened(self) -> list[tuple[Sequence, RequestError | None]]:
        """The sequences whose grammars have come since; and those whose grammars can't, and why:
        they are to be forgotten."""
        found: list[tuple[Sequence, RequestError | None]] = []
        for opening in list(self.opening.values()):
            try:
                matcher = self._advance(opening)
            except BaseException as error:  # whatever a thread raised, it is this request's alone
                found.append((opening.sequence, error_of(error)))
                continue
            if matcher is not None:
                self._forget_opening(opening)
                self.matchers[opening.sequence.handle] = matcher
                found.append((opening.sequence, None))
        return found

    def start(self, prefixes: Iterable[Prefix]) -> Masking | None:
        """Begin with the masks of the tokens that follow these prefixes; None: no sequence of them
        has a grammar. Several of one sequence come in their order, and its grammar allows the
        tokens that lie between them."""
        asked: dict[int, list[Prefix]] = {}
        for prefix in prefixes:
            if prefix.sequence.handle in self.matchers:
                asked.setdefault(prefix.sequence.handle, []).append(prefix)
        if not asked:
            return None
        matchers = {prefix.key: self.matchers[handle] for handle, some in asked.items() for prefix in some}
        stale: set[RowKey] = set()
        turns = []
        for handle, some in asked.items():
            matcher = self.matchers[handle]
            turn = matcher.step_to(some)
            if turn.is_there:
                self._undrafted.discard(handle)
                continue
            if matcher.is_busy:
                stale.update(turn.keys)
            else:
                turns.append(turn)
        filling = self._fill(sorted(turns, key=lambda turn: turn.matcher.seconds), self._maskers) if turns else None
        return Masking(matchers, filling, frozenset(stale))

    def hold_back(self, handles: Iterable[int], *, for_life: bool = False) -> None:
        """Hold back rows whose masks were late: they sit out until their masks are there. for_life: so do all
        later rows of these sequences."""
        for handle in handles:
            self._undrafted.add(handle)
            self.late[handle] = matcher = self.matchers[handle]
            matcher.stays_slow |= for_life

    def sitting_out(self) -> frozenset[int]:
        """Before each step: the handles that may not run in it, for their masks are not there."""
        self.grammars.tidy()
        found = set()
        for handle, matcher in list(self.late.items()):
            sequence = matcher.sequence
            if matcher.is_busy or sequence.tokens.is_pending:
                found.add(handle)
            elif not matcher.is_slow:
                del self.late[handle]
            elif not sequence.tokens.is_ending and not (turn := matcher.step_to([sequence.prefix()])).is_there:
                self._fill([turn], self._slow_maskers)
                found.add(handle)
        return frozenset(found)

    def allowed(self, sequence: Sequence, token_ids: list[int]) -> list[int]:
        """The first of some tokens that its grammar allows behind the sequence's, all of them where
        it has none; none while that can't be said at once."""
        if sequence.handle not in self.matchers or not token_ids:
            return token_ids
        return self._ask(sequence.handle, lambda state: token_ids[: state.validate_tokens(token_ids)])

    def forced(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """The tokens that its grammar leaves no choice about behind the sequence's, so many at
        max_tokens: another may come where they can be put together otherwise."""
        if sequence.handle not in self.matchers:
            return []
        return self._ask(sequence.handle, lambda state: state.compute_ff_tokens()[:max_tokens])

    def _ask(self, handle: int, question: Callable[[LLMatcher], list[int]]) -> list[int]:
        """Asks the matcher's state behind its sequence's last token. The loop waits for the answer, so it
        must come fast: a matcher that was slow is asked no more."""
        matcher = self.matchers[handle]
        if (
            matcher.is_busy
            or matcher.is_slow
            or matcher.has_slow_drafts
            or handle in self.late
            or handle in self._undrafted
        ):
            return []
        began = time.thread_time()
        try:
            matcher.follow()
            found = [] if matcher.state.is_error() or matcher.state.is_stopped() else question(matcher.state)
        except BaseException:  # a panic in Rust too: the mask of its next token will say what it is
            matcher.has_slow_drafts = True
            return []
        matcher.has_slow_drafts = time.thread_time() - began > SLOW_DRAFTS_S
        return found

    def forget(self, handle: int) -> None:
        """The sequence has ended."""
        self.late.pop(handle, None)
        self._undrafted.discard(handle)
        matcher = self.matchers.pop(handle, None)
        if matcher is not None and matcher.grammar not in self._running():
            self.grammars.release(matcher.grammar, has_failed=matcher.has_failed)
        if (opening := self.opening.get(handle)) is not None:
            self._forget_opening(opening)

    def _running(self) -> list[CompiledGrammar]:
        return [matcher.grammar for matcher in self.matchers.values()]

    def _advance(self, opening: PendingMatcher) -> Matcher | None:
        """The matcher, if it has come to its sequence's last token. Raises what its threads did,
        and Invalid."""
        if not opening.compiling.done():
            return None
        sequence = opening.sequence
        output = sequence.tokens.ids[sequence.tokens.num_prompt :]
        if opening.matcher is None:
            grammar = opening.compiling.result()
            self.grammars.begin(grammar, self._running())
            opening.matcher = Matcher(sequence, opening.constraint, grammar, grammar.beginning.deep_copy())
        elif opening.replaying is not None and not opening.replaying.done():
            return None
        elif opening.replaying is not None:
            opening.replaying.result()
        matcher = opening.matcher
        if len(matcher.token_ids) == len(output):
            matcher.num_decided = len(output)
            return matcher
        opening.replaying = self._replayers.submit(
            replay_some, matcher, output, self.grammars.vocabulary.result(), REPLAY_SLICE_S
        )
        return None

    def _forget_opening(self, opening: PendingMatcher) -> None:
        del self.opening[opening.sequence.handle]
        if not any(each.constraint == opening.constraint for each in self.opening.values()):
            self.grammars.forget(opening.constraint)

    def _fill(self, turns: list[MatcherPath], lane: ThreadPoolExecutor) -> Filling:
        filling = Filling(turns, self.grammars.vocabulary.result(), self.vocab_size, self._slow_maskers)
        lane.submit(filling.run)
        return filling
