"""Compiled grammars: one text is compiled once for all requests that have it, and the compiled ones
are bounded by bytes.

The library does not say how much memory a grammar holds. It spends its processor time on making
expressions and states, so the time bounds the bytes: BYTES_PER_S is the largest rate measured.
"""

import ctypes
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher
from msgspec.structs import replace

from shared.model.constraint import Constraint
from shared.model.grammar import Vocabulary, compile_grammar
from shared.process.deep_stack import deep_threads
from shared.process.errors import Invalid

NUM_COMPILERS = 2
BYTES_PER_S = 384 << 20  # of processor time in the library
BYTES_PER_CHARACTER = 64  # of a grammar's text
MAX_KEPT = 256  # grammars that no sequence runs at the moment
MAX_KEPT_BYTES = 128 << 20  # of all of these
MAX_KEPT_EACH = 16 << 20  # a larger one is compiled again when it comes again
MAX_RUNNING_BYTES = 512 << 20  # of those that run; beyond it only small ones begin
SMALL_BYTES = 4 << 20
TRIM_BYTES = 32 << 20  # freed in the allocator, before it is asked to return memory to the system


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A compiled constraint."""

    key: Constraint
    beginning: LLMatcher  # only ever copied, by the loop
    seconds: float  # of processor time that the library has spent on it

    @property
    def size_bytes(self) -> int:
        """An upper bound, estimated from time and text."""
        return int(self.seconds * BYTES_PER_S) + len(self.key.text) * BYTES_PER_CHARACTER


class GrammarCache:
    """Compiled grammars. The methods belong to the loop; grammars are compiled in threads."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        """load: called in a thread when the first grammar comes, and again only after an Invalid of
        503."""
        self.kept: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()  # the last used last
        self._load = load
        self._vocabulary: Future[Vocabulary] | None = None
        self._compiling: dict[Constraint, Future[CompiledGrammar]] = {}
        self._compilers = deep_threads(NUM_COMPILERS, "compile-grammar")
        self._num_freed_bytes = 0

    @property
    def vocabulary(self) -> "Future[Vocabulary]":
        known = self._vocabulary
        failure = known.exception() if known is not None and known.done() else None
        if known is None or (isinstance(failure, Invalid) and failure.status == 503):
            known = self._vocabulary = self._compilers.submit(self._load)
        return known

    def get(self, constraint: Constraint, running: Iterable[CompiledGrammar]) -> "Future[CompiledGrammar]":
        """The constraint's grammar, once it is compiled. running: those of the sequences that
        run."""
        key, vocabulary = key_of(constraint), self.vocabulary
        known = self.kept.get(key) or next((each for each in running if each.key == key), None)
        if known is not None:
            found: Future[CompiledGrammar] = Future()
            found.set_result(known)
            return found
        if constraint not in self._compiling:
            self._compiling[constraint] = self._compilers.submit(compile_timed, constraint, vocabulary)
        return self._compiling[constraint]

    def begin(self, grammar: CompiledGrammar, running: Iterable[CompiledGrammar]) -> None:
        """Register that a sequence runs it. Raises Invalid (503) if memory is short."""
        held = {id(each): each.size_bytes for each in running}
        if (
            id(grammar) not in held
            and grammar.size_bytes > SMALL_BYTES
            and sum(held.values()) + grammar.size_bytes > MAX_RUNNING_BYTES
        ):
            raise Invalid(
                "the grammars of the requests that run have reached their memory limit: try again later",
                code="grammars_full",
                status=503,
            )
        self.keep(grammar)

    def forget(self, constraint: Constraint) -> None:
        """No sequence waits for its compilation any more."""
        future = self._compiling.pop(constraint, None)
        if future is not None and not future.cancel() and future.done() and future.exception() is None:
            self.keep(future.result())

    def keep(self, grammar: CompiledGrammar) -> None:
        """Keep it as the one used last, within the bounds."""
        self.kept.pop(grammar.key, None)
        if grammar.size_bytes <= MAX_KEPT_EACH:
            self.kept[grammar.key] = grammar
        while len(self.kept) > MAX_KEPT or sum(each.size_bytes for each in self.kept.values()) > MAX_KEPT_BYTES:
            self._free(self.kept.popitem(last=False)[1])

    def release(self, grammar: CompiledGrammar, *, has_failed: bool) -> None:
        """A sequence that ran it has ended; it may have grown. has_failed: through the grammar,
        which is not kept then."""
        if has_failed:
            self.kept.pop(grammar.key, None)
        else:
            self.keep(grammar)
        if grammar.key not in self.kept:
            self._free(grammar)

    def _free(self, grammar: CompiledGrammar) -> None:
        """Drop the grammar. The memory goes back to the allocator with the last reference, and to
        the system by `tidy`."""
        self._num_freed_bytes += grammar.size_bytes

    def tidy(self) -> None:
        """Before each step: give memory back to the system, if much of it has become free."""
        if self._num_freed_bytes > TRIM_BYTES:
            self._num_freed_bytes = 0
            self._compilers.submit(trim_memory)


def key_of(constraint: Constraint) -> Constraint:
    """The fields that decide the grammar."""
    return replace(constraint, param="")


def compile_timed(constraint: Constraint, vocabulary: "Future[Vocabulary]") -> CompiledGrammar:
    """Raises Invalid."""
    known = vocabulary.result()
    began = time.thread_time()
    beginning = compile_grammar(constraint, known)
    return CompiledGrammar(key_of(constraint), beginning, time.thread_time() - began)


def trim_memory() -> None:
    """glibc keeps what threads have freed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
